"""What the engine does, and says, when others fail."""

import asyncio
from functools import partial
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry

from loadtest.stores import Stores
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    CopyLost,
    EntryUnavailable,
    InvalidRequest,
    LedgerClosed,
    LedgerFenced,
    MetadataUnavailable,
    NoSuchLedger,
    Overloaded,
    QuorumLogError,
    QuorumTimeout,
    RecoveryBlocked,
    WriterLost,
)
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol import record, writer
from quorumlog.protocol.messages import AppendRequested, Effect, Event, Failed, Status
from quorumlog.protocol.metadata import LedgerMetadata, State, Writer
from quorumlog.wire.frames import Message, Op, Request
from services.gateway.engine import handles as handles_module
from services.gateway.engine import rows as engine_rows
from services.gateway.engine.handle import RUN_BYTES_MAX, RUNS_IN_FLIGHT, WriteHandle
from services.gateway.engine.tails import RECENT_RUN_BYTES_MAX
from services.gateway.interface import FRAMES
from services.gateway.metrics import EngineMetrics
from tests.support.framed import Line
from tests.support.waiting import turns, until, within
from tests.unit.gateway.engine.support import Gate, World, ledger, payloads, world_of
from tests.unit.net.peer import ok

PATIENT = MachineTimes(add_s=120, quorum_s=120)
"""For bookies that a test holds back: their silence is no failure."""


async def test_a_bookie_that_dies_is_replaced_and_no_append_fails(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"0")
        dead = world.of(row)[1]

        await dead.stop()
        for number in range(1, 20):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number])

        async def is_replaced() -> bool:
            now = await world.metadata.get(row.ledger_id)
            return dead.member not in now.last_fragment.bookies

        await until(is_replaced, "another bookie is in its place")
        assert await payloads(world.engine, row.ledger_id) == [b"%d" % n for n in range(20)]
        assert (await world.engine.close(row.ledger_id)).last_entry == 19


async def test_a_striped_ledger_survives_the_loss_of_a_bookie(stores: Stores) -> None:
    async with world_of(stores, bookies=6) as world:
        row = await ledger(world.engine, ensemble_size=5, write_quorum=3, ack_quorum=2)
        wanted = [b"%d" % number for number in range(120)]
        await world.engine.appends.append(row.ledger_id, wanted[:50])
        await world.of(row)[2].stop()

        await world.other.appends.append(row.ledger_id, wanted[50:90])
        for data in wanted[90:]:
            await world.engine.appends.append(row.ledger_id, [data])

        assert await payloads(world.other, row.ledger_id) == wanted
        closed = await world.other.close(row.ledger_id)
        assert closed.last_entry == 119
        assert await payloads(world.engine, row.ledger_id) == wanted


async def test_without_a_spare_bookie_the_writer_continues_degraded(stores: Stores) -> None:
    async with world_of(stores, bookies=3, gateways=1) as world:
        row = await ledger(world.engine, b"0")

        await world.of(row)[0].stop()
        for number in range(1, 5):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number])

        async def is_reported() -> bool:
            return row.ledger_id in (await world.engine.cluster())["degraded_ledgers"]

        await until(is_reported, "the ledger is called degraded")
        registry = CollectorRegistry()
        registry.register(EngineMetrics(world.engine))
        assert registry.get_sample_value("quorumlog_gateway_degraded_ledgers") == 1
        assert registry.get_sample_value("quorumlog_gateway_open_ledgers") == 1
        assert await payloads(world.engine, row.ledger_id) == [b"%d" % n for n in range(5)]


async def test_an_append_without_a_quorum_is_unknown_and_recoverable(stores: Stores) -> None:
    times = MachineTimes(quorum_s=4)
    async with world_of(stores, bookies=3, times=times) as world:
        row = await ledger(world.engine, b"kept")
        for bookie in world.of(row)[:2]:
            bookie.is_silent = True

        with pytest.raises(QuorumTimeout) as failed:
            await world.other.appends.append(row.ledger_id, [b"maybe"])
        assert failed.value.outcome == UNKNOWN
        for bookie in world.of(row):
            bookie.is_silent = False

        closed = await world.other.recover(row.ledger_id)
        stored = await payloads(world.other, row.ledger_id)
        assert stored in ([b"kept"], [b"kept", b"maybe"])
        assert closed.last_entry == len(stored) - 1


async def test_a_recovery_fences_the_writer_and_its_gateway_learns_the_end(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one")

        recovered = await world.other.recover(row.ledger_id)

        assert (recovered.state, recovered.last_entry) == (State.CLOSED, 0)
        with pytest.raises((LedgerFenced, LedgerClosed)):
            await world.engine.appends.append(row.ledger_id, [b"two"])
        with pytest.raises(LedgerClosed):
            await world.engine.appends.append(row.ledger_id, [b"two"])
        assert await world.engine.close(row.ledger_id) == recovered
        assert await payloads(world.engine, row.ledger_id) == [b"one"]


async def test_a_close_beyond_the_writers_end_conflicts_everywhere(stores: Stores) -> None:
    async with world_of(stores, bookies=3) as world:
        row = await ledger(world.engine, b"one")
        writer = world.engine.handles.by_ledger[row.ledger_id]
        # Two bookies have a second entry, which recovery must find, and of which the writer
        # knows nothing.
        for member in row.last_fragment.bookies[:2]:
            await _leave_copy(world, row, member)
        closed = await world.other.recover(row.ledger_id)
        assert closed.last_entry == 1
        await until(lambda: not writer.is_live, "the writer has heard of it")

        for engine in (world.engine, world.other):
            with pytest.raises(LedgerClosed) as conflict:
                await engine.close(row.ledger_id)
            assert conflict.value.members["last_entry"] == 1


async def _leave_copy(world: World, row: LedgerMetadata, member: str) -> None:
    run = record.make(
        ledger_id=row.ledger_id,
        first_entry=1,
        last_add_confirmed=0,
        length_before=3,
        payloads=[b"two"],
        codec=record.Codec(row.digest),
    )
    done: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    world.engine.handles.ports.bookies.add(member, row.ledger_key, run, done.set_result)
    assert await done is Status.OK


async def test_appends_in_flight_during_a_recovery_are_recovered_or_fail(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        stop = asyncio.Event()
        acknowledged: list[tuple[int, bytes]] = []

        async def write() -> None:
            number = 0
            while not stop.is_set():
                data = b"%d" % number
                done = await world.engine.appends.append(row.ledger_id, [data])
                acknowledged.append((done.first, data))
                number += 1

        writing = asyncio.ensure_future(write())
        await until(lambda: len(acknowledged) > 20, "some are acknowledged")
        closed = await world.other.recover(row.ledger_id)
        stop.set()
        (ended,) = await asyncio.gather(writing, return_exceptions=True)
        assert ended is None or isinstance(ended, LedgerFenced | LedgerClosed)

        stored = await payloads(world.other, row.ledger_id)
        assert closed.last_entry == len(stored) - 1
        for entry_id, data in acknowledged:
            assert stored[entry_id] == data


async def test_the_writers_gateway_recovers_a_ledger_found_in_recovery(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"one")
        status, marked = await world.metadata.cas(row.in_recovery())
        assert marked is not None, status

        with pytest.raises(LedgerFenced):
            await world.engine.close(row.ledger_id)

        async def is_closed() -> bool:
            return (await world.metadata.get(row.ledger_id)).state is State.CLOSED

        await until(is_closed, "the writer's gateway has recovered it (rule 10)")
        assert await payloads(world.engine, row.ledger_id) == [b"one"]


async def test_a_failed_handles_ledger_is_recovered(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"one")

        step = writer.LedgerWriter.step

        def broken(machine: writer.LedgerWriter, event: Event) -> list[Effect]:
            # Not at the answer of the third copy of "one", which may be late.
            if type(event) is AppendRequested:
                raise AssertionError("a defect of ours")
            return step(machine, event)

        monkeypatch.setattr(writer.LedgerWriter, "step", broken)
        with pytest.raises(QuorumLogError) as failed:
            await world.engine.appends.append(row.ledger_id, [b"two"])
        assert failed.value.outcome == UNKNOWN

        async def is_closed() -> bool:
            return (await world.metadata.get(row.ledger_id)).state is State.CLOSED

        await until(is_closed, "the ledger is recovered")
        assert await payloads(world.engine, row.ledger_id) == [b"one"]
        with pytest.raises(LedgerClosed):
            await world.engine.appends.append(row.ledger_id, [b"three"])


async def test_a_close_by_an_older_row_than_a_bookie_holds_is_told_as_such(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 18d, also where the writer fails first, and closes the ledger of its own accord."""

    async def behind(*_given: object, **_named: object) -> NoReturn:
        raise CopyLost("a bookie holds a copy")

    async with world_of(stores, gateways=1) as world:
        row, failing = await ledger(world.engine, b"one"), await ledger(world.engine, b"two")
        monkeypatch.setattr(MetadataClient, "cas", behind)
        with pytest.raises(CopyLost):
            await world.engine.close(row.ledger_id)

        handle = world.engine.handles.by_ledger[failing.ledger_id]
        # Any event, such as the last member's answer to the append, would begin the close before it is asked for.
        machine = handle.machine
        await until(lambda: not machine._window.is_waiting(), "all members have answered")
        monkeypatch.setattr(machine, "state", writer.WriterState.ENDING)
        with pytest.raises(CopyLost):
            await world.engine.close(failing.ledger_id)
        assert not handle.is_live


async def test_unreadable_entries_are_unavailable_not_absent(stores: Stores) -> None:
    async with world_of(stores, bookies=3) as world:
        # Of a size that its writer does not keep in memory.
        row = await ledger(world.engine, bytes(RECENT_RUN_BYTES_MAX))
        for bookie in world.of(row):
            await bookie.stop()

        for engine in (world.engine, world.other):
            with pytest.raises(EntryUnavailable):
                await engine.reads.entry(row.ledger_id, 0)
            with pytest.raises(EntryUnavailable):
                await engine.reads.read(row.ledger_id, 0)
        for bookie in world.of(row):
            await bookie.start()

        async def is_back() -> bool:
            return not any((await world.other.reads.entry(row.ledger_id, 0)).runs[0].payload(0))

        await until(is_back, "the entry is read", passing=(EntryUnavailable,))


async def test_lying_bookies_make_no_acknowledged_entry_absent(stores: Stores) -> None:
    async with world_of(stores, bookies=3) as world:
        row = await ledger(world.engine, b"one")
        for bookie in world.of(row):
            await until(partial(bookie.entries, row.ledger_id), "it has the entry")
        await world.engine.close(row.ledger_id)
        for bookie in world.of(row):
            bookie.ledgers.clear()

        with pytest.raises(EntryUnavailable):
            await world.other.reads.entry(row.ledger_id, 0)


async def test_without_metadata_open_and_cached_ledgers_still_work(stores: Stores) -> None:
    async with world_of(stores, metadata_s=3.0) as world:
        row = await ledger(world.engine, b"0")
        assert await payloads(world.other, row.ledger_id) == [b"0"]
        async with world.outage():
            for number in range(1, 4):
                for engine in (world.engine, world.other):
                    await engine.appends.append(row.ledger_id, [b"%d" % number])
                    assert (await payloads(engine, row.ledger_id))[-1] == b"%d" % number
            with pytest.raises(MetadataUnavailable):
                await world.other.get(row.ledger_id)
            with pytest.raises(MetadataUnavailable):
                await ledger(world.engine)

        async def end() -> int | None:
            return (await world.engine.close(row.ledger_id)).last_entry

        assert await until(end, "the ledger closes", passing=(MetadataUnavailable,)) == 6


async def test_an_unknown_ledger_is_not_taken_for_one_without_a_transaction(stores: Stores) -> None:
    async with world_of(stores, metadata_s=3.0) as world:
        row = await ledger(world.engine)
        assert await world.other.appends.transaction_of(row.ledger_id + 1) is None
        async with world.outage():
            with pytest.raises(MetadataUnavailable):
                await world.other.appends.transaction_of(row.ledger_id)
            assert await world.engine.appends.transaction_of(row.ledger_id) is None


async def test_bytes_in_flight_are_limited_and_released(stores: Stores) -> None:
    limit = 100_000
    async with world_of(
        stores, bookies=3, gateways=1, times=PATIENT, ledger_in_flight_bytes_max=limit
    ) as world:
        row = await ledger(world.engine)
        gate = Gate(world.of(row))
        submitted = [
            world.engine.handles.get(row.ledger_id).append([bytes(30_000)]) for _ in range(3)
        ]
        with pytest.raises(Overloaded):
            await world.engine.handles.get(row.ledger_id).append([bytes(30_000)])
        gate.open()

        await asyncio.gather(*submitted)
        assert (await world.engine.appends.append(row.ledger_id, [bytes(90_000)])).first == 3


async def test_appends_are_batched_while_two_runs_are_in_flight(stores: Stores) -> None:
    async with world_of(stores, bookies=3, gateways=1, times=PATIENT) as world:
        row = await ledger(world.engine)
        one = world.of(row)[0]
        gate = Gate(world.of(row))

        runs = world.engine.handles.by_ledger[row.ledger_id]._runs
        submitted = []
        for number in range(100):
            submitted.append(world.engine.handles.get(row.ledger_id).append([b"%d" % number]))
            await turns(3)
        assert [last for last, _ in runs] == [*range(RUNS_IN_FLIGHT)]
        gate.open()
        done = await asyncio.gather(*submitted)

        assert [d.first for d in done] == list(range(100))
        await until(lambda: len(one.entries(row.ledger_id)) == 100, "the bookie has all")
        adds = [(request.first, request.last) for request in one.seen if request.op is Op.ADD]
        assert adds == [(n, n) for n in range(RUNS_IN_FLIGHT)] + [(RUNS_IN_FLIGHT, 99)]


async def test_what_has_gathered_is_cut_into_runs_of_a_bounded_size(stores: Stores) -> None:
    half = RUN_BYTES_MAX // 2
    sizes = [half, half, 0, 1, RUN_BYTES_MAX + 1, 0, half, half + 1, 5]
    async with world_of(stores, bookies=3, gateways=1, times=PATIENT) as world:
        row = await ledger(world.engine)
        one = world.of(row)[0]

        done = await world.engine.appends.append(row.ledger_id, [bytes(size) for size in sizes])

        assert (done.first, done.last) == (0, len(sizes) - 1)
        await until(lambda: len(one.entries(row.ledger_id)) == len(sizes), "the bookie has all")
        adds = [(request.first, request.last) for request in one.seen if request.op is Op.ADD]
        assert adds == [(0, 2), (3, 3), (4, 4), (5, 6), (7, 8)]


async def test_appends_of_one_turn_of_the_loop_are_one_run(stores: Stores) -> None:
    async with world_of(stores, bookies=3, gateways=1) as world:
        row = await ledger(world.engine)

        done = await asyncio.gather(
            *[world.engine.handles.get(row.ledger_id).append([b"%d" % n]) for n in range(50)]
        )

        assert [d.first for d in done] == list(range(50))
        for bookie in world.of(row):
            await until(partial(bookie.entries, row.ledger_id), "it has the run")
            # On a slow machine the writer, idle for 10 ms, has sent its LAC as well.
            adds = [
                (request.first, request.last) for request in bookie.seen if request.op is Op.ADD
            ]
            assert adds == [(0, 49)]


async def test_a_forwarded_append_that_breaks_after_sending_is_unknown(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        await world.other.reads.read(row.ledger_id, 0)

        async def never(request: Request, _line: Line) -> Message | None:
            if request.op is Op.ADD:
                killing.append(asyncio.ensure_future(world.gateways[0].kill()))
                return None
            return ok(request, Status.UNKNOWN)

        killing: list[asyncio.Future[None]] = []
        for bookie in world.of(row):
            bookie.behave = never
        with pytest.raises(QuorumLogError) as lost:
            await world.other.appends.append(row.ledger_id, [b"x"])
        await asyncio.gather(*killing)

        assert lost.value.outcome == UNKNOWN
        with pytest.raises(WriterLost):
            await world.other.appends.append(row.ledger_id, [b"y"])


async def test_another_process_at_the_writers_address_is_not_the_writer(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        stranger = Writer("another-instance", world.engine.writer.url_inside)

        with pytest.raises(WriterLost):
            await world.other.peers.send(
                stranger, "POST", f"/v1/ledgers/{row.ledger_id}/entries", 5.0, media=FRAMES
            )

        assert stranger.id in world.other.peers._gone
        assert await payloads(world.engine, row.ledger_id) == []


async def test_a_handle_ends_when_others_close_or_delete_its_ledger(stores: Stores) -> None:
    async with world_of(stores) as world:
        rows = [await ledger(world.engine, b"x") for _ in range(2)]
        await world.other.recover(rows[0].ledger_id)
        await world.other.delete(rows[1].ledger_id)

        await until(
            lambda: not world.engine.handles.by_ledger, "the writer's gateway has heard of it"
        )

        with pytest.raises(LedgerClosed) as closed:
            await world.engine.appends.append(rows[0].ledger_id, [b"y"])
        assert closed.value.outcome == NOT_DONE
        with pytest.raises(NoSuchLedger):
            await world.engine.appends.append(rows[1].ledger_id, [b"y"])


async def test_a_failed_handle_goes_when_its_ledger_is_deleted(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        world.engine.handles.by_ledger[row.ledger_id].abandon()
        await world.other.delete(row.ledger_id)

        await until(
            lambda: not world.engine.handles.by_ledger, "the writer's gateway has heard of it"
        )
        with pytest.raises(NoSuchLedger):
            await world.engine.appends.append(row.ledger_id, [b"x"])


async def test_no_handle_is_kept_for_a_ledger_that_is_known_to_have_ended(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends in another order of failure and news; the news is not told a second time."""
    monkeypatch.setattr(engine_rows, "_ROWS_MAX", 1)
    async with world_of(stores) as world:
        engine = world.engine
        late, forgotten, again, closing = [
            engine.handles.by_ledger[(await ledger(engine)).ledger_id] for _ in range(4)
        ]
        engine.rows.deleted(late.ledger_id)  # heard while its own close of the row was under way
        late._fail(Failed("writer-lost"), is_final=True)
        assert late.ledger_id not in engine.handles.by_ledger

        engine.rows.deleted(forgotten.ledger_id)
        engine.rows.deleted(1 << 40)
        assert not engine.rows.is_deleted(forgotten.ledger_id)  # one beyond the bound
        forgotten._fail(Failed("no-such-ledger"), is_final=True)
        assert forgotten.ledger_id not in engine.handles.by_ledger

        again._fail(Failed("quorum-timeout"), is_final=False)  # and its close finds no ledger
        again._fail(Failed("no-such-ledger"), is_final=True)
        assert again.ledger_id not in engine.handles.by_ledger

        closing._close = asyncio.get_running_loop().create_future()
        await world.other.recover(closing.ledger_id)
        await engine.get(closing.ledger_id)  # the row that the failure's answer has too
        closing._fail(Failed("ledger-closed"), is_final=True)
        assert closing.ledger_id not in engine.handles.by_ledger


async def test_a_ledger_is_closed_again_when_its_close_is_remembered_no_more(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles_module, "_CLOSED_KEPT", 1)
    async with world_of(stores) as world:
        rows = [await ledger(world.engine, b"x") for _ in range(2)]
        first = [await world.engine.close(row.ledger_id) for row in rows]
        assert list(world.engine.handles.closed_here) == [rows[1].ledger_id]

        again = [await world.engine.close(row.ledger_id) for row in rows]

        assert [row.last_entry for row in again] == [row.last_entry for row in first] == [0, 0]


async def test_readers_of_a_lost_writers_ledger_get_the_bookies_lac(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        for number in range(5):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number])
        await world.gateways[0].kill()

        page = await world.other.reads.read(row.ledger_id, 0)

        assert page.lac_source == "bookies"
        assert not page.closed
        # The LAC that entries carry is behind the last acknowledged one, until recovery.
        assert 0 <= page.last_add_confirmed <= 4
        await world.other.recover(row.ledger_id)
        assert await payloads(world.other, row.ledger_id) == [b"%d" % n for n in range(5)]


async def test_an_idle_writers_lac_reaches_bookies_and_outlives_it(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        ledger_id = row.ledger_id
        for number in range(5):
            await world.engine.appends.append(ledger_id, [b"%d" % number])

        async def is_reported() -> bool:
            now = await world.engine.get(ledger_id)
            members = [world.bookies[m.partition("@")[0]] for m in now.last_fragment.bookies]
            held = [bookie.ledgers.get(ledger_id) for bookie in members]
            return all(h is not None and h.last_add_confirmed == 4 for h in held)

        await until(is_reported, "every member knows the LAC")
        await world.gateways[0].kill()

        page = await world.other.reads.read(ledger_id, 0)
        assert (page.lac_source, page.last_add_confirmed, page.closed) == ("bookies", 4, False)
        assert await payloads(world.other, ledger_id) == [b"%d" % n for n in range(5)]
        closed = await world.other.recover(ledger_id)
        assert (closed.last_entry, closed.length) == (4, 5)


async def test_a_blocked_recovery_ends_once_members_are_declared_lost(stores: Stores) -> None:
    async with world_of(stores, bookies=5) as world:
        row = await ledger(world.engine, b"one")
        for bookie in world.of(row):
            await until(partial(bookie.entries, row.ledger_id), "it has the entry")
        await world.gateways[0].kill()
        lost = world.of(row)[:2]
        for bookie in lost:
            await bookie.stop()

        with pytest.raises(RecoveryBlocked):
            await world.other.recover(row.ledger_id)
        with pytest.raises(InvalidRequest):
            await world.other.recover(row.ledger_id, declare_lost=["bookie-77"])
        closed = await world.other.recover(
            row.ledger_id, declare_lost=[lost[0].name, lost[1].member]
        )

        assert (closed.state, closed.last_entry) == (State.CLOSED, 0)
        assert closed.may_lack_entries
        assert set(closed.declared_lost) == {bookie.member for bookie in lost}
        assert await payloads(world.other, row.ledger_id) == [b"one"]


async def test_a_writers_missed_entries_are_repaired_after_anothers_end(stores: Stores) -> None:
    """Rule 8: what reached only an ack quorum, and lies below the LAC that their recovery begins at."""
    async with world_of(stores, bookies=3) as world:
        row = await ledger(world.engine, b"0")
        away = world.of(row)[2]
        away.is_silent = True
        for number in range(1, 5):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number])
        assert set(away.entries(row.ledger_id)) < set(range(5))
        away.is_silent = False

        await world.other.recover(row.ledger_id)

        repairs = RepairClient(world.metadata, "nobody")

        async def is_queued() -> bool:
            lacking = {
                entry
                for item in (await repairs.list())[0]
                if item.member == away.member
                for first, last in item.ranges
                for entry in range(first, last + 1)
            }
            return lacking | set(away.entries(row.ledger_id)) >= set(range(5))

        await until(is_queued, "what the third bookie lacks is queued")


async def test_a_write_handle_that_breaks_ends_every_append_and_its_ledger_is_recovered(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_handle: WriteHandle) -> None:
        raise RuntimeError("unforeseen")

    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"kept")
        with monkeypatch.context() as patched:
            patched.setattr(WriteHandle, "_cut_run", broken)
            appends = (world.engine.appends.append(row.ledger_id, [b"%d" % n]) for n in range(3))
            async with within("every append ends"):
                ended = await asyncio.gather(*appends, return_exceptions=True)

        assert [getattr(end, "outcome", None) for end in ended] == [UNKNOWN] * 3
        assert "handle-broke" in caplog.text

        async def is_closed() -> bool:
            return (await world.metadata.get(row.ledger_id)).state is State.CLOSED

        await until(is_closed, "the ledger is recovered")
        assert await payloads(world.engine, row.ledger_id) == [b"kept"]
