"""The replica check: compares each bookie's stored entries with the entries that it should have.

Bookies compute digests of their own copies (ledger, entry, length, payload), so replicas are
compared without transferring entries. If a bookie is unreachable, in limbo, or another incarnation,
the state of its copies is unknown, and its entries do not count as missing. Only closed fragments
are checked, because the last fragment of an open ledger belongs to its writer.
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
"""Number of ranges in one request. A bookie digests them, from memory, in well below a second."""
_ASK_S: Final = 60.0
_PRESENT_MAX: Final = 1000
"""Maximum number of ranges in a bookie's report, which says nothing of entries beyond them."""

_LACKS_MAX: Final = 100
"""If a member lacks more ranges, all entries between the first and the last are copied to it."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lack:
    """Entries that a member should have, but reports as missing or unreadable."""

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
    """Number of checked entries, all of them in closed fragments."""
    open_from: int | None = None
    """The first entry of the open fragment, which is not checked; None if the ledger has none."""
    lacks: list[Lack] = field(default_factory=list)
    differing: list[Range] = field(default_factory=list)
    """Ranges whose complete copies differ between members: an alarm is logged (rule 2)."""
    silent: list[str] = field(default_factory=list)
    """Members that did not report on all of their entries."""
    suspects: list[Range] = field(default_factory=list)
    """Ranges without a complete copy: some of their entries may be lost."""
    lost: tuple[Answers, ...] = ()
    """Lost ranges: all bookies that could store these entries report them as absent."""

    @property
    def is_whole(self) -> bool:
        """Whether every member reported a copy of each of its entries below `open_from`."""
        return not (self.lacks or self.differing or self.silent or self.lost)


@dataclass(frozen=True, slots=True)
class _Share:
    """The entries of a range whose ids have one residue mod `modulus`, and their write set."""

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
    """Requests digests of entries from bookies, and compares the digests."""

    _directory: Directory
    _session: aiohttp.ClientSession

    async def check(self, row: LedgerMetadata) -> ReplicaReport:
        """Checks one ledger. `row` may be outdated, so `recheck` must confirm the findings."""
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
        """Returns the findings that are still true: according to the new metadata `row`, the member
        is still in the fragment, and it reports the same state again.
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
        """Returns the ranges of first..last, in closed fragments, that a member lacks on its disk
        (rule 20a). Entries beyond the end of a full report count as missing. Returns None if the
        member's response lacks one of the shares.
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
        """Requests a member's digests of its shares. The result omits shares without a report."""
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
    """Whether this member sent the reply for this ledger (rule 4), outside limbo (rule 15)."""
    return (reply.bookie, reply.ledger_id, reply.limbo) == (member, ledger_id, False)


def _shares(row: LedgerMetadata) -> Iterator[_Share]:
    quorum = row.quorum
    modulus = quorum.modulus
    # In a striped ledger, a member reports one range for each stripe. If a share were larger, the
    # report could exceed `_PRESENT_MAX`, and the entries beyond it would never be checked.
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
    """Yields a member's shares of the entries first..last."""
    for share in _shares(row):
        low, high = max(share.first, first), min(share.last, last)
        if member in share.members and low <= high:
            part = replace(share, first=low, last=high, members=(member,))
            if len(part.ids):
                yield part


def _unreported(share: _Share, answer: RangeDigest) -> Iterator[Range]:
    """Yields the part of a share beyond the end of a full report, if the report lacks entries."""
    if answer.entries != len(share.ids):
        for named in (answer.present, answer.damaged):
            if len(named) >= _PRESENT_MAX and named[-1][1] < share.last:
                yield named[-1][1] + 1, share.last


def _spans(row: LedgerMetadata, first: int, last: int, size: int) -> Iterator[Range]:
    """Splits first..last, without lost entries (rule 31), into ranges of at most `size` entries."""
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
    """Yields the entries of a share that a member lacks, as one range per reason and gap."""
    if answer.entries == len(share.ids):
        return
    known_to = share.last
    if len(answer.present) >= _PRESENT_MAX:
        known_to = answer.present[-1][1]

    def why(entry_id: int) -> Literal["missing", "damaged"] | None:
        if not contains(answer.present, entry_id):
            return "missing"
        return "damaged" if contains(answer.damaged, entry_id) else None

    reported = (entry_id for entry_id in share.ids if entry_id <= known_to)
    for reason, entries in groupby(reported, why):
        if reason is not None:
            first, *others = entries
            yield Lack(member, share.fragment, first, others[-1] if others else first, reason)
