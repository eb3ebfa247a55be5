"""A place moves only where an audit, a drain or a new incarnation says so (ADR 6)."""

from typing import Any

import pytest

from quorumlog.errors import NotEnoughBookies
from quorumlog.net.directory import Directory
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.metadata import Repair as PendingRepair
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList
from quorumlog.wire.repair_bodies import RepairItem
from services.autorecovery.worker import BookieAway, Worker

ROW = LedgerMetadata(
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


async def worker_of(*known: BookieInfo, row: LedgerMetadata = ROW) -> Worker:
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
    row = ROW.with_member_replaced(0, "b1@1", "b4@1")
    for state, moves in (("lost", True), ("lost", False), ("draining", False)):
        known = BookieInfo.model_validate({"id": "b1@1", "state": state, "url": ""})
        worker = await worker_of(known, BookieInfo(id="b4@1", state="lost", url=""), row=row)
        item = RepairItem(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=moves)

        with pytest.raises(BookieAway):
            await worker.repair(item)


async def test_a_target_that_got_another_place_of_the_fragment_is_not_taken_again() -> None:
    """Each try would fail for ever: it can't hold two places (whole services, seed 1261)."""
    row = ROW.with_repair(PendingRepair(0, "b1@1", "b4@1")).with_member_replaced(0, "b2@1", "b4@1")
    worker = await worker_of(
        *(BookieInfo(id=f"b{n}@1", state="writable", url="") for n in (3, 4, 5))
    )

    assert worker._target(row, 0, "b1@1") == "b5@1"
