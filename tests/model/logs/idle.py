"""A log that expires without use, in virtual time: gateways die, stand still and are cut off; clients come and go.

The shipped `Accesses`, sweep and deletion run on the model. The judge knows when each access began that was answered:
from then on the log must stay for as long as it may be out of use. In the end one request reads for long, and the log must
stay; then nobody comes any more, and the log must go.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, Final

from quorumlog.errors import NoSuchLog, QuorumLogError
from quorumlog.protocol.idle import slack_s
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.quorum import Quorum
from services.gateway.logs.sweep import Sweep
from tests.model.logs.model import Cluster, Gateway, Store
from tests.support.virtual import run_virtual

IDLE_S: Final = 4
END_S: Final = 90.0
_NAME: Final = "stream"
_SETTINGS: Final = LogSettings(Quorum(3, 3, 2))
_GATEWAYS: Final = 3


class Violation(AssertionError):
    """The history breaks a promise."""


@dataclass(slots=True)
class Story:
    """What clients were told of each creation of the log, and when it was deleted."""

    used_s: dict[str, float] = field(default_factory=dict)
    """By creation: when the last access began that was answered."""
    freed_s: list[tuple[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def used(self, made: str, began_s: float, freed_s: float | None) -> None:
        """An access was answered, after a deletion perhaps."""
        self.used_s[made] = max(self.used_s.get(made, 0.0), began_s)
        if freed_s is not None and began_s <= freed_s < began_s + IDLE_S:
            self.problems.append(f"used at {began_s:.2f}, deleted at {freed_s:.2f}")

    def freed(self, now_s: float) -> None:
        """The last creation was deleted."""
        made = max(self.used_s)
        self.freed_s.append((made, now_s))
        used_s = self.used_s[made]
        if now_s < used_s + IDLE_S:
            self.problems.append(f"deleted at {now_s:.2f}, though used at {used_s:.2f}")


class World:
    """The log and its gateways, clients, and faults."""

    def __init__(self, seed: int) -> None:
        self.cluster = Cluster(seed, hitches=0.01)
        self.random = self.cluster.random
        self.story = Story()
        self.tasks: list[asyncio.Task[Any]] = []
        """The sweeps of gateways."""
        self.is_calm = False
        self.noise: list[asyncio.Task[Any]] = []
        """Clients and faults."""
        self.cluster.on_freed = self._freed
        self.gateways = [self._gateway() for _ in range(_GATEWAYS)]

    def _gateway(self) -> Gateway:
        gateway = self.cluster.gateway()
        self.tasks.append(asyncio.create_task(self._sweep(gateway)))
        accesses = gateway.logs.accesses
        remove = accesses._remove

        async def removed(name: str, term: str) -> bool:
            """Delete the log, and stand still at any step of that."""
            if not self.is_calm and self.random.random() < 0.5:
                delay_s = self.random.uniform(0, 0.004)
                asyncio.get_running_loop().call_later(delay_s, self._stop, gateway)
            return await remove(name, term)

        accesses._remove = removed
        return gateway

    async def _sweep(self, gateway: Gateway) -> None:
        await gateway.while_it_lives(Sweep(gateway.logs, Store(gateway)).run())

    def _freed(self, _name: str, _gateway: Gateway) -> None:
        self.story.freed(self.cluster.now())

    async def run(self) -> None:
        """Everything at once, then calm: the log is deleted in the end."""
        await self._create(self.gateways[0])
        noise = [*(self._client() for _ in range(3)), self._faults()]
        self.noise = [asyncio.create_task(work) for work in noise]
        await asyncio.sleep(END_S)
        self.is_calm = True
        for task in self.noise:
            task.cancel()
        for gateway in self.gateways:
            gateway.goes.set()
        await self._read_for_long()
        await asyncio.sleep(20 * IDLE_S)
        is_left = _NAME in self.cluster.logs
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, *self.noise, return_exceptions=True)
        for gateway in list(self.cluster.gateways.values()):
            await gateway.end()
        if self.story.problems:
            raise Violation(self.story.problems[0])
        if is_left:
            raise Violation("nobody uses the log, and it stays")

    async def _create(self, gateway: Gateway) -> None:
        began_s = self.cluster.now()
        row, is_new = await gateway.logs.create(_NAME, _SETTINGS, idle_s=IDLE_S)
        if is_new:
            self.story.used(row.created_at, began_s, None)

    async def _client(self) -> None:
        """Ask any gateway, at times often, at times just before the log expires."""
        while True:
            longest_s = self.random.choice((0.3, IDLE_S, IDLE_S, 1.6 * IDLE_S))
            await asyncio.sleep(self.random.uniform(0.3, 1.0) * longest_s)
            gateway = self.random.choice(self.gateways)
            with contextlib.suppress(QuorumLogError, ConnectionResetError, TimeoutError):
                await gateway.while_it_lives(self._ask(gateway), 2 * IDLE_S)

    async def _ask(self, gateway: Gateway) -> None:
        began_s = self.cluster.now()
        try:
            row = await gateway.logs.rows.row(_NAME)
        except NoSuchLog:
            await self._create(gateway)
            return
        is_access = self.random.random() < 0.8
        if await gateway.logs.accesses.lives(row, is_access=is_access) and is_access:
            gone = dict(self.story.freed_s).get(row.created_at)
            self.story.used(row.created_at, began_s, gone)

    async def _read_for_long(self) -> None:
        """One request lasts, at a gateway that need not be the keeper: nothing stands still, and the log stays."""
        self.cluster.hitches = 0.0
        await asyncio.sleep(2 * IDLE_S)  # until nobody is cut off, and what stood still is done
        gateway = self.random.choice(self.gateways)
        await self._create(gateway)
        row = await gateway.logs.rows.row(_NAME)
        if not await gateway.logs.accesses.lives(row, is_access=True):
            return  # it had expired
        with gateway.logs.accesses.during(row):
            await asyncio.sleep(self.random.uniform(2, 5) * IDLE_S)
            if row.created_at in dict(self.story.freed_s):
                self.story.problems.append("deleted while it was read")

    async def _faults(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.2, 1.5) * IDLE_S)
            at = self.random.randrange(_GATEWAYS)
            gateway = self.gateways[at]
            kind = self.random.choice(("stop", "stop", "stop", "kill", "cut"))
            if kind == "kill":
                gateway.kill()
                self.gateways[at] = self._gateway()
            elif kind == "cut":
                gateway.cut_off(self.random.uniform(0.1, IDLE_S), asks=False, hears=True)
            else:
                self._stop(gateway)

    def _stop(self, gateway: Gateway) -> None:
        gateway.goes.clear()
        for_s = self.random.uniform(0.2, 3) * (IDLE_S + slack_s(IDLE_S))
        asyncio.get_running_loop().call_later(for_s, gateway.goes.set)


def run(seed: int) -> Story:
    """One seed. Raises: Violation."""

    async def main() -> Story:
        world = World(seed)
        await world.run()
        return world.story

    return run_virtual(main, seed=seed)
