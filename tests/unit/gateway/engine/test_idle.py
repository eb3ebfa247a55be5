"""What is open and idle costs memory only: no task and no timer of its own, of a ledger or of a log."""

import asyncio

from loadtest.stores import Stores
from quorumlog.net.timers import Timers
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine import Engine
from tests.support.waiting import until
from tests.unit.gateway.engine.support import World, ledger, world_of

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
