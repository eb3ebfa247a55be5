"""Repairs, and what comes in between: a drop, damage, another repair."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import google_crc32c
import pytest

from loadtest.stores import scratch
from quorumlog.errors import EntryUnavailable, QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.ports import MachineTimes, Ports
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.metadata import Repair as PendingRepair
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowName, name_of
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from quorumlog.wire.repair_bodies import RepairItem
from quorumlog.wire.row_copies import decode
from services.autorecovery.findings import KnownLosses
from services.autorecovery.worker import Worker
from services.bookie.store import Store
from tests.unit.bookie.support import KEY, add, ids_of, read, run_of
from tests.unit.bookie.test_channel import serving as bookie
from tests.unit.metadata.support import PATIENT_S

ROW = LedgerMetadata(
    7,
    Quorum(2, 2, 1),
    DigestKind.CRC32C,
    (Fragment(0, ("b1@1", "b2@1")),),
    state=State.CLOSED,
    last_entry=9,
    length=1,
    ledger_key=KEY,
)


ROW_REPAIR = PendingRepair(0, "b1@1", "b4@1")


class Row:
    """A metadata port with one row. `steps` are taken when the row has been changed so often."""

    def __init__(self) -> None:
        self.row = ROW
        self.changes = 0
        self.missed: list[MissedRange] = []
        """What was queued with changes."""
        self.steps: dict[int, Any] = {}
        self.before: dict[int, Any] = {}
        """What is done just before a change, the number of which it is."""

    async def read(self, _ledger_id: int) -> tuple[CasStatus, LedgerMetadata]:
        return CasStatus.OK, self.row

    async def cas(
        self, row: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata]:
        assert attempt
        self.before.pop(self.changes + 1, lambda: None)()
        if row.version != self.row.version:
            return CasStatus.CONFLICT, self.row
        self.missed += missed
        self.row = replace(row, version=row.version + 1)
        self.changes += 1
        self.steps.get(self.changes, lambda: None)()
        return CasStatus.OK, self.row


@dataclass
class Two:
    """b1 leaves, b2 has all of ledger 7, and b4 has some of it left from earlier; nobody names b4."""

    worker: Worker
    stores: dict[str, Store]
    row: Row

    @property
    def target(self) -> Store:
        return self.stores["b4"]

    async def mend(self) -> None:
        item = RepairItem(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=True)
        await self.worker.repair(item)

    async def look_again(self) -> None:
        """What another worker makes of what the change of the place has queued."""
        assert len(self.row.missed) == 1, "it is queued once"
        (missed,) = self.row.missed
        ranges = ((missed.first, missed.last),)
        await self.worker.repair(
            RepairItem(ledger_id=7, member=missed.member, ranges=ranges, version=1)
        )

    async def held(self) -> list[int]:
        return ids_of(await read(self.target, 7, 0, 20, member="b4@1"))


def flip(store: Store, entry_id: int) -> None:
    """Flip a byte of the stored copy of an entry, and of those in its run."""
    (part,) = store.ledger(7).find(entry_id, entry_id)
    with store.segments.path(part.segment).open("r+b") as file:
        file.seek(part.offset + part.size - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))


def whole(store: Store) -> list[int]:
    """The entries of which the file has the bytes that were written."""
    return [
        entry_id
        for part in store.ledger(7).find(0, 9)
        if part.segment >= 0
        for data in [store.segments.path(part.segment).read_bytes()]
        if google_crc32c.value(data[part.offset : part.offset + part.size]) == part.crc
        for entry_id in part.ids()
    ]


@contextlib.asynccontextmanager
async def two_bookies(state: BookieState) -> AsyncIterator[Two]:
    """b1 is lost, or has all and drains."""
    with scratch("ql-heal-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            served = {}
            for name in ("b1", "b2", "b4"):
                (path := Path(folder) / name).mkdir()
                served[name] = await stack.enter_async_context(bookie(path))
                served[name].store.set_member(f"{name}@1")
                for half in (range(5), range(5, 10)):
                    await add(served[name].store, run_of(7, half), member=f"{name}@1")

            async def fetch() -> BookieList:
                states: dict[str, BookieState] = {"b1": state}
                return BookieList(
                    bookies=tuple(
                        BookieInfo(id=f"{name}@1", state=states.get(name, "writable"), url=one.url)
                        for name, one in served.items()
                        if states.get(name) != "lost"
                    )
                    + tuple(
                        BookieInfo(id=f"{name}@1", state="lost", url="")
                        for name in served
                        if states.get(name) == "lost"
                    )
                )

            session = await stack.enter_async_context(aiohttp.ClientSession())
            directory = Directory(fetch)
            await directory.refresh()
            bookies = BookieClient(directory.address, session)
            stack.push_async_callback(bookies.close)
            tasks, timers = Tasks(), Timers(asyncio.get_running_loop())
            row = Row()
            times = MachineTimes(quorum_s=PATIENT_S, hedge_s=PATIENT_S)
            ports = Ports(bookies, row, directory, timers, tasks, times)
            losses = KnownLosses(HoldingsClient(directory, session))
            parts: Any = (None, directory, ports, session, losses, None)
            yield Two(Worker(*parts), {name: one.store for name, one in served.items()}, row)
            await tasks.close()
            timers.close()


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with two_bookies("lost") as running:
        yield running


async def test_entries_a_bookie_is_about_to_drop_are_copied_to_it_again(two: Two) -> None:
    """It has looked for the last time, and is not named; then a repair names it (rules 18 and 20)."""
    two.row.steps[1] = lambda: two.target.drop(7, keep_stub=True)

    await two.mend()

    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
    assert await two.held() == list(range(10))


async def test_entries_that_a_named_target_has_are_not_sent_again(two: Two) -> None:
    two.row.row = two.row.row.with_repair(ROW_REPAIR)
    before = two.target.counters["log_records"]

    await two.mend()

    assert two.target.counters["log_records"] == before + 1, "the copy of the row"
    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")


async def test_the_only_healthy_copy_survives_a_move_to_a_damaged_one() -> None:
    """Rule 20a. A draining bookie has it; b2's copy and what the target has of earlier have a flipped byte."""
    async with two_bookies("draining") as two:
        for name in ("b2", "b4"):
            flip(two.stores[name], 7)
        two.row.row = two.row.row.with_repair(ROW_REPAIR)
        seen: list[list[int]] = []
        two.row.steps[1] = lambda: seen.append(whole(two.target))

        await two.mend()

        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert seen == [list(range(10))], "all was right on the target's disk before the change"


async def test_a_member_with_entries_that_no_other_has_keeps_its_place(two: Two) -> None:
    """Rule 20a: b1 may come back. What can be copied is."""
    for name in ("b2", "b4"):
        flip(two.stores[name], 7)
    two.row.row = two.row.row.with_repair(ROW_REPAIR)

    with pytest.raises(EntryUnavailable):
        await two.mend()

    assert two.row.row.fragments[0].bookies == ("b1@1", "b2@1")
    assert not two.row.missed
    assert await two.held() == list(range(5))


async def test_a_target_that_was_dropped_meanwhile_is_filled_again() -> None:
    """Rules 18 and 20a. Another repair of the place took the mark away just before the change, and b4's collector saw
    that nothing named it.
    """
    async with two_bookies("lost") as two:

        def unmark() -> None:
            two.row.row = replace(two.row.row, repairs=(), version=two.row.row.version + 1)
            two.target.drop(7, keep_stub=True)

        two.row.before[2] = unmark
        seen: list[list[int]] = []
        two.row.steps[3] = lambda: seen.append(whole(two.target))

        await two.mend()

        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert seen == [list(range(10))], "all was on the target's disk before the change"


async def test_a_place_that_went_bad_is_repaired_by_the_second_look() -> None:
    """Rule 20a: the change of the place queues it, so that no worker's death leaves it out.

    The worker dies as the place changes hands, and b4 loses what it was seen to have.
    """
    async with two_bookies("lost") as two:
        await dies_at_the_change(two)
        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert whole(two.target) == list(range(5, 10))

        await two.look_again()

        assert whole(two.target) == list(range(10))


async def dies_at_the_change(two: Two) -> None:
    died = asyncio.Event()

    def die() -> None:
        flip(two.target, 2)
        died.set()
        raise asyncio.CancelledError

    two.row.steps[2] = die
    mending = asyncio.create_task(two.mend())
    await died.wait()
    mending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await mending


async def test_a_second_look_at_a_complete_copy_writes_nothing(two: Two) -> None:
    await two.mend()
    before = {name: store.counters["log_records"] for name, store in two.stores.items()}

    await two.look_again()

    assert {name: store.counters["log_records"] for name, store in two.stores.items()} == before


async def test_nobody_is_let_go_before_the_target_keeps_the_row() -> None:
    """Rule 20b. The database may go back behind the change of the place: who left would be all that is named then."""
    async with two_bookies("draining") as two:
        rows: list[LedgerMetadata] = []
        copies: list[tuple[RowName, ...]] = []

        def look() -> None:
            rows.append(two.row.row)
            copies.append(two.target.ledger(7).row_names)

        two.row.steps = {2: look, 3: look}

        await two.mend()

        placed, released = rows
        assert placed.fragments[0].bookies == ("b4@1", "b2@1")
        assert ("b1@1" in placed.all_members, "b1@1" in released.all_members) == (True, False)
        assert copies == [(), (name_of(placed),)]
        body = decode(two.target.ledger(7).row_copy(name_of(placed)).body)
        assert body.fragments == placed.fragments


async def test_what_a_dead_worker_left_is_finished_by_the_next_one() -> None:
    """Rule 20b. By that of the member that left, or of the one that came; neither needs the former."""
    for by_whom in (Two.mend, Two.look_again):
        async with two_bookies("lost") as two:
            await dies_at_the_change(two)
            assert "b1@1" in two.row.row.all_members

            await by_whom(two)

            assert two.row.row.repairs == ()
            assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")


async def test_missed_entries_of_a_member_without_a_place_need_no_repair(two: Two) -> None:
    """A writer hands over what a member missed when that has been replaced already: nobody waits for
    a bookie that never comes back.
    """
    await two.mend()
    changes = two.row.changes
    lacked = RepairItem(ledger_id=7, member="b1@1", ranges=((3, 3),), version=1)

    await two.worker.repair(lacked)

    assert two.row.changes == changes


async def test_silence_is_no_second_look() -> None:
    """b4 looks whether it drops the ledger, and says nothing of it meanwhile."""
    async with two_bookies("lost") as two:
        await two.mend()
        two.target.withheld.add(7)

        with pytest.raises(QuorumLogError):
            await two.look_again()


async def test_a_bookie_answers_nothing_about_a_ledger_while_it_decides_to_drop_it() -> None:
    with scratch("ql-heal-") as folder:
        async with bookie(folder) as served:
            await add(served.store, run_of(7, range(10)))
            path = f"{served.url}/v1/ledgers/7"
            served.store.withheld.add(7)
            async with served.session.get(path) as answer:
                assert answer.status == 503
            served.store.withheld.discard(7)
            async with served.session.get(path) as answer:
                assert (answer.status, (await answer.json())["ranges"]) == (200, [[0, 9]])
