"""Members have copies of rows that no append names: of the created, the closed, the recovered (rule 18b)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest

from loadtest.stores import Stores
from quorumlog.errors import (
    UNKNOWN,
    DatabaseWentBack,
    EntryUnavailable,
    MetadataUnavailable,
    NoSuchLedger,
)
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.metadata import Deletion, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowCopy, name_of
from quorumlog.wire import row_copies
from quorumlog.wire.frames import Message, Op, Request
from services.gateway.engine import ends
from tests.support.database import connected, sql
from tests.support.framed import Line
from tests.support.replicas import HeldEntries
from tests.support.waiting import until, within
from tests.unit.gateway.engine.support import MemoryBookie, World, ledger, world_of
from tests.unit.metadata.support import swapped

End = Callable[[World, int], Awaitable[LedgerMetadata]]
Read = Callable[[World, int], Awaitable[object]]


def keepers(world: World, row: LedgerMetadata) -> list[MemoryBookie]:
    """The members that keep a copy of this very row."""
    copy = RowCopy(name_of(row), row_copies.encode(row))
    found = []
    for bookie in world.of(row):
        held = bookie.ledgers.get(row.ledger_id)
        if held is not None and cast("HeldEntries", held.holdings).copies.get(copy.name) == copy:
            found.append(bookie)
    return found


class Withheld:
    """Bookies that keep no copy of a closed row until `allowed` is set."""

    def __init__(self, *bookies: MemoryBookie) -> None:
        self.allowed, self.asked = asyncio.Event(), asyncio.Event()
        self.count = 0
        """Copies that they were sent."""
        for bookie in bookies:
            bookie.behave = self._behaving(bookie)

    def _behaving(
        self, bookie: MemoryBookie
    ) -> Callable[[Request, Line], Awaitable[Message | None]]:
        async def behave(request: Request, line: Line) -> Message | None:
            if (
                request.op is Op.KEEP_ROW
                and request.row is not None
                and request.row.name.version > 1
            ):
                self.count += 1
                self.asked.set()
                await self.allowed.wait()
            return await bookie.obey(request, line)

        return behave


async def closed(world: World, ledger_id: int) -> LedgerMetadata:
    return await world.engine.close(ledger_id)


async def closed_elsewhere(world: World, ledger_id: int) -> LedgerMetadata:
    return await world.other.close(ledger_id)


async def recovered(world: World, ledger_id: int) -> LedgerMetadata:
    return await world.other.recover(ledger_id)


async def drained(world: World, ledger_id: int) -> LedgerMetadata:
    await world.engine.drain()
    return await world.metadata.get(ledger_id)


ENDS = pytest.mark.parametrize("end", [closed, closed_elsewhere, recovered, drained])


@ENDS
async def test_an_answered_end_is_kept_by_the_members(stores: Stores, end: End) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, ensemble_size=3, write_quorum=3, ack_quorum=3)
        await world.engine.appends.append(row.ledger_id, [b"one", b"two"])

        done = await end(world, row.ledger_id)

        assert keepers(world, done) == world.of(done)


async def test_a_place_is_kept_once_every_member_has_confirmed_it(stores: Stores) -> None:
    """A member confirms when its entries are on disk too (rule 31): so an ack quorum has each."""
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", ensemble_size=3, write_quorum=3, ack_quorum=2)
        await world.engine.close(row.ledger_id)
        with pytest.raises(EntryUnavailable):
            await world.other.keep_place(row.ledger_id)  # it has no place yet
        await sql(
            stores,
            f"UPDATE ledgers SET first_offset = 7, version = 9 WHERE ledger_id = {row.ledger_id}",
        )
        silent = world.of(row)[2]
        silent.is_silent = True

        with pytest.raises(EntryUnavailable):
            await world.other.keep_place(row.ledger_id)
        silent.is_silent = False
        await world.other.keep_place(row.ledger_id)

        assert len(keepers(world, await world.metadata.get(row.ledger_id))) == 3


@ENDS
async def test_an_end_is_not_answered_before_its_copies(stores: Stores, end: End) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, ensemble_size=3, write_quorum=3, ack_quorum=2)
        await world.engine.appends.append(row.ledger_id, [b"one"])
        slow = Withheld(*world.of(row)[:2])

        asking = asyncio.ensure_future(end(world, row.ledger_id))
        async with within("the members are asked"):
            await slow.asked.wait()
        known = await world.metadata.get(row.ledger_id)
        is_early = asking.done() and not len(keepers(world, known)) >= 2
        slow.allowed.set()
        done = await asking

        assert not is_early
        assert len(keepers(world, done)) >= 2


async def test_an_end_that_the_database_lost_before_it_was_kept_is_not_told(stores: Stores) -> None:
    """The gateways stood still meanwhile, and rows were rebuilt without copies of the ends."""
    async with world_of(stores) as world, connected(stores) as database:
        for end in (closed, recovered):
            row = await ledger(world.engine, b"one", ensemble_size=3, ack_quorum=2)
            slow = Withheld(*world.of(row))
            asking = asyncio.ensure_future(end(world, row.ledger_id))
            async with within("the members are asked"):
                await slow.asked.wait()
            await database.execute(
                "UPDATE ledgers SET version = $2, attempt = $3,"
                ' body = body || \'{"state": "OPEN", "last_entry": null, "length": null}\''
                " WHERE ledger_id = $1",
                row.ledger_id,
                row.version,
                row.attempt,
            )
            slow.allowed.set()

            with pytest.raises(DatabaseWentBack) as reported:
                await asking
            assert reported.value.outcome == UNKNOWN


READS = pytest.mark.parametrize(
    "read",
    [
        lambda world, ledger_id: world.other.reads.last_add_confirmed(ledger_id),
        lambda world, ledger_id: world.other.reads.last_add_confirmed(
            ledger_id, after=0, wait_s=60
        ),
        lambda world, ledger_id: world.other.reads.read(ledger_id, 0),
        lambda world, ledger_id: world.other.get(ledger_id),
        lambda world, ledger_id: world.other.appends.append(ledger_id, [b"late"]),
    ],
    ids=["lac", "wait", "read", "row", "append"],
)


async def unkept(world: World) -> tuple[LedgerMetadata, Withheld, asyncio.Future[LedgerMetadata]]:
    """A ledger whose writer is about to close it: the database has the end, and members keep no copy yet."""
    row = await ledger(world.engine, b"one", ensemble_size=3, write_quorum=3, ack_quorum=2)
    slow = Withheld(*world.of(row)[:2])
    closing = asyncio.ensure_future(world.engine.close(row.ledger_id))
    async with within("the members are asked"):
        await slow.asked.wait()
    return await world.metadata.get(row.ledger_id), slow, closing


@READS
async def test_a_reader_is_told_an_end_once_members_keep_it(stores: Stores, read: Read) -> None:
    async with world_of(stores) as world:
        row, slow, closing = await unkept(world)

        reading = asyncio.ensure_future(read(world, row.ledger_id))
        await until(lambda: slow.count >= 4, "the members are asked for the reader too")
        is_early = reading.done() and len(keepers(world, row)) < 2
        slow.allowed.set()
        await asyncio.wait([reading])

        assert not is_early
        assert len(keepers(world, row)) >= 2
        assert await closing == row


async def test_an_end_that_was_told_costs_later_readers_nothing(stores: Stores) -> None:
    async with world_of(stores) as world:
        row, slow, closing = await unkept(world)
        slow.allowed.set()
        await closing
        reported = slow.count

        await world.engine.reads.read(row.ledger_id, 0)
        assert slow.count == reported
        await world.other.reads.read(row.ledger_id, 0)
        by_other = slow.count
        await world.other.reads.read(row.ledger_id, 0)

        assert slow.count == by_other > reported


async def test_a_reader_is_told_no_end_that_the_database_lost(stores: Stores) -> None:
    """What bookies know as confirmed is read all the same."""
    async with world_of(stores) as world:
        row, slow, closing = await unkept(world)
        reading = asyncio.ensure_future(world.other.reads.last_add_confirmed(row.ledger_id))
        await until(lambda: slow.count >= 4, "the members are asked for the reader too")
        await sql(
            stores,
            "UPDATE ledgers SET version = 1,"
            ' body = body || \'{"state": "OPEN", "last_entry": null, "length": null}\''
            " WHERE ledger_id = $1",
            row.ledger_id,
        )
        slow.allowed.set()

        reported = await reading

        assert not reported.closed
        assert reported.lac_source == "bookies"
        with pytest.raises(DatabaseWentBack):
            await closing


async def test_a_close_is_answered_although_no_member_keeps_its_row(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine)
        await world.engine.appends.append(row.ledger_id, [b"one"])
        Withheld(*world.bookies.values())

        done = await world.engine.close(row.ledger_id)

        assert done == await world.metadata.get(row.ledger_id)
        assert keepers(world, done) == []


async def test_a_repeated_close_brings_the_copies_missed_before(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, ensemble_size=3, write_quorum=3, ack_quorum=3)
        await world.engine.appends.append(row.ledger_id, [b"one"])
        for bookie in world.bookies.values():
            bookie.is_silent = True
        closing = asyncio.ensure_future(world.engine.close(row.ledger_id))

        async def is_closed() -> bool:
            return (await world.metadata.get(row.ledger_id)).last_entry is not None

        await until(is_closed, "the row is closed")
        for bookie in world.bookies.values():
            bookie.is_silent = False
        done = await world.other.close(row.ledger_id)

        assert keepers(world, done) == world.of(done)
        assert await closing == done


async def test_a_ledger_without_entries_is_known_to_its_members(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine)

        async def is_known() -> bool:
            return keepers(world, row) == world.of(row)

        await until(is_known, "all members have a copy")


async def test_members_know_no_ledger_of_a_log_before_its_place(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, log="a-log")
        placed = replace(row, first_offset=7)

        world.engine.handles.place_in_log(row.ledger_id, 7)

        async def is_known() -> bool:
            return keepers(world, placed) == world.of(placed)

        await until(is_known, "all members have a copy with the place, and none without it")


async def test_rows_that_others_changed_are_kept_by_the_members(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, ensemble_size=3, write_quorum=3, ack_quorum=3)
        await world.engine.appends.append(row.ledger_id, [b"one"])
        closed = await world.engine.close(row.ledger_id)
        changed = await swapped(world.metadata, closed.given_up(0, 0, ()))
        never = row.ledger_id + 1

        await world.other.copy_rows([never, row.ledger_id])

        assert keepers(world, changed) == world.of(changed)


async def test_an_accepted_loss_is_kept_by_the_members(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proven(*_: object) -> None: ...

    monkeypatch.setattr(ends, "_prove_lost", proven)
    async with world_of(stores) as world:
        row = await ledger(world.engine, ensemble_size=3, write_quorum=3, ack_quorum=3)
        await world.engine.appends.append(row.ledger_id, [b"one", b"two"])
        await world.engine.close(row.ledger_id)

        done = await world.other.accept_loss(row.ledger_id, 1, 1)

        assert done.lost_entries == ((1, 1),)
        assert keepers(world, done) == world.of(done)


def reported(world: World, row: LedgerMetadata) -> list[MemoryBookie]:
    """The members that keep a copy which says that the ledger is deleted."""
    found = []
    for bookie in world.of(row):
        copies = cast("HeldEntries", bookie.ledgers[row.ledger_id].holdings).copies
        deletions = [row_copies.decode(copy.body).deletion for copy in copies.values() if copy.body]
        if any(one not in (None, Deletion.OF_LOG) for one in deletions):
            found.append(bookie)
    return found


async def test_an_answered_deletion_is_known_to_the_members(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", ensemble_size=3, write_quorum=3, ack_quorum=3)
        row = await world.engine.close(row.ledger_id)

        await world.other.delete(row.ledger_id)

        assert reported(world, row) == world.of(row)


async def test_a_deletion_is_not_answered_before_members_know(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", ensemble_size=3, write_quorum=3, ack_quorum=2)
        row = await world.engine.close(row.ledger_id)
        slow = Withheld(*world.of(row)[:2])

        deleting = asyncio.ensure_future(world.engine.delete(row.ledger_id))
        async with within("the members are asked"):
            await slow.asked.wait()
        is_early = deleting.done() and len(reported(world, row)) < 2
        slow.allowed.set()
        await deleting

        assert not is_early
        assert len(reported(world, row)) >= 2


async def test_a_deletion_is_answered_although_no_member_hears_of_it(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"one")
        row = await world.engine.close(row.ledger_id)
        Withheld(*world.bookies.values())

        await world.engine.delete(row.ledger_id)

        assert reported(world, row) == []
        with pytest.raises(NoSuchLedger):
            await world.engine.get(row.ledger_id)


async def test_a_deletion_lost_before_members_knew_is_not_told_as_done(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", ensemble_size=3, ack_quorum=2)
        row = await world.engine.close(row.ledger_id)
        async with connected(stores) as database:
            get = "SELECT body::text FROM ledgers WHERE ledger_id = $1"
            body = await database.fetchval(get, row.ledger_id)
            slow = Withheld(*world.of(row))
            deleting = asyncio.ensure_future(world.engine.delete(row.ledger_id))
            async with within("the members are asked"):
                await slow.asked.wait()
            await database.execute(
                "UPDATE ledgers SET version = $2, body = $3::text::jsonb WHERE ledger_id = $1",
                row.ledger_id,
                row.version,
                body,
            )
        slow.allowed.set()

        with pytest.raises(DatabaseWentBack) as told_of:
            await deleting
        assert told_of.value.outcome == UNKNOWN


async def a_log(world: World) -> list[LedgerMetadata]:
    """A log of three ledgers, the last one open; the rows of all."""
    logs = world.gateways[0].logs
    await logs.put("log", LogSettings(Quorum(3, 3, 3)))
    for _ in range(3):
        await logs.append("log", Append.of((Record(b"one"),)))
        await logs.roll("log")
    view = await logs.get("log")
    return [await world.engine.get(one.ledger_id) for one in view.log.items]


async def test_a_deleted_logs_ledgers_are_known_to_their_members_as_deleted(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        rows = await a_log(world)

        await world.gateways[0].logs.delete("log")

        assert [reported(world, row) for row in rows] == [world.of(row) for row in rows]


async def test_a_truncation_is_told_though_nobody_deletes_the_ledgers(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(stores, gateways=1) as world:
        rows = await a_log(world)

        async def refused(ledger_id: int) -> None:
            raise MetadataUnavailable("it ended just now", ledger_id=ledger_id)

        monkeypatch.setattr(world.gateways[0].logs.orphans, "delete", refused)
        await world.gateways[0].logs.truncate("log", 2)

        assert [reported(world, row) for row in rows[:2]] == [world.of(row) for row in rows[:2]]


async def test_truncated_ledgers_are_known_to_their_members_as_deleted(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        rows = await a_log(world)

        await world.gateways[0].logs.truncate("log", 2)

        assert [reported(world, row) for row in rows[:2]] == [world.of(row) for row in rows[:2]]
        assert [reported(world, row) for row in rows[2:]] == [[] for _ in rows[2:]]


async def test_members_hear_of_a_shared_ledgers_deletion_after_its_logs(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        rows, logs = await a_log(world), world.gateways[0].logs
        await logs.fork(
            logs.draft("fork", LogSettings(Quorum(3, 3, 3))), await logs.rows.row("log"), 2
        )
        await logs.delete("log")
        assert [reported(world, row) for row in rows[:2]] == [[], []], "the fork names them"

        await logs.delete("fork")

        assert [reported(world, row) for row in rows[:2]] == [world.of(row) for row in rows[:2]]
