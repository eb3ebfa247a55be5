"""Spans of entries that replicas should hold, and comparison of the replicas by digests. Pure but for
`ask`.

A span is some entries of one fragment that share a write set. Each member is asked for a digest of the
span. Equal digests prove the replicas equal; else the span is halved until it is clear which entries of which
member are missing, damaged or different.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import complement, ids_of_residue

MISSING: Final = "missing"
CORRUPT: Final = "corrupt"
DIVERGENT: Final = "divergent"
EXTRA: Final = "extra"
UNREACHABLE: Final = "unreachable"

DAMAGE: Final = (MISSING, CORRUPT, DIVERGENT)
"""The kinds of damage of an entry's copies; `extra` costs space only, `unreachable` proves nothing."""

_LEAF: Final = 500
"""Spans of at most this size are judged entry by entry; a bookie lists at most 1,000 ranges."""


@dataclass(frozen=True, slots=True)
class Span:
    """Entries `first` to `last` that are `residue` modulo `modulus`, and who should hold them."""

    ledger_id: int
    first: int
    last: int
    modulus: int
    residue: int
    members: tuple[str, ...]
    is_complete: bool
    """Whether every member should have every entry, because no writer is at work on the fragment."""

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.ids)

    @property
    def ids(self) -> range:
        """The entries."""
        return ids_of_residue(self.first, self.last, self.modulus, self.residue)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A problem with some entries of one ledger on one bookie."""

    ledger: int
    first: int
    last: int
    bookie: str
    kind: str
    survivors: int
    """Good copies that each of the entries has left."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemberDigest:
    """A member's answer for a span."""

    entry_count: int
    digest: str
    present: tuple[tuple[int, int], ...]
    damaged: tuple[tuple[int, int], ...]


Ask = Callable[[str, Span], MemberDigest | str]
"""A member's answer for a span, or why there is none."""


def spans_of(row: Mapping[str, Any], confirmed: int, most: int) -> Iterator[Span]:
    """The spans of a ledger as the API shows it, of at most `most` entries each.

    `confirmed`: the end of a closed ledger, the LAC of another.
    """
    quorum = Quorum(row["ensemble_size"], row["write_quorum"], row["ack_quorum"])
    is_closed = row["state"] == "CLOSED"
    fragments = row["fragments"]
    modulus = quorum.modulus
    for index, fragment in enumerate(fragments):
        is_last = index + 1 == len(fragments)
        end = confirmed if is_last else min(confirmed, fragments[index + 1]["first_entry"] - 1)
        bookies = fragment["bookies"]
        for low, high in _pieces(row, fragment["first_entry"], end, most * modulus):
            for residue in range(modulus):
                places = quorum.write_set(residue) if quorum.is_striped else range(len(bookies))
                span = Span(
                    row["ledger_id"],
                    low,
                    high,
                    modulus,
                    residue,
                    tuple(bookies[place] for place in places),
                    is_complete=is_closed or not is_last,
                )
                if span.count:
                    yield span


def _pieces(row: Mapping[str, Any], first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """What members should hold of first..last: all but entries that were given up (rule 31)."""
    lost = tuple((part["first"], part["last"]) for part in row.get("lost_entries", ()))
    for begin, end in complement(lost, first, last):
        for low in range(begin, end + 1, most):
            yield low, min(end, low + most - 1)


def judge(span: Span, ask: Ask) -> list[Finding]:
    """The findings of a span, in order; neighbouring entries make one finding."""
    return merged(_judge(span, ask, span.members), span.modulus)


def strangers(span: Span, holders: Iterable[str], ask: Ask) -> list[Finding]:
    """Copies of a span's entries on bookies that should not hold them."""
    found = []
    for member in holders:
        found += [
            Finding(span.ledger_id, i, i, member, EXTRA, len(span.members))
            for i in _copies(span, member, ask)
        ]
    return merged(found, span.modulus)


def _copies(span: Span, member: str, ask: Ask) -> Iterator[int]:
    """The span's entries that a member holds."""
    held = ask(member, span)
    if not isinstance(held, MemberDigest) or not held.entry_count:
        return
    ids = _within(held.present, span.ids)
    if len(ids) < held.entry_count and span.count > 1:
        # A bookie names 1,000 ranges at most.
        for half in _halves(span):
            yield from _copies(half, member, ask)
        return
    yield from sorted(ids)


def merged(findings: Iterable[Finding], modulus: int) -> list[Finding]:
    """Findings with neighbours merged: consecutive entries of one span are `modulus` apart."""
    result: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in sorted(findings):
        key = (finding.ledger, finding.bookie, finding.kind, finding.survivors, finding.detail)
        found = result.setdefault(key, [])
        if found and found[-1].last >= finding.first - modulus:
            found[-1] = replace(found[-1], last=max(found[-1].last, finding.last))
        else:
            found.append(finding)
    return sorted(finding for group in result.values() for finding in group)


def _judge(span: Span, ask: Ask, members: Collection[str]) -> Iterator[Finding]:
    answers: dict[str, MemberDigest] = {}
    for member in members:
        held = ask(member, span)
        if isinstance(held, str):
            yield Finding(
                span.ledger_id, span.first, span.last, member, UNREACHABLE, len(members) - 1, held
            )
        else:
            answers[member] = held
    if _is_sound(span, answers):
        return
    if span.count > _LEAF:
        for half in _halves(span):
            yield from _judge(half, ask, answers)
        return
    yield from _judge_leaf(span, ask, answers)


def _is_sound(span: Span, answers: Mapping[str, MemberDigest]) -> bool:
    """Whether these members' answers show no problem."""
    held = [answer for answer in answers.values() if answer.entry_count or answer.damaged]
    if any(answer.damaged for answer in held):
        return False
    if span.is_complete and any(a.entry_count != span.count for a in answers.values()):
        return False
    # In an open fragment fewer entries prove nothing yet, but then the digests differ too.
    return len({answer.digest for answer in held}) <= 1


def _judge_leaf(span: Span, ask: Ask, answers: Mapping[str, MemberDigest]) -> Iterator[Finding]:
    """Judge entry by entry: which members lack it, can't read it, or hold other bytes."""
    ids = span.ids
    damaged = {member: _within(held.damaged, ids) for member, held in answers.items()}
    sound = {
        member: _within(held.present, ids) - damaged[member] for member, held in answers.items()
    }
    odd = _divergent(span, ask, sound)
    for entry in ids:
        good = sum(entry in has and entry not in odd.get(m, ()) for m, has in sound.items())
        for member in answers:
            if entry in damaged[member]:
                kind = CORRUPT
            elif entry in odd.get(member, ()):
                kind = DIVERGENT
            elif entry in sound[member] or not span.is_complete:
                continue
            else:
                kind = MISSING
            yield Finding(span.ledger_id, entry, entry, member, kind, good)


def _divergent(span: Span, ask: Ask, sound: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """The entries of which members hold other bytes than the majority."""
    odd: dict[str, set[int]] = {}
    # Runs of entries that the same members hold can be compared at once.
    run: list[int] = []
    holders: frozenset[str] = frozenset()
    for entry in [*span.ids, None]:
        now = (
            frozenset(member for member, ids in sound.items() if entry in ids)
            if entry is not None
            else frozenset()
        )
        if run and (entry is None or now != holders):
            part = replace(span, first=run[0], last=run[-1])
            for member, ids in _compare(part, ask, holders).items():
                odd.setdefault(member, set()).update(ids)
            run = []
        holders = now
        if entry is not None:
            run.append(entry)
    return odd


def _compare(span: Span, ask: Ask, holders: frozenset[str]) -> dict[str, set[int]]:
    if len(holders) < 2:
        return {}
    digests = {}
    for member in sorted(holders):
        held = ask(member, span)
        if isinstance(held, MemberDigest) and held.entry_count == span.count:
            digests[member] = held.digest
    counts = Counter(digests.values())
    if len(counts) <= 1:
        return {}
    if span.count > 1:
        odd: dict[str, set[int]] = {}
        for half in _halves(span):
            for member, ids in _compare(half, ask, holders).items():
                odd.setdefault(member, set()).update(ids)
        return odd
    (best, votes), (_, others) = counts.most_common(2)
    entry = span.ids[0]
    # Without a majority no copy is known to be right.
    return {
        member: {entry} for member, digest in digests.items() if votes == others or digest != best
    }


def _halves(span: Span) -> tuple[Span, Span]:
    ids = span.ids
    middle = ids[len(ids) // 2]
    return replace(span, first=ids[0], last=middle - 1), replace(span, first=middle, last=ids[-1])


def _within(ranges: Iterable[tuple[int, int]], ids: range) -> set[int]:
    found: set[int] = set()
    for low, high in ranges:
        start = max(ids.start, low + (ids.start - low) % ids.step)
        found.update(range(start, min(high, ids[-1]) + 1, ids.step))
    return found
