"""The journals of queues' workers, and the checks of these journals, for `make produce`.

A worker writes a line to its journal for each event before it continues, so that a SIGKILL loses
none. Times are of CLOCK_MONOTONIC, which all processes of a machine share. Tokens order the claims
of a queue. The checks require:

- Each record was sent for acknowledgement, or is a dead letter, and not both.
- A record that was acknowledged by one token was not given by a higher one.
- While a claim is valid for its worker, and not settled, no other worker gets its records.
- With the order `key`, a record is given only after the last claim of all earlier ones of its key.
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
"""A queue whose records that fail go to the dead-letter log."""
KEY: Final = "key"
"""A queue with the order `key`."""
NAMES: Final = (ANY, KEY)
ATTEMPTS: Final = 3
"""`max_attempts` of the queue `any`."""


@dataclass(frozen=True, slots=True)
class Given:
    """A record in a claim, as its worker knows it."""

    token: int
    told_ns: int
    until_ns: int
    """Until when the worker may count on the claim, without extensions."""
    attempt: int


@dataclass(slots=True)
class Journal:
    """What all workers of one queue have written."""

    given: dict[int, list[Given]] = field(default_factory=lambda: defaultdict(list))
    """By offset."""
    extended: dict[tuple[int, int], int] = field(default_factory=dict)
    """Until when a token and an offset were extended."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """When a settlement of a token and an offset was sent first."""
    asked: set[int] = field(default_factory=set)
    """Offsets that were sent for acknowledgement."""
    acked: dict[int, int] = field(default_factory=dict)
    """The tokens that acknowledged records, by offset."""
    refused: Counter[str] = field(default_factory=Counter)
    """Settlements of records that were refused, by the reason."""

    def read(
        self, told_ns: int, kind: str, word: Any, asked_ns: int, parts: list[Any], lease_ns: int
    ) -> None:
        """Add a line."""
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
    """Settlements that were refused, because the claim had ended."""
    dead: int = 0
    """Dead letters."""
    lost: int = 0
    """Records that nobody sent for acknowledgement, and that are no dead letters."""
    after: int = 0
    """Records that were given after an acknowledgement."""
    twice: int = 0
    """Records that two valid claims had."""
    turned: int = 0
    """Records that were given before an earlier one of their key was done."""
    doubled: int = 0
    """Dead letters that are in the log more than once, or that were acknowledged."""
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether all requirements of this module hold."""
        bad = self.lost, self.after, self.twice, self.turned, self.doubled
        return not (any(bad) or self.problems)

    def with_problem(self, problem: str) -> "Worked":
        """The results, with a problem."""
        return replace(self, problems=(*self.problems, problem))

    def line(self) -> str:
        """The counts."""
        return (
            f"queues: {self.given} given, {self.again} again, {self.acked} acknowledged,"
            f" {self.stale} stale refused, {self.dead} dead letters; {self.lost} lost,"
            f" {self.after} given after an ack, {self.twice} held by two valid claims,"
            f" {self.turned} out of order, {self.doubled} dead letters twice or acknowledged"
        )


def judge_queues(
    journals: dict[str, Journal], keys: Sequence[bytes | None], letters: Sequence[int]
) -> Worked:
    """Judge the journals. `keys`: of the log's records. `letters`: the offsets of the records in
    the dead-letter log.
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
    """Offsets that a worker was given while an earlier claim was valid for its worker."""
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
