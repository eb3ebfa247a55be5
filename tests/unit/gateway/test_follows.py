"""Readers at the tail share one read, and streams of appends are read no further than their buffer."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass

import pytest

from quorumlog.errors import EntryUnavailable, Overloaded, UnexpectedEntryId
from services.gateway.edge.http import follows
from services.gateway.edge.http.follows import Followable, Follows, SharedPage, shared_tail
from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.http.pipe import Pipe
from services.gateway.interface import EntriesAppended, LedgerOptions
from tests.support.waiting import turns, until
from tests.unit.gateway.fake_engine import FakeEngine


@dataclass(frozen=True)
class Page:
    items: tuple[int, ...]
    next: int


class Numbers(Followable[Page]):
    """A tail whose item n is n."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.is_closed = False
        self.reads = 0
        self.waiting = 0
        self.error: EntryUnavailable | None = None
        self.page_max = 1000
        self.grown = asyncio.Event()

    def grow(self, count: int, *, closed: bool = False) -> None:
        self.count, self.is_closed = self.count + count, closed
        self.waiting = 0
        self.grown.set()
        self.grown = asyncio.Event()

    async def read(self, at: int, *, wait_s: float = 0.0) -> Page:
        self.reads += 1
        await turns()
        if wait_s and at >= self.count and not self.is_closed and self.error is None:
            self.waiting += 1
            await self.grown.wait()
        if self.error is not None:
            raise self.error
        end = min(self.count, at + self.page_max)
        return Page(tuple(range(at, end)), max(at, end))

    def size(self, page: Page) -> int:
        return len(page.items)

    def rest(self, page: Page, at: int) -> Page:
        return Page(tuple(item for item in page.items if item >= at), page.next)

    def is_end(self, page: Page) -> bool:
        return self.is_closed and page.next >= self.count


async def waited(work: Awaitable[SharedPage[Page] | None]) -> SharedPage[Page] | None:
    return await work


def tail(shared: Follows, numbers: Numbers, at: int = 0) -> AsyncIterator[SharedPage[Page]]:
    return shared_tail(shared, "numbers", numbers, at, wait_s=60, waited=waited)


async def read_all(shared: Follows, numbers: Numbers, at: int = 0, pauses: int = 0) -> list[int]:
    """All items until the end; a slow reader lets others go on after each page."""
    seen: list[int] = []
    async for reported in tail(shared, numbers, at):
        seen += reported.page.items
        await turns(pauses)
    return seen


async def test_one_read_serves_all_who_wait_at_the_tail() -> None:
    shared, numbers = Follows(), Numbers(3)
    readers = [asyncio.ensure_future(read_all(shared, numbers)) for _ in range(50)]
    await until(lambda: numbers.waiting == 1, "the follow waits")
    reads = numbers.reads

    numbers.grow(1)
    await until(lambda: numbers.waiting == 1, "the follow waits again")
    assert numbers.reads == reads + 1
    numbers.grow(2, closed=True)

    assert await asyncio.gather(*readers) == [list(range(6))] * 50
    assert len(shared) == 0


async def test_a_page_is_put_into_each_form_once() -> None:
    reported, made = SharedPage(Page((1,), 2)), []

    def form(page: Page) -> str:
        made.append(page)
        return "text"

    assert [reported.form("a", form), reported.form("a", form), reported.form("b", form)] == [
        "text"
    ] * 3
    assert len(made) == 2


async def test_a_reader_whose_place_is_within_a_page_gets_the_rest_of_it() -> None:
    shared, numbers = Follows(), Numbers(2)
    first = asyncio.ensure_future(read_all(shared, numbers))
    await until(lambda: numbers.waiting == 1, "the follow waits")
    late = tail(shared, numbers, 1)
    assert (await anext(late)).page.items == (1,)

    # Beyond what the follow knows: its next page begins before this reader's place.
    ahead = asyncio.ensure_future(read_all(shared, numbers, 4))
    await turns()
    numbers.grow(4, closed=True)

    assert (await anext(late)).page.items == (2, 3, 4, 5)
    assert await ahead == [4, 5]
    assert await first == list(range(6))


async def test_a_reader_behind_the_window_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "_WINDOW_BYTES", 3)
    shared, numbers = Follows(), Numbers(1)
    slow = tail(shared, numbers)
    assert (await anext(slow)).page.items == (0,)
    fast = asyncio.ensure_future(read_all(shared, numbers))
    for _ in range(20):
        await until(lambda: numbers.waiting == 1, "the follow waits")
        numbers.grow(1)
    await until(lambda: numbers.waiting == 1, "the follow waits")

    assert (await anext(slow)).page.items == tuple(range(1, 21))

    numbers.grow(1, closed=True)
    assert (await anext(slow)).page.items == (21,)
    assert await fast == list(range(22))


async def test_each_reader_learns_itself_why_the_follow_ended() -> None:
    shared, numbers = Follows(), Numbers(1)
    readers = [asyncio.ensure_future(read_all(shared, numbers)) for _ in range(3)]
    await until(lambda: numbers.waiting == 1, "the follow waits")

    numbers.error = EntryUnavailable("bookies are away")
    numbers.grow(0)

    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [EntryUnavailable] * 3
    assert len(shared) == 0


async def test_a_follow_ends_with_its_last_reader_and_begins_with_the_next() -> None:
    shared, numbers = Follows(), Numbers(1)
    for _ in range(2):
        reader = asyncio.ensure_future(read_all(shared, numbers))
        await until(lambda: len(shared) == 1, "it is followed")
        reader.cancel()
        await asyncio.wait([reader])
        assert len(shared) == 0
    third = asyncio.ensure_future(read_all(shared, numbers))
    await until(lambda: len(shared) == 1, "it is followed")
    numbers.grow(1, closed=True)

    assert await third == [0, 1]


@pytest.mark.parametrize("seed", range(20))
async def test_every_reader_sees_each_item_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(follows, "_WINDOW_BYTES", chance.choice((1, 5, 1000)))
    shared, numbers = Follows(), Numbers(chance.randrange(20))
    numbers.page_max = chance.choice((1, 3, 1000))
    readers = []
    for _ in range(100):
        if chance.random() < 0.2:
            at = chance.randrange(numbers.count + 1)
            pauses = chance.randrange(8)
            readers.append((at, asyncio.ensure_future(read_all(shared, numbers, at, pauses))))
        if chance.random() < 0.5:
            numbers.grow(chance.randrange(5))
        await turns(chance.randrange(6))
    numbers.grow(0, closed=True)

    for at, reader in readers:
        assert await reader == list(range(at, numbers.count)), f"seed {seed}"


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
