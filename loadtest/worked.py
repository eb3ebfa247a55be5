"""The journals of queues' workers, and the checks of these journals, for `make produce`.

A worker writes each event to its journal as one line before it continues, so that a SIGKILL loses
no event. Times are of CLOCK_MONOTONIC, which all processes of a machine share. Tokens order the
claims of a queue. The checks require:

- Each record was sent for acknowledgement or is a dead letter. No dead letter was acknowledged.
- No record that was acknowledged with one token was given again with a higher token.
- While a claim is valid for its worker and not settled, no other worker gets the claim's records.
- With the order `key`, a record is given only after the last claims of earlier records of its key.
- Each dead letter is in the dead-letter log once.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ANY: Final = "any"
"""The queue whose failing records go to a dead-letter log."""
KEY: Final = "key"
"""The queue with the order `key`."""
NAMES: Final = (ANY, KEY)
ATTEMPTS: Final = 3
"""`max_attempts` of the queue `any`."""


@dataclass(frozen=True, slots=True)
class Given:
    """A claim of a record, as the claim's worker knows it."""

    token: int
    told_ns: int
    until_ns: int
    """The time until which the worker may rely on the claim without extensions."""
    attempt: int


@dataclass(slots=True)
class Journal:
    """The claims and settlements that all workers of one queue have reported."""

    given: dict[int, list[Given]] = field(default_factory=lambda: defaultdict(list))
    """For each offset, the claims of the record."""
    extended: dict[tuple[int, int], int] = field(default_factory=dict)
    """For each token and offset, the time until which the claim was extended."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """For each token and offset, the time when a settlement was first sent."""
    asked: set[int] = field(default_factory=set)
    """Offsets of records that were sent for acknowledgement."""
    acked: dict[int, int] = field(default_factory=dict)
    """For each offset of an acknowledged record, the token that acknowledged the record."""
    refused: Counter[str] = field(default_factory=Counter)
    """Numbers of refused settlements of records, by reason."""

    def read(
        self, told_ns: int, kind: str, word: Any, asked_ns: int, parts: list[Any], lease_ns: int
    ) -> None:
        """Add the fields of one line."""
        match kind:
            case "given":
                for offset, attempt in parts:
                    self.given[offset].append(Given(word, told_ns, asked_ns + lease_ns, attempt))
            case "extended":
                self.extended.update(((token, at), asked_ns + lease_ns) for token, at in parts)
            case "sent":
                for token, offset in parts:
                    self.sent.setdefault((token, offset), asked_ns)
                if word == "ack":
                    self.asked.update(offset for _, offset in parts)
            case "done" if word == "ack":
                self.acked.update((offset, token) for token, offset in parts)
            case "refused":
                self.refused.update(why for _, _, why in parts)
            case _:
                assert kind == "done"


def read_journals(paths: Iterable[Path], lease_s: float) -> dict[str, Journal]:
    """The journals of all processes, by queue. An incomplete last line is ignored."""
    found = {name: Journal() for name in NAMES}
    for path in paths:
        for line in path.read_bytes().split(b"\n")[:-1]:
            told_ns, name, kind, word, asked_ns, parts = json.loads(line)
            found[name].read(told_ns, kind, word, asked_ns, parts, round(lease_s * 1e9))
    return found


@dataclass(frozen=True, slots=True)
class Worked:
    """The results of a run's queues."""

    given: int = 0
    again: int = 0
    """How often records were given again."""
    acked: int = 0
    stale: int = 0
    """Settlements that were refused because the claim had ended."""
    dead: int = 0
    """Number of dead letters."""
    lost: int = 0
    """Records that no worker sent for acknowledgement and that are no dead letters."""
    after: int = 0
    """Records that were given again after their acknowledgement."""
    twice: int = 0
    """How often two valid claims had a record at the same time."""
    turned: int = 0
    """Records that were given before an earlier record of their key was done."""
    doubled: int = 0
    """Dead letters that are in the dead-letter log more than once, or that were acknowledged."""
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the results meet all requirements of this module."""
        bad = self.lost, self.after, self.twice, self.turned, self.doubled
        return not (any(bad) or self.problems)

    def with_problem(self, problem: str) -> "Worked":
        """The results with a further problem."""
        return replace(self, problems=(*self.problems, problem))

    def line(self) -> str:
        """All counts as a line of text."""
        return (
            f"queues: {self.given} given, {self.again} again, {self.acked} acknowledged,"
            f" {self.stale} stale refused, {self.dead} dead letters; {self.lost} lost,"
            f" {self.after} given after an ack, {self.twice} held by two valid claims,"
            f" {self.turned} out of order, {self.doubled} dead letters twice or acknowledged"
        )


def judge_queues(
    journals: dict[str, Journal], keys: Sequence[bytes | None], letters: Sequence[int]
) -> Worked:
    """Check the journals. `keys`: the keys of the log's records, by offset. `letters`: the original
    offset of each record in the dead-letter log.
    """
    dead = Counter(letters)
    both, every = journals.values(), range(len(keys))
    given = [each for journal in both for each in journal.given.values()]
    lost = [at for at in every if at not in journals[ANY].asked and at not in dead]
    lost += [at for at in every if at not in journals[KEY].asked]
    doubled = [at for at, count in dead.items() if count > 1 or at in journals[ANY].acked]
    often = [one for each in journals[ANY].given.values() for one in each if one.attempt > ATTEMPTS]
    return Worked(
        given=sum(map(len, given)),
        again=sum(len(each) - 1 for each in given),
        acked=sum(len(journal.acked) for journal in both),
        stale=sum(journal.refused["claim-ended"] for journal in both),
        dead=len(letters),
        lost=len(lost),
        after=sum(map(_after_ack, both)),
        twice=sum(1 for journal in both for _ in _held_twice(journal)),
        turned=_turned(journals[KEY], keys),
        doubled=len(doubled),
        problems=(f"{len(often)} records were given too often",) if often else (),
    )


def _after_ack(journal: Journal) -> int:
    return sum(
        max(each.token for each in journal.given[offset]) > token
        for offset, token in journal.acked.items()
    )


def _held_twice(journal: Journal) -> Iterator[int]:
    """Offsets of records that a worker got while an earlier claim was valid for its worker."""
    for offset, claims in journal.given.items():
        for one, later in pairwise(sorted(claims, key=lambda each: each.token)):
            until_ns = max(one.until_ns, journal.extended.get((one.token, offset), 0))
            sent_ns = journal.sent.get((one.token, offset), until_ns)
            if later.told_ns < min(until_ns, sent_ns):
                yield offset


def _turned(journal: Journal, keys: Sequence[bytes | None]) -> int:
    """How many records were given before the last claim of an earlier record of their key."""
    last: dict[bytes | None, int] = {}
    turned = 0
    for offset, key in enumerate(keys):
        tokens = [each.token for each in journal.given.get(offset, ())]
        if tokens:
            turned += min(tokens) <= last.get(key, 0)
            last[key] = max(*tokens, last.get(key, 0))
    return turned
