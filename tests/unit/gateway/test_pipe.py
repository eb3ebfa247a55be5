"""A stream's appends: in order, bounded, and nothing held when it is over."""

import asyncio
from collections.abc import Sequence

import pytest

from quorumlog.errors import Overloaded, UnexpectedEntryId
from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.http.pipe import Pipe
from services.gateway.interface import EntriesAppended, LedgerOptions
from tests.support.waiting import until
from tests.unit.gateway.fake_engine import FakeEngine


def _to(engine: FakeEngine, room: Room, ledger_id: int, expect: int | None = None) -> Pipe[bytes]:
    async def append(payloads: Sequence[bytes], expect: int | None) -> EntriesAppended:
        return await engine.append(ledger_id, payloads, expect=expect)

    return Pipe(append, room, len, expect)


async def _pipe(limits: Limits | None = None) -> tuple[FakeEngine, Room, Pipe[bytes]]:
    engine, room = FakeEngine(), Room(limits or Limits())
    ledger = await engine.create(LedgerOptions())
    return engine, room, _to(engine, room, ledger.ledger_id)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
async def test_a_stream_is_read_no_further_than_its_buffer(size: int) -> None:
    engine, room, pipe = await _pipe()
    engine.gate = asyncio.Event()
    payloads = [bytes(size)] * max(1, min(10_000, (1 << 20) // (size + 64)))
    rounds = 50

    async def write() -> None:
        for _ in range(rounds):
            await pipe.put(payloads)
        pipe.finish()

    async with asyncio.TaskGroup() as group:
        writer = group.create_task(write())
        reader = group.create_task(_drain(pipe))
        await until(lambda: engine.appending == 1, "the first append is in flight")
        await until(lambda: room.bodies.used > 2 << 20, "the buffer fills")
        assert not writer.done()
        assert room.bodies.used <= 5 << 20
        engine.gate.set()

    assert reader.result() == rounds * len(payloads)
    assert engine.entries[1] == payloads * rounds
    assert room.bodies.used == 0


async def _drain(pipe: Pipe[bytes]) -> int:
    following = 0
    async for appended in pipe.acknowledged():
        assert appended.first == following
        following = appended.last + 1
    return following


async def test_a_stream_for_which_there_is_no_room_is_told() -> None:
    _engine, room, pipe = await _pipe(Limits(held_bytes_max=1000))

    room.bodies.take("another", 900)
    with pytest.raises(Overloaded, match="HELD_BYTES_MAX"):
        await pipe.put([bytes(200)])

    assert room.bodies.used == 900


async def test_items_put_after_the_last_append_are_dropped_and_hold_nothing() -> None:
    engine, room, pipe = await _pipe()
    engine.fails = UnexpectedEntryId("not its place")
    await pipe.put([b"a"])
    assert [run async for run in pipe.acknowledged()] == []

    await pipe.put([b"b"])

    assert isinstance(pipe.error, UnexpectedEntryId)
    assert room.bodies.used == 0


async def test_a_stream_that_expects_its_place_stops_where_somebody_else_wrote() -> None:
    engine, room = FakeEngine(), Room(Limits())
    ledger_id = (await engine.create(LedgerOptions())).ledger_id
    pipe = _to(engine, room, ledger_id, expect=0)
    acknowledged = pipe.acknowledged()
    await pipe.put([b"a", b"b"])
    assert (await anext(acknowledged)).last == 1
    await pipe.put([b"c"])
    assert (await anext(acknowledged)).first == 2

    await engine.append(ledger_id, [b"another's"])
    await pipe.put([b"d"])

    assert [run async for run in acknowledged] == []
    assert isinstance(pipe.error, UnexpectedEntryId)
    assert engine.entries[ledger_id] == [b"a", b"b", b"c", b"another's"]
