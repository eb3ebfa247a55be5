"""Which copies a check finds missing, and which places a repair moves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from quorumlog.errors import NotEnoughBookies
from quorumlog.net.directory import Directory
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.metadata import Repair as PendingRepair
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList
from quorumlog.wire.repair_bodies import RepairItem
from services.autorecovery import check as check_module
from services.autorecovery.check import Lack, ReplicaCheck
from services.autorecovery.worker import BookieAway, Worker
from tests.support.answering import answering

ROW = LedgerMetadata(
    7,
    Quorum(1, 1, 1),
    DigestKind.CRC32C,
    (Fragment(0, ("b1@1",)),),
    state=State.CLOSED,
    last_entry=9,
    length=10,
)
LACKING = Lack("b1@1", 0, 5, 9, "missing")


class Peer:
    """A bookie with entries 0 to 4 that answers with what a test adds."""

    def __init__(self) -> None:
        self.status = 200
        self.reported: dict[str, Any] = {}
        self.digest: dict[str, Any] = {}
        self.heals_after = -1
        self.asked = 0

    async def digests(self, request: web.Request) -> web.Response:
        self.asked += 1
        asked = await request.json()
        has_all = 0 <= self.heals_after < self.asked
        end = 10 if has_all else 5
        found = []
        for first, last in asked["ranges"]:
            low, high = max(first, 0), min(last, end - 1)
            present = [[low, high]] if low <= high else []
            entries = max(0, high - low + 1)
            answer = {"first": first, "last": last, "entries": entries, "present": present}
            found.append(answer | {"damaged": [], "digest": "d"} | self.digest)
        body = {"bookie": "b1@1", "ledger_id": 7, "limbo": False, "digests": found} | self.reported
        return web.json_response(body, status=self.status)


@asynccontextmanager
async def checking(peer: Peer) -> AsyncIterator[ReplicaCheck]:
    async with (
        answering(peer.digests, "/v1/ledgers/7/digests") as url,
        aiohttp.ClientSession() as session,
    ):

        async def fetch() -> BookieList:
            return BookieList(bookies=(BookieInfo(id="b1@1", state="writable", url=url),))

        directory = Directory(fetch)
        await directory.refresh()
        yield ReplicaCheck(directory, session)


async def test_entries_that_a_bookie_reports_as_missing_are_findings() -> None:
    async with checking(Peer()) as check:
        report = await check.check(ROW)
        assert (report.lacks, report.silent, report.entries) == ([LACKING], [], 10)
        assert await check.recheck(ROW, report.lacks) == [LACKING]


async def test_a_reply_about_another_member_or_ledger_is_ignored() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"status": 503},
        {"reported": {"limbo": True}},
        {"reported": {"bookie": "b1@2"}},
        {"reported": {"ledger_id": 8}},
        {"reported": {"digests": []}},
        {"digest": {"first": 1}},
        {"digest": {"entries": "0"}},
    )
    for manners in wrong:
        peer = Peer()
        for name, value in manners.items():
            setattr(peer, name, value)
        async with checking(peer) as check:
            report = await check.check(ROW)
            assert (report.lacks, report.silent) == ([], ["b1@1"]), manners
            assert await check.recheck(ROW, [LACKING]) == [], manners


async def test_entries_repaired_or_moved_meanwhile_are_no_findings() -> None:
    peer = Peer()
    async with checking(peer) as check:
        found = (await check.check(ROW)).lacks
        peer.heals_after = peer.asked
        assert await check.recheck(ROW, found) == []
    async with checking(Peer()) as check:
        found = (await check.check(ROW)).lacks
        moved = ROW.with_member_replaced(0, "b1@1", "b2@1")
        assert await check.recheck(moved, found) == []


async def test_an_open_fragment_is_not_checked() -> None:
    open_row = LedgerMetadata(7, Quorum(1, 1, 1), DigestKind.CRC32C, (Fragment(0, ("b1@1",)),))
    peer = Peer()
    async with checking(peer) as check:
        assert (await check.check(open_row)).is_whole
    assert peer.asked == 0


class Striped(Peer):
    """A bookie with every second entry but one; as real ones, it names 1,000 ranges at most."""

    async def digests(self, request: web.Request) -> web.Response:
        asked = await request.json()
        found = []
        for first, last in asked["ranges"]:
            held = [i for i in range(first, last + 1) if i % 2 == 0 and i != 9998]
            mine = [i for i in held if i % asked["modulus"] == asked["residue"]]
            answer = {"first": first, "last": last, "entries": len(mine), "digest": "d"}
            found.append(answer | {"present": [(i, i) for i in held][:1000], "damaged": []})
        return web.json_response(
            {"bookie": "b1@1", "ledger_id": 7, "limbo": False, "digests": found}
        )


async def test_of_a_striped_ledger_what_is_missing_beyond_a_thousand_ranges_is_found() -> None:
    """Its members name a range for each stripe. Told as complete, it would never be repaired, or lost
    where nobody has it.
    """
    row = replace(
        ROW,
        quorum=Quorum(2, 1, 1),
        fragments=(Fragment(0, ("b1@1", "b2@1")),),
        last_entry=9999,
        length=10_000,
    )
    async with checking(Striped()) as replicas:
        report = await replicas.check(row)

        lack = Lack("b1@1", 0, 9998, 9998, "missing")
        assert report.lacks == [lack]
        assert [first <= 9998 <= last for first, last in report.suspects][-2:] == [True, True]
        assert await replicas.recheck(row, [lack]) == [lack]


async def test_beyond_a_full_report_entries_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check finds it once what it names is repaired; a repair copies it at once (rule 20a)."""
    monkeypatch.setattr(check_module, "_PRESENT_MAX", 2)
    peer = Peer()
    peer.digest = {"present": [[0, 0], [2, 2]], "entries": 6}
    async with checking(peer) as replicas:
        assert (await replicas.check(ROW)).lacks == [Lack("b1@1", 0, 1, 1, "missing")]
        assert await replicas.missing_on_disk(ROW, "b1@1", 0, 9) == ((1, 1), (3, 9))

        monkeypatch.setattr(check_module, "_LACKS_MAX", 1)
        assert await replicas.missing_on_disk(ROW, "b1@1", 0, 9) == ((1, 9),)


MOVED_ROW = LedgerMetadata(
    7,
    Quorum(3, 3, 2),
    DigestKind.CRC32C,
    (Fragment(0, ("b1@1", "b2@1", "b3@1")),),
    state=State.CLOSED,
    last_entry=-1,
    length=0,
)


class RowPorts:
    """The ports of a worker that only reads a row."""

    def __init__(self, row: LedgerMetadata) -> None:
        self.row = row

    @property
    def metadata(self) -> "RowPorts":
        return self

    async def read(self, _ledger_id: int) -> tuple[CasStatus, LedgerMetadata]:
        return CasStatus.OK, self.row


async def worker_of(*known: BookieInfo, row: LedgerMetadata = MOVED_ROW) -> Worker:
    async def fetch() -> BookieList:
        return BookieList(bookies=known)

    directory = Directory(fetch)
    await directory.refresh()
    parts: Any = (None, directory, RowPorts(row), None, None, None)
    return Worker(*parts)


async def mend(state: str, *, member: str = "b1@1", moves: bool = False) -> None:
    """Mend what b1@1 lacks while the cluster knows this of it; no bookie is free to replace it."""
    known = BookieInfo.model_validate({"id": member, "state": state, "url": ""})

    worker = await worker_of(known)
    item = RepairItem(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=moves)
    await worker.repair(item)


async def test_repair_waits_for_a_bookie_that_is_only_away() -> None:
    with pytest.raises(BookieAway):
        await mend("lost")


async def test_places_of_lost_drained_and_earlier_members_move() -> None:
    for case in (
        mend("lost", moves=True),
        mend("draining"),
        mend("lost", member="b1@2"),
    ):
        with pytest.raises(NotEnoughBookies, match="free to replace the member"):
            await case


async def test_an_item_stays_while_a_new_member_that_is_away_has_no_copy_of_the_row() -> None:
    """Rule 20b: the repair of that one's place takes over who is kept; until then somebody asks again."""
    row = MOVED_ROW.with_member_replaced(0, "b1@1", "b4@1")
    for state, moves in (("lost", True), ("lost", False), ("draining", False)):
        known = BookieInfo.model_validate({"id": "b1@1", "state": state, "url": ""})
        worker = await worker_of(known, BookieInfo(id="b4@1", state="lost", url=""), row=row)
        item = RepairItem(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=moves)

        with pytest.raises(BookieAway):
            await worker.repair(item)


async def test_a_target_that_got_another_place_of_the_fragment_is_not_taken_again() -> None:
    """Each try would fail for ever: it can't hold two places (whole services, seed 1261)."""
    row = MOVED_ROW.with_repair(PendingRepair(0, "b1@1", "b4@1")).with_member_replaced(
        0, "b2@1", "b4@1"
    )
    worker = await worker_of(
        *(BookieInfo(id=f"b{n}@1", state="writable", url="") for n in (3, 4, 5))
    )

    assert worker._target(row, 0, "b1@1") == "b5@1"
