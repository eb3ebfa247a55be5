"""A reader of one page after another finds its next page read; every other read asks a bookie itself."""

from collections.abc import AsyncIterator

import pytest

from loadtest.stores import Stores
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol.messages import Status
from quorumlog.wire.frames import Message, Request
from services.gateway.engine import ledger_reads
from tests.support.framed import Line
from tests.support.waiting import until
from tests.unit.gateway.engine.support import MemoryBookie, World, ledger, world_of
from tests.unit.gateway.engine.test_recent import page, reads
from tests.unit.net.peer import Behave, ok

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


async def test_a_page_that_could_not_be_read_ahead_is_read_when_it_is_asked_for(
    world: World,
) -> None:
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


async def test_beyond_the_bound_of_known_readers_nothing_is_read_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
