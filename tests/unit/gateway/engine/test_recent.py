"""Reads at the writer's gateway come from memory, and a reader in order finds its next page read."""

import gc
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from loadtest.stores import Stores
from quorumlog.errors import EntryUnavailable, WrongPassword
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol import record
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Codec, Run
from quorumlog.wire.frames import Message, Op, Request
from services.gateway.engine import Engine, ledger_reads
from services.gateway.engine.tails import RECENT_RUN_BYTES_MAX, RecentRuns
from services.gateway.metrics import EngineMetrics
from tests.support.framed import Line
from tests.support.waiting import turns, until
from tests.unit.gateway.engine.hands import Hand, Reported, handle_of
from tests.unit.gateway.engine.support import Gate, MemoryBookie, World, ledger, payloads, world_of
from tests.unit.net.peer import Behave, ok

CODEC = Codec(DigestKind.CRC32C)
ALL = 1 << 62


def run(first: int, *payloads_: bytes, of: int = 7) -> Run:
    """The run of a ledger that begins at an id."""
    return record.make(
        ledger_id=of,
        first_entry=first,
        last_add_confirmed=first - 1,
        length_before=0,
        payloads=payloads_,
        codec=CODEC,
    )


def shown(runs: Sequence[Run]) -> list[tuple[int, bytes]]:
    """Ids and payloads."""
    return [
        (entry_id, bytes(payload))
        for each in runs
        for entry_id, payload in zip(each.ids, each.payloads(), strict=True)
    ]


def reads(world: World) -> int:
    """How many reads of entries the bookies were asked for."""
    return sum(asked.op is Op.READ for each in world.bookies.values() for asked in each.seen)


async def page(engine: Engine, ledger_id: int, first: int, **limits: Any) -> tuple[Any, ...]:
    """A page as its reader sees it."""
    found = await engine.reads.read(ledger_id, first, **limits)
    return shown(found.runs), found.next, found.last_add_confirmed, found.closed, found.lac_source


async def test_a_reader_at_the_tail_asks_no_bookie_at_its_writers_gateway(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        for number in range(5):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number, b"x"])
            found = await page(world.engine, row.ledger_id, 2 * number)
            assert found[0] == [(2 * number, b"%d" % number), (2 * number + 1, b"x")]
        assert bytes((await world.engine.reads.entry(row.ledger_id, 7)).runs[0].payload(0)) == b"x"
        assert reads(world) == 0

        assert len(await payloads(world.other, row.ledger_id)) == 10
        assert reads(world) > 0

        registry = CollectorRegistry()
        registry.register(EngineMetrics(world.engine))
        assert b"quorumlog_gateway_recent_reads_total 6.0" in generate_latest(registry)


async def test_what_is_not_acknowledged_is_not_shown_from_memory(stores: Stores) -> None:
    patient = MachineTimes(add_s=120, quorum_s=120)
    async with world_of(stores, bookies=3, gateways=1, times=patient) as world:
        row = await ledger(world.engine, b"one")
        gate = Gate(world.of(row))
        submitted = world.engine.handles.get(row.ledger_id).append([b"two"])
        asked = world.of(row)
        await until(
            lambda: all(any(add.first == 1 for add in each.seen) for each in asked),
            "the bookies are asked",
        )

        assert (await page(world.engine, row.ledger_id, 0))[:3] == ([(0, b"one")], 1, 0)
        assert (await page(world.engine, row.ledger_id, 1))[:3] == ([], 1, 0)

        gate.open()
        await submitted
        assert (await page(world.engine, row.ledger_id, 1))[:3] == ([(1, b"two")], 2, 1)


async def test_pages_from_memory_are_those_that_bookies_give(stores: Stores) -> None:
    sizes = [[1], [5, 0, 7], [2, 2], [0], [9], [3, 1, 4, 1, 5]]
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        for each in sizes:
            await world.engine.appends.append(row.ledger_id, [b"x" * size for size in each])

        last = sum(map(len, sizes)) - 1
        for first in range(last + 2):
            for limit in (1, 2, 3, 100):
                for max_bytes in (1, 6, 9, 1 << 20):
                    limits = {"limit": limit, "max_bytes": max_bytes}
                    asked = row.ledger_id, first
                    here, there = [
                        await page(engine, *asked, **limits)
                        for engine in (world.engine, world.other)
                    ]
                    assert here == there, (first, limits)
            assert await page(world.engine, row.ledger_id, first, last=first) == await page(
                world.other, row.ledger_id, first, last=first
            )


async def test_the_password_is_asked_for_before_memory_is(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, password="secret")
        await world.engine.appends.append(row.ledger_id, [b"x"], password="secret")

        for wrong in (None, "other"):
            with pytest.raises(WrongPassword):
                await world.engine.reads.read(row.ledger_id, 0, password=wrong)
        assert shown((await world.engine.reads.read(row.ledger_id, 0, password="secret")).runs)


async def test_a_ledger_that_has_ended_is_read_from_bookies(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        row = await ledger(world.engine, b"one")
        await page(world.engine, row.ledger_id, 0)
        assert reads(world) == 0

        await world.engine.close(row.ledger_id)

        assert await payloads(world.engine, row.ledger_id) == [b"one"]
        assert reads(world) > 0


async def test_a_handle_that_has_ended_shows_nothing_from_memory() -> None:
    hand = Hand()
    handle = handle_of(hand, Reported())
    _ = handle.append([b"x"])
    await turns()
    for done in hand.adds:
        done(Status.OK)
    assert shown(handle.recent(0, 0, ALL)) == [(0, b"x")]

    handle.abandon()

    assert handle.recent(0, 0, ALL) == []


async def test_without_bookies_the_tail_is_read_at_its_writers_gateway(stores: Stores) -> None:
    async with world_of(stores, bookies=3) as world:
        row = await ledger(world.engine, b"one")
        for bookie in world.of(row):
            await bookie.stop()

        assert await payloads(world.engine, row.ledger_id) == [b"one"]
        with pytest.raises(EntryUnavailable):
            await world.other.reads.entry(row.ledger_id, 0)


def test_a_large_run_and_what_is_before_it_is_read_from_bookies() -> None:
    recent = RecentRuns()
    recent.keep((run(0, b"a"), run(1, bytes(RECENT_RUN_BYTES_MAX)), run(2, b"c"), run(3, b"d")))

    assert shown(recent.read(7, 0, 3, ALL)) == [(0, b"a")]
    assert recent.read(7, 1, 3, ALL) == []
    assert shown(recent.read(7, 2, 3, ALL)) == [(2, b"c"), (3, b"d")]
    assert shown(recent.read(7, 2, 2, ALL)) == [(2, b"c")]
    assert recent.read(8, 2, 3, ALL) == recent.read(7, 4, 4, ALL) == []


def test_beyond_the_bound_the_run_that_was_confirmed_first_is_read_from_bookies() -> None:
    one = run(0, bytes(1000))
    recent = RecentRuns()
    recent.keep((one,))
    cost, recent = recent.bytes_kept, RecentRuns(3 * recent.bytes_kept)

    for first, ledger_id in ((0, 7), (0, 8), (1, 7), (0, 9)):
        recent.keep((run(first, bytes(1000), of=ledger_id),))

    assert recent.bytes_kept == 3 * cost
    assert recent.read(7, 0, 1, ALL) == []
    assert [len(recent.read(*at, 1, ALL)) for at in ((7, 1), (8, 0), (9, 0))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("ledgers", "payloads_"),
    [(2_000, [bytes(1000)]), (2_000, [b""] * 20), (10, [b"x"] * 1000), (1, [bytes(60_000)])],
)
def test_idle_ledgers_keep_to_the_memory_bound_of_all(ledgers: int, payloads_: list[bytes]) -> None:
    bound = 1 << 20
    gc.collect()
    tracemalloc.start()
    try:
        recent = RecentRuns(bound)
        for number in range(max(ledgers, 100)):
            ledger_id, first = 1000 + number % ledgers, 1000 + number // ledgers * len(payloads_)
            recent.keep((run(first, *payloads_, of=ledger_id),))
            assert all(
                map(list, (each.payloads() for each in recent.read(ledger_id, first, ALL, ALL)))
            )
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert recent.bytes_kept <= bound
    # A table that grows is larger than what is in it.
    assert bound / 2 < used < bound * 1.1


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 6),
)
def test_what_is_shown_is_contiguous_and_within_what_was_asked(
    sizes: list[list[int]], first: int, more: int, bytes_max: int, dropped: int
) -> None:
    recent, following = RecentRuns(), 0
    for each in sizes:
        recent.keep((run(following, *[b"x" * size for size in each]),))
        following += len(each)
    for _ in range(min(dropped, len(sizes) - 1)):
        recent._drop_oldest()

    found = shown(recent.read(7, first, first + more, bytes_max))

    begin = sum(map(len, sizes[: min(dropped, len(sizes) - 1)]))
    ids, total = [entry_id for entry_id, _ in found], sum(len(data) for _, data in found)
    assert ids == list(range(first, first + len(ids)))
    assert bool(ids) == (begin <= first < following)
    assert len(ids) <= more + 1
    assert total <= bytes_max or len(ids) == 1
    # It ends where the range does, what is kept does, or the next one would be too much.
    flat = [size for each in sizes for size in each]
    after = first + len(ids)
    is_full = bool(ids) and after < following and total + flat[after] > bytes_max
    assert not ids or is_full or after in (following, first + more + 1)


UNHURRIED = MachineTimes(hedge_s=3600)
"""A slow answer is no reason to ask another bookie."""


@pytest.fixture
async def world(stores: Stores) -> AsyncIterator[World]:
    async with world_of(stores, times=UNHURRIED) as made:
        yield made


async def filled(world: World) -> int:
    """A ledger of 100 entries, whose writer is the other gateway than the readers'."""
    row = await ledger(world.engine)
    await world.engine.appends.append(row.ledger_id, [b"%d" % number for number in range(100)])
    return row.ledger_id


async def ten(world: World, ledger_id: int, first: int) -> list[bytes]:
    found = await page(world.other, ledger_id, first, limit=10)
    return [value for _, value in found[0]]


def values(first: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + 10)]


async def test_the_third_page_in_order_is_read_before_it_is_asked_for(world: World) -> None:
    ledger_id = await filled(world)
    assert await ten(world, ledger_id, 0) == values(0)
    assert await ten(world, ledger_id, 10) == values(10)
    await until(lambda: reads(world) == 3, "a bookie is asked for the page from 20 on")
    await until(
        lambda: all(held.done() for _, held in world.other.reads._ahead.values()), "it is read"
    )
    for bookie in world.bookies.values():
        bookie.is_silent = True

    assert await ten(world, ledger_id, 20) == values(20)


async def test_pages_out_of_order_are_not_read_ahead(world: World) -> None:
    ledger_id = await filled(world)
    for first in (50, 0, 30, 70):
        assert await ten(world, ledger_id, first) == values(first)
    assert reads(world) == 4
    assert not world.other.reads._ahead


async def test_a_page_of_an_earlier_ledger_with_the_same_id_is_not_used(world: World) -> None:
    """Its metadata was lost with its tombstone, and the id was chosen again. The ledger's key differs."""
    ledger_id = await filled(world)
    for first in (0, 10):
        await ten(world, ledger_id, first)
    engine = world.other.reads
    ((read, (begun_s, held)),) = engine._ahead.items()
    await until(held.done, "the page from 20 on is read")
    engine._ahead = {read._replace(ledger_key=b"of the earlier ledger"): (begun_s, held)}
    before = reads(world)

    assert await ten(world, ledger_id, 20) == values(20)

    assert reads(world) > before


async def test_nothing_is_read_beyond_the_last_entry_that_a_reader_wants(world: World) -> None:
    ledger_id = await filled(world)
    for first in (0, 10):
        await page(world.other, ledger_id, first, last=19, limit=10)
    assert reads(world) == 2
    assert not world.other.reads._ahead


async def test_a_page_that_failed_to_be_read_ahead_is_read_when_asked_for(world: World) -> None:
    ledger_id = await filled(world)
    for bookie in world.bookies.values():
        bookie.behave = refusing(bookie, from_id=20)
    assert await ten(world, ledger_id, 0) == values(0)
    assert await ten(world, ledger_id, 10) == values(10)
    await until(
        lambda: all(held.done() for _, held in world.other.reads._ahead.values()), "it failed"
    )
    for bookie in world.bookies.values():
        bookie.behave = bookie.obey

    assert await ten(world, ledger_id, 20) == values(20)


async def test_only_a_few_pages_wait_for_readers_that_do_not_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_reads, "_AHEAD_S", 3600)
    ledger_id = await filled(world)
    for limit in range(1, 2 * ledger_reads._AHEAD_MAX):
        for first in (0, limit):
            await page(world.other, ledger_id, first, limit=limit)
    assert len(world.other.reads._ahead) == ledger_reads._AHEAD_MAX

    monkeypatch.setattr(ledger_reads, "_AHEAD_S", 0)
    for first in (0, 20):
        await page(world.other, ledger_id, first, limit=20)
    assert len(world.other.reads._ahead) == 1


async def test_unknown_readers_get_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_reads, "_FOLLOWING_MAX", 1)
    ledger_id = await filled(world)
    for first in (0, 50, 10, 60):
        assert await ten(world, ledger_id, first) == values(first)
    assert reads(world) == 4
    assert not world.other.reads._ahead


def refusing(bookie: MemoryBookie, *, from_id: int) -> Behave:
    """A bookie that fails every read that begins at an id or behind it."""

    async def behave(request: Request, line: Line) -> Message | None:
        if request.first >= from_id:
            return ok(request, Status.UNKNOWN)
        return await bookie.obey(request, line)

    return behave
