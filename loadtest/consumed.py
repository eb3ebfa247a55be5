"""The journals of consumers' workers, and the checks of these journals, for `make produce`.

A worker writes a line to its journal for each event before it continues, so that a SIGKILL loses
none. Times are of CLOCK_MONOTONIC, which all processes of a machine share. The checks require:

- Each record has at least one `done` line.
- The records of a lease are in order and without a gap, from the lease's offset on.
- A later lease or observation never shows an offset below an acknowledged commit.
- A record is delivered again only if its lease ended before the record was committed.
- After a lease was granted to another worker, no commit of an earlier holder is accepted.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from quorumlog.errors import LeaseLost

REFUSED: Final = LeaseLost.code
TAKEN: Final = "taken"


class Journal:
    """The journal of one worker, opened for appending."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.next = 0
        """The offset after the last processed record."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def held(self, token: int, asked_ns: int, position: int) -> None:
        """Note that a lease was granted, with the committed offset."""
        self._write("held", token, asked_ns, time.monotonic_ns(), position)

    def done(self, token: int, offset: int, value: bytes) -> None:
        """Note that a record was processed."""
        self._write("done", token, offset, value.decode())
        self.next = offset + 1

    def reported(self, token: int, asked_ns: int, offset: int) -> None:
        """Note that a commit was acknowledged."""
        self._write("told", token, asked_ns, time.monotonic_ns(), offset)

    def left(self, token: int) -> None:
        """Note that the lease was released."""
        self._write("left", token)

    def zombie(self, token: int, what: str) -> None:
        """Note the outcome of a commit without the lease: TAKEN if accepted, or an error code."""
        self._write("zombie", token, what)

    def _write(self, *words: object) -> None:
        self._file.write(" ".join(map(str, words)).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Known:
    """A committed offset from the cluster, with the times of the request and the response."""

    asked_ns: int
    told_ns: int
    offset: int


@dataclass(slots=True)
class Lease:
    """The actions of one worker under one fencing token."""

    token: int
    granted: Known
    """The committed offset when the lease was granted."""
    done: list[tuple[int, bytes]] = field(default_factory=list)
    commits: list[Known] = field(default_factory=list)
    zombies: list[str] = field(default_factory=list)
    """Outcomes of commits that were sent after the lease was lost."""

    @property
    def committed(self) -> int:
        """The highest committed offset that the worker knows."""
        return max((each.offset for each in self.commits), default=self.granted.offset)

    @property
    def uncommitted(self) -> int:
        """Number of processed records that the worker does not know to be committed."""
        return sum(offset >= self.committed for offset, _ in self.done)


def read_leases(path: Path) -> Iterator[Lease]:
    """Yield the leases in a worker's journal. An incomplete last line is ignored."""
    lease: Lease | None = None
    for line in path.read_bytes().split(b"\n")[:-1]:
        kind, token, *words = line.split(b" ")
        if kind == b"held":
            if lease is not None:
                yield lease
            lease = Lease(int(token), Known(*map(int, words)))
            continue
        assert lease is not None, line
        assert lease.token == int(token), line
        match kind:
            case b"done":
                lease.done.append((int(words[0]), words[1]))
            case b"told":
                lease.commits.append(Known(*map(int, words)))
            case b"zombie":
                lease.zombies.append(words[0].decode())
            case b"left":
                pass
            case _:
                raise AssertionError(line)
    if lease is not None:
        yield lease


@dataclass(frozen=True, slots=True)
class Consumed:
    """The results of a run's consumers."""

    leases: int = 0
    lost: int = 0
    """Records that no worker has processed."""
    again: int = 0
    """How many times records were processed again."""
    bound: int = 0
    """The upper bound of `again`: the sum of uncommitted records at the ends of leases."""
    back: int = 0
    """Leases and observations that got an offset below an acknowledged commit."""
    zombies: int = 0
    """Rejected commits of workers that had lost their lease."""
    problems: tuple[str, ...] = ()

    def __add__(self, other: "Consumed") -> "Consumed":
        """The sum of two results."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Consumed(*(mine + its for mine, its in pairs))

    @property
    def is_good(self) -> bool:
        """Whether all requirements of this module hold."""
        return not (self.lost or self.back or self.problems or self.again > self.bound)


def judge_consumer(
    name: str,
    leases: Sequence[Lease],
    looks: Sequence[Known],
    records: Sequence[bytes],
    *,
    commit_every: int,
) -> Consumed:
    """Compare the leases of one consumer with the log's records. `looks`: committed offsets that
    others observed. `commit_every`: the maximum records that a worker processes before it commits.
    """
    leases = sorted(leases, key=lambda lease: lease.token)
    problems = [*_of_tokens(leases), *_of_records(leases, records, commit_every)]
    done = [offset for lease in leases for offset, _ in lease.done]
    reported = list(itertools.chain.from_iterable(lease.zombies for lease in leases))
    if wrong := [what for what in reported if what != REFUSED]:
        problems.append(f"{len(wrong)} commits without the lease were not refused: {wrong[0]}")
    return Consumed(
        leases=len(leases),
        lost=len(set(range(len(records))).difference(done)),
        again=len(done) - len(set(done)),
        bound=sum(lease.uncommitted for lease in leases[:-1]),
        back=_back(leases, looks),
        zombies=reported.count(REFUSED),
        problems=tuple(f"{name}: {problem}" for problem in problems),
    )


def _of_tokens(leases: Sequence[Lease]) -> Iterator[str]:
    """Check that fencing tokens are unique and rise, and that none commits after a higher one."""
    asked_ns = 0
    for lease in leases:
        if lease.granted.told_ns < asked_ns:
            yield f"token {lease.token} was given out before a lower one"
        asked_ns = max(asked_ns, lease.granted.asked_ns)
    for before, after in itertools.pairwise(leases):
        if before.token == after.token:
            yield f"token {before.token} was given out twice"
    higher_ns: int | None = None
    for lease in reversed(leases):
        late = [c for c in lease.commits if higher_ns is not None and c.asked_ns > higher_ns]
        if late:
            yield f"{len(late)} commits with token {lease.token} were accepted after a higher token"
        told_ns = lease.granted.told_ns
        higher_ns = told_ns if higher_ns is None else min(higher_ns, told_ns)


def _of_records(
    leases: Sequence[Lease], records: Sequence[bytes], commit_every: int
) -> Iterator[str]:
    """Check that each lease has the log's records from its offset on, with few uncommitted ones."""
    for lease in leases:
        start = lease.granted.offset
        expected = list(enumerate(records[start : start + len(lease.done)], start))
        if lease.done != expected:
            yield f"the records of token {lease.token} are not those from {start} on"
        offsets = [start, *(commit.offset for commit in lease.commits)]
        if offsets != sorted(offsets):
            yield f"the commits of token {lease.token} go back: {offsets}"
        if lease.uncommitted > commit_every:
            yield f"{lease.uncommitted} records of token {lease.token} were not committed"


def _back(leases: Sequence[Lease], looks: Sequence[Known]) -> int:
    """Count returned offsets below an earlier known offset, by order of tokens and by time."""
    back = known = 0
    for lease in leases:
        back += lease.granted.offset < known
        known = max(known, lease.committed)
    reported = [*looks]
    for lease in leases:
        reported += [lease.granted, *lease.commits]
    reported.sort(key=lambda each: each.told_ns)
    highest = list(itertools.accumulate((each.offset for each in reported), max))
    at = 0
    asked = [*looks, *(lease.granted for lease in leases)]
    for each in sorted(asked, key=lambda each: each.asked_ns):
        while at < len(reported) and reported[at].told_ns < each.asked_ns:
            at += 1
        back += at > 0 and each.offset < highest[at - 1]
    return back
