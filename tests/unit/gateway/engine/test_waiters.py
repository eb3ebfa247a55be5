"""Waiters at the tail are not kept for longer than they wait, and what is idle costs no task and no timer."""

import asyncio
from collections.abc import Callable

import pytest

from loadtest.stores import Stores
from quorumlog.net.timers import Timers
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine import Engine
from services.gateway.engine.tails import LacWaiters
from tests.support.waiting import turns, until, within
from tests.unit.gateway.engine.support import World, ledger, world_of


@pytest.mark.parametrize("wait_s", [0.0, 0.001])
async def test_a_waiter_whose_time_is_over_is_not_kept(wait_s: float) -> None:
    waiters = LacWaiters()

    for _ in range(3):
        assert not await waiters.wait(4, wait_s)

    assert not waiters._waiting


async def test_a_waiter_whose_request_is_cancelled_is_not_kept() -> None:
    waiters = LacWaiters()
    request = asyncio.create_task(waiters.wait(4, 3600))
    await turns()
    assert waiters.lowest == 4

    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    assert not waiters._waiting


@pytest.mark.parametrize("wake", [lambda waiters: waiters.advance(5), LacWaiters.wake_all])
async def test_a_woken_waiter_is_not_kept_and_says_so(wake: Callable[[LacWaiters], None]) -> None:
    waiters = LacWaiters()
    request = asyncio.create_task(waiters.wait(4, 3600))
    await turns()

    wake(waiters)

    assert await request
    assert not waiters._waiting


async def waiting_tails(world: World, ledger_id: int, after: int) -> list[asyncio.Task[int]]:
    async def wait(number: int) -> int:
        engine = (world.engine, world.other)[number % 2]
        known = await engine.reads.last_add_confirmed(ledger_id, after=after, wait_s=60)
        return known.last_add_confirmed

    return [asyncio.ensure_future(wait(number)) for number in range(20)]


async def test_waiters_at_the_tail_are_woken_by_an_append_and_by_the_close(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        waiting = await waiting_tails(world, row.ledger_id, -1)
        await world.engine.appends.append(row.ledger_id, [b"x", b"y"])
        async with within("all are woken"):
            assert await asyncio.gather(*waiting) == [1] * 20

        waiting = await waiting_tails(world, row.ledger_id, 1)
        await world.other.close(row.ledger_id)
        async with within("all are woken"):
            assert await asyncio.gather(*waiting) == [1] * 20


async def test_a_wait_at_the_tail_times_out(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        for engine in (world.engine, world.other):
            known = await engine.reads.last_add_confirmed(row.ledger_id, after=-1, wait_s=0.01)
            assert (known.last_add_confirmed, known.closed) == (-1, False)


FEW, MANY = 3, 30
QUORUM = Quorum(3, 3, 2)


def running(engine: Engine) -> int:
    """Tasks of the event loop, and timers that machines share. A timer of the loop itself belongs to a task."""
    timers: Timers = engine._ports.clock  # type: ignore[assignment]
    shared = sum(len(queue) for queue in timers._queues.values())
    return len(asyncio.all_tasks()) + shared


async def open_some(world: World, count: int, begin: int) -> None:
    """Ledgers and logs with a record each, one after another, so that no more connections are opened."""
    logs = world.gateways[0].logs
    for number in range(begin, begin + count):
        await ledger(world.engine, b"one")
        await logs.put(f"log-{number}", LogSettings(QUORUM))
        await logs.append(f"log-{number}", Append.of((Record(b"one"),)))


async def test_an_idle_ledger_or_log_has_no_task_and_no_timer(stores: Stores) -> None:
    async with world_of(stores, bookies=3, gateways=1) as world:
        engine, logs = world.engine, world.gateways[0].logs
        await open_some(world, FEW, 0)
        # What an append leaves behind, timeouts above all, ends by itself; what remains belongs to the process.
        own = 0

        async def is_quiet() -> bool:
            nonlocal own
            before, own = own, running(engine)
            return before == own and not engine._ports.clock._queues  # type: ignore[attr-defined]

        await until(is_quiet, "only what the process has is left")

        await open_some(world, MANY, FEW)

        # A task or a timer for each ledger, or log, would be many more.
        await until(lambda: running(engine) <= own + MANY // 2, "what is idle has nothing running")
        assert len(engine.handles.by_ledger) >= 2 * (FEW + MANY)
        assert len(logs.ownership.owned) >= FEW + MANY
