"""The replica check: compares what bookies report as stored with the write sets.

Bookies digest their own copies (ledger, entry, length, payload), so that replicas are compared
without sending their entries. A bookie that is unreachable, in limbo, or another incarnation
reports nothing: unreachable is not missing. Only closed fragments are checked; the last fragment of
an open ledger belongs to its writer.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal

import aiohttp

from quorumlog.net.directory import Directory
from quorumlog.net.holdings import ask_bookie
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, contains, ids_of_residue, union
from quorumlog.wire.rebuild_bodies import DigestsAsked, DigestsBody, RangeDigest

SPAN_ENTRIES: Final = 10_000
_SPAN_BYTES: Final = 8 << 20
_SPANS: Final = 8
"""Ranges in one request: a bookie reads them from memory in well below a second."""
_ASK_S: Final = 60.0
_PRESENT_MAX: Final = 1000
"""A bookie reports at most so many ranges; entries beyond them are unknown."""

_LACKS_MAX: Final = 100
"""Up to so many ranges are copied one by one; more of them as one range."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lack:
    """Entries that a member should have and, by its own report, lacks or cannot read."""

    member: str
    fragment: int
    first: int
    last: int
    why: Literal["missing", "damaged"]


@dataclass(slots=True)
class ReplicaReport:
    """The result of checking one ledger."""

    ledger_id: int
    entries: int = 0
    """Entries checked, of closed fragments."""
    open_from: int | None = None
    """Entries from here on are compared after their fragment has ended."""
    lacks: list[Lack] = field(default_factory=list)
    differing: list[Range] = field(default_factory=list)
    """Ranges whose complete copies differ: an alarm (rule 2), not a repair."""
    silent: list[str] = field(default_factory=list)
    """Members that reported nothing."""
    suspects: list[Range] = field(default_factory=list)
    """Ranges without a complete copy: entries may be lost."""
    lost: tuple[Answers, ...] = ()
    """Ranges that every possible holder denies."""

    @property
    def is_whole(self) -> bool:
        """Whether every member reported a copy of each of its entries below `open_from`."""
        return not (self.lacks or self.differing or self.silent or self.lost)


@dataclass(frozen=True, slots=True)
class _Share:
    """The ids of one residue in one span, and the members that store them."""

    fragment: int
    first: int
    last: int
    modulus: int
    residue: int
    members: tuple[str, ...]

    @property
    def ids(self) -> range:
        return ids_of_residue(self.first, self.last, self.modulus, self.residue)


@dataclass(eq=False)
class ReplicaCheck:
    """Requests digests from bookies and compares them."""

    _directory: Directory
    _session: aiohttp.ClientSession

    async def check(self, row: LedgerMetadata) -> ReplicaReport:
        """Check one ledger by its row. `recheck` must confirm the findings."""
        report = ReplicaReport(row.ledger_id)
        if row.fragment_last(len(row.fragments) - 1) is None:
            report.open_from = row.fragments[-1].first_entry
        silent: dict[str, None] = {}
        for shares in _batches(_shares(row)):
            members = tuple(dict.fromkeys(m for share in shares for m in share.members))
            answers = await asyncio.gather(
                *(self._ask(member, row.ledger_id, shares) for member in members)
            )
            replies = dict(zip(members, answers, strict=True))
            for share in shares:
                report.entries += len(share.ids)
                digests = set()
                for member in share.members:
                    answer = replies[member].get(share)
                    if answer is None:
                        silent[member] = None
                        continue
                    lacks = tuple(_lacks(member, share, answer))
                    report.lacks += lacks
                    if not lacks:
                        digests.add(answer.digest)
                if not digests:
                    report.suspects.append((share.first, share.last))
                if len(digests) > 1:
                    report.differing.append((share.first, share.last))
        report.silent = list(silent)
        return report

    async def recheck(self, row: LedgerMetadata, lacks: Iterable[Lack]) -> list[Lack]:
        """Which of these findings still hold for a row that was just read: the fragment still names
        the member, and the member reports the same again.
        """
        kept: list[Lack] = []
        for lack in lacks:
            for part in _within(row, lack.member, lack.first, lack.last):
                if part.fragment == lack.fragment:
                    answer = (await self._ask(lack.member, row.ledger_id, (part,))).get(part)
                    if answer is not None:
                        kept += _lacks(lack.member, part, answer)
        return kept

    async def missing_on_disk(
        self, row: LedgerMetadata, member: str, first: int, last: int
    ) -> Ranges | None:
        """The ranges of first..last that a member lacks on its disk, of closed fragments (rule
        20a). Entries that it does not report count as lacking; None if it reports nothing about
        some share.
        """
        found: list[Range] = []
        for shares in _batches(_within(row, member, first, last)):
            answers = await self._ask(member, row.ledger_id, shares, from_disk=True)
            for share in shares:
                answer = answers.get(share)
                if answer is None:
                    return None
                found += ((lack.first, lack.last) for lack in _lacks(member, share, answer))
                found += _unreported(share, answer)
        merged = union(found)
        if len(merged) > _LACKS_MAX:
            return ((merged[0][0], merged[-1][1]),)
        return merged

    async def _ask(
        self, member: str, ledger_id: int, shares: Sequence[_Share], *, from_disk: bool = False
    ) -> dict[_Share, RangeDigest]:
        """A member's digests of its shares; unreported shares are left out."""
        mine: dict[tuple[int, int], list[_Share]] = defaultdict(list)
        for share in shares:
            if member in share.members:
                mine[share.modulus, share.residue].append(share)
        name = member_name(member)
        url = f"{self._directory.address(name)}/v1/ledgers/{ledger_id}/digests"
        found: dict[_Share, RangeDigest] = {}
        for (modulus, residue), wanted in mine.items():
            asked = DigestsAsked(
                ranges=tuple((share.first, share.last) for share in wanted),
                modulus=modulus,
                residue=residue,
                from_disk=from_disk,
            )
            reply = await ask_bookie(self._session, name, url, DigestsBody, asked, limit_s=_ASK_S)
            if reply is None or not _is_reply_about(member, ledger_id, reply):
                return found
            found |= {
                share: answer
                for share, answer in zip(wanted, reply.digests, strict=False)
                if (answer.first, answer.last) == (share.first, share.last)
            }
        return found


def _is_reply_about(member: str, ledger_id: int, reply: DigestsBody) -> bool:
    """Rule 4: the reply names this member and this ledger. Rule 15: it is not in limbo."""
    return (reply.bookie, reply.ledger_id, reply.limbo) == (member, ledger_id, False)


def _shares(row: LedgerMetadata) -> Iterator[_Share]:
    quorum = row.quorum
    modulus = quorum.modulus
    # A member of a striped ledger names a range for each stripe: of more entries than these it could
    # not name all that it has, and what it lacks behind them would never be known.
    size = 2 * _PRESENT_MAX - 2 if quorum.is_striped else SPAN_ENTRIES
    if row.length and row.last_entry is not None and row.last_entry >= 0:
        size = max(1, min(size, _SPAN_BYTES * (row.last_entry + 1) // row.length))
    for index, fragment in enumerate(row.fragments):
        end = row.fragment_last(index)
        if end is None:
            continue
        for first, last in _spans(row, fragment.first_entry, end, size):
            for residue in range(modulus):
                members = tuple(fragment.bookies[p] for p in quorum.write_set(residue))
                share = _Share(fragment.first_entry, first, last, modulus, residue, members)
                if len(share.ids):
                    yield share


def _within(row: LedgerMetadata, member: str, first: int, last: int) -> Iterator[_Share]:
    """A member's shares of first..last."""
    for share in _shares(row):
        low, high = max(share.first, first), min(share.last, last)
        if member in share.members and low <= high:
            part = replace(share, first=low, last=high, members=(member,))
            if len(part.ids):
                yield part


def _unreported(share: _Share, answer: RangeDigest) -> Iterator[Range]:
    """The rest of a share beyond a report of maximum length, if entries are lacking."""
    if answer.entries != len(share.ids):
        for named in (answer.present, answer.damaged):
            if len(named) >= _PRESENT_MAX and named[-1][1] < share.last:
                yield named[-1][1] + 1, share.last


def _spans(row: LedgerMetadata, first: int, last: int, size: int) -> Iterator[Range]:
    """Entries of first..last that members should have, in pieces, without lost ones (rule 31)."""
    for low, high in row.kept(first, last):
        for start in range(low, high + 1, size):
            yield start, min(high, start + size - 1)


def _batches(shares: Iterator[_Share]) -> Iterator[list[_Share]]:
    batch: list[_Share] = []
    for share in shares:
        if batch and (len(batch) == _SPANS or batch[-1].fragment != share.fragment):
            yield batch
            batch = []
        batch.append(share)
    if batch:
        yield batch


def _lacks(member: str, share: _Share, answer: RangeDigest) -> Iterator[Lack]:
    """The entries of a share that a member reports as lacking; contiguous ids make one range."""
    if answer.entries == len(share.ids):
        return
    known_to = share.last
    if len(answer.present) >= _PRESENT_MAX:
        known_to = answer.present[-1][1]

    def why(entry_id: int) -> Literal["missing", "damaged"] | None:
        if not contains(answer.present, entry_id):
            return "missing"
        return "damaged" if contains(answer.damaged, entry_id) else None

    told = (entry_id for entry_id in share.ids if entry_id <= known_to)
    for reason, entries in groupby(told, why):
        if reason is not None:
            first, *others = entries
            yield Lack(member, share.fragment, first, others[-1] if others else first, reason)
