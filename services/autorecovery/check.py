"""The replica check: what bookies say that they hold, against the write sets.

Bookies digest their own copies (ledger, entry, length, payload), so that replicas are compared
without being read over the wire. What is unreachable, in limbo, or another incarnation says
nothing: unreachable is not missing. Only closed fragments are looked at; the last one of an open
ledger is its writer's.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import aiohttp

from quorumlog.net.directory import Directory
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, ids_of_residue, names, union
from quorumlog.wire.digest_bodies import DigestsAsked, DigestsBody, RangeDigest

SPAN_ENTRIES: Final = 10_000
_SPAN_BYTES: Final = 8 << 20
_SPANS: Final = 8
"""Ranges in one request: what a bookie reads for it takes well below a second from memory."""
_ASK_S: Final = 60.0
_PRESENT_MAX: Final = 1000
"""A bookie names so many ranges; what lies beyond them is unknown."""

_LACKS_MAX: Final = 100
"""Ranges that are filled one by one; more of them as one range."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lack:
    """Entries that a member should hold, and by its own word does not, or can't read."""

    member: str
    fragment: int
    first: int
    last: int
    why: Literal["missing", "damaged"]


@dataclass(slots=True)
class Report:
    """What a check of one ledger found."""

    ledger_id: int
    entries: int = 0
    """Of closed fragments: those that were asked for."""
    open_from: int | None = None
    """Entries from here on are still being written, and are compared when their fragment has ended."""
    lacks: list[Lack] = field(default_factory=list)
    differing: list[Range] = field(default_factory=list)
    """Ranges of which whole copies are not the same: an alarm (rule 2), and not for repair."""
    silent: list[str] = field(default_factory=list)
    """Members of which nothing is known now."""
    suspects: list[Range] = field(default_factory=list)
    """Ranges of which no whole copy was told: something may be lost."""
    lost: tuple[Answers, ...] = ()
    """What all who could hold it answered that they do not."""

    @property
    def is_whole(self) -> bool:
        """Whether every entry below `open_from` has all of its copies, by the word of each member."""
        return not (self.lacks or self.differing or self.silent or self.lost)


@dataclass(frozen=True, slots=True)
class _Share:
    """The ids of one residue in one span, and who stores them."""

    fragment: int
    first: int
    last: int
    modulus: int
    residue: int
    members: tuple[str, ...]

    @property
    def ids(self) -> range:
        return ids_of_residue(self.first, self.last, self.modulus, self.residue)


class ReplicaCheck:
    """Asks bookies and compares."""

    def __init__(self, directory: Directory, session: aiohttp.ClientSession) -> None:
        """`session` is shared and not closed here."""
        self._directory = directory
        self._session = session

    async def check(self, row: LedgerMetadata) -> Report:
        """Check one ledger as its row has it. Findings are to be checked again with `still`."""
        report = Report(row.ledger_id)
        if row.fragment_last(len(row.fragments) - 1) is None:
            report.open_from = row.fragments[-1].first_entry
        silent: dict[str, None] = {}
        for shares in _batches(_shares(row)):
            members = tuple(dict.fromkeys(m for share in shares for m in share.members))
            answers = await asyncio.gather(
                *(self._ask(member, row.ledger_id, shares) for member in members)
            )
            told = dict(zip(members, answers, strict=True))
            for share in shares:
                report.entries += len(share.ids)
                digests = set()
                for member in share.members:
                    answer = told[member].get(share)
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

    async def still(self, row: LedgerMetadata, lacks: Iterable[Lack]) -> list[Lack]:
        """Which of these findings hold against a row that was just read: its fragment still names
        the member, and the member still says so.
        """
        kept: list[Lack] = []
        for lack in lacks:
            for share in _shares(row):
                is_named = share.fragment == lack.fragment and lack.member in share.members
                first, last = max(share.first, lack.first), min(share.last, lack.last)
                if not is_named or first > last:
                    continue
                part = _Share(
                    share.fragment, first, last, share.modulus, share.residue, (lack.member,)
                )
                if not len(part.ids):
                    continue
                answer = (await self._ask(lack.member, row.ledger_id, (part,))).get(part)
                if answer is not None:
                    kept += _lacks(lack.member, part, answer)
        return kept

    async def lacking(
        self, row: LedgerMetadata, member: str, first: int, last: int
    ) -> Ranges | None:
        """What of first..last a member lacks of what closed fragments expect of it, by a look at its
        disk (rule 20a). What it does not tell counts as lacking; None where it tells nothing of some.
        """
        found: list[Range] = []
        for shares in _batches(_within(row, member, first, last)):
            answers = await self._ask(member, row.ledger_id, shares, from_disk=True)
            for share in shares:
                answer = answers.get(share)
                if answer is None:
                    return None
                found += ((lack.first, lack.last) for lack in _lacks(member, share, answer))
                found += _untold(share, answer)
        merged = union(found)
        if len(merged) > _LACKS_MAX:
            return ((merged[0][0], merged[-1][1]),)
        return merged

    async def _ask(
        self, member: str, ledger_id: int, shares: Sequence[_Share], *, from_disk: bool = False
    ) -> dict[_Share, RangeDigest]:
        """A member's word on its shares; what it does not say is left out."""
        mine: dict[tuple[int, int], list[_Share]] = defaultdict(list)
        for share in shares:
            if member in share.members:
                mine[share.modulus, share.residue].append(share)
        url = self._directory.address(member_name(member))
        found: dict[_Share, RangeDigest] = {}
        for (modulus, residue), wanted in mine.items():
            asked = DigestsAsked(
                ranges=tuple((share.first, share.last) for share in wanted),
                modulus=modulus,
                residue=residue,
                from_disk=from_disk,
            )
            try:
                async with self._session.post(
                    f"{url}/v1/ledgers/{ledger_id}/digests",
                    data=asked.model_dump_json(),
                    timeout=aiohttp.ClientTimeout(total=_ASK_S),
                    allow_redirects=False,
                ) as response:
                    body = await response.read()
                    if response.status != 200:
                        return found
                told = DigestsBody.model_validate_json(body)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                return found
            if not _is_word_of(member, ledger_id, told):
                return found
            found |= {
                share: answer
                for share, answer in zip(wanted, told.digests, strict=False)
                if (answer.first, answer.last) == (share.first, share.last)
            }
        return found


def _is_word_of(member: str, ledger_id: int, told: DigestsBody) -> bool:
    """Rule 4: the reply names who says it and about what. Rule 15: limbo says nothing."""
    return (told.bookie, told.ledger_id, told.limbo) == (member, ledger_id, False)


def _shares(row: LedgerMetadata) -> Iterator[_Share]:
    quorum = row.quorum
    modulus = quorum.modulus
    size = SPAN_ENTRIES
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


def _untold(share: _Share, answer: RangeDigest) -> Iterator[Range]:
    """What an answer that names as much as it may says nothing of, where something is lacking."""
    if answer.entries != len(share.ids):
        for named in (answer.present, answer.damaged):
            if len(named) >= _PRESENT_MAX and named[-1][1] < share.last:
                yield named[-1][1] + 1, share.last


def _spans(row: LedgerMetadata, first: int, last: int, size: int) -> Iterator[Range]:
    """What members should hold of first..last, in pieces: nothing that was given up (rule 31)."""
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
    """What a member lacks of a share by its own word; ids that follow on make one range."""
    if answer.entries == len(share.ids):
        return
    known_to = share.last
    if len(answer.present) >= _PRESENT_MAX:
        known_to = answer.present[-1][1]
    open_: tuple[Literal["missing", "damaged"], int, int] | None = None
    for entry_id in share.ids:
        if entry_id > known_to:
            break
        why: Literal["missing", "damaged"] | None = None
        if not names(answer.present, entry_id):
            why = "missing"
        elif names(answer.damaged, entry_id):
            why = "damaged"
        if open_ is not None and why == open_[0]:
            open_ = (open_[0], open_[1], entry_id)
            continue
        if open_ is not None:
            yield Lack(member, share.fragment, open_[1], open_[2], open_[0])
        open_ = None if why is None else (why, entry_id, entry_id)
    if open_ is not None:
        yield Lack(member, share.fragment, open_[1], open_[2], open_[0])
