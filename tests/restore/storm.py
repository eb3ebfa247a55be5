"""Restores and failovers at random points of a storm.

Each ends as the runbook wants it: the newest database is put back. Until then the database lacks changes, the
operator is waited for, and nothing that was acknowledged may go.
"""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores, scratch
from tests.metadata.restores import dump, restore
from tests.restore.clients import Clients, Found
from tests.support.standby import Pair, pair
from tests.support.waiting import SETTLED_S, until

ENVIRONMENT: Final = {
    # Deletions wish to happen at once.
    "COLLECT_S": "1",
    "COLLECT_GRACE_S": "1",
    "AUDIT_S": "1",
}
METADATA: Final = "metadata-1"
BOOKIES: Final = 5
ACKS: Final = 60
"""Acknowledgements between two steps; a step comes after one to three times as many."""
KEPT: Final = 40
"""Entries of the open ledger while the database lacks changes; bookies look for garbage meanwhile."""


@dataclass(slots=True)
class Report:
    """What was done and found."""

    restores: int = 0
    failovers: int = 0
    rebuilds: int = 0
    """None yet."""
    waited: int = 0
    """How often the database lacked changes until an operator put the right one back."""
    found: Found = field(default_factory=Found)

    def last_line(self) -> str:
        """The last line of `make restore`."""
        found = self.found
        return (
            f"restore: {self.restores} restores, {self.failovers} failovers, {self.rebuilds} rebuilds,"
            f" {found.ledgers} ledgers, {found.lost} lost, {found.truncated} truncated,"
            f" {found.resurrected} resurrected, {self.waited} waited for an operator"
        )


class Storm:
    """One cluster, its two Postgres servers, and those who write."""

    def __init__(
        self, cluster: Cluster, both: Pair, folder: Path, report: Report, *, seed: int
    ) -> None:
        self._cluster, self._both, self._folder = cluster, both, folder
        self._report = report
        self._dice = random.Random(f"restore-{seed}")
        self._clients = Clients(cluster.gateways, seed)

    async def run(self, *, restores: int, failovers: int) -> None:
        """Do so many of each in a random order, then judge."""
        steps = [self._restore] * restores
        steps += [self._fail_over_with_loss if n % 2 else self._fail_over for n in range(failovers)]
        self._dice.shuffle(steps)
        async with self._clients.writing():
            for step in steps:
                await self._hurt_a_bookie()
                await step()
            await self._more(ACKS)
        self._report.found = await self._clients.judged()

    async def _more(self, acks: int) -> None:
        """Wait for so many acknowledgements more."""
        wanted = self._clients.acknowledged + acks
        await until(
            lambda: self._clients.acknowledged >= wanted, "appends are acknowledged", SETTLED_S
        )

    async def _hurt_a_bookie(self) -> None:
        """Kill one for a while: ensembles change, and closed ledgers are moved."""
        name = self._dice.choice([n for n in self._cluster.names if n.startswith("bookie")])
        await self._more(self._dice.randint(1, ACKS))
        await self._cluster.kill(name)
        await self._more(self._dice.randint(ACKS, 2 * ACKS))
        await self._cluster.restart(name)

    # --- steps -----------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """An older dump is put back, and later the newest one."""
        stores = Stores(self._both.primary.postgres.dsn(), "")
        old = await dump(stores, self._folder / "old")
        await self._hurt_a_bookie()
        await self._clients.made()
        await self._cluster.stop(METADATA)
        new = await dump(stores, self._folder / "new")
        await restore(stores, old)
        self._report.restores += 1
        await self._cluster_goes_on_without_changes()
        await self._cluster.stop(METADATA)
        await restore(stores, new)
        await self._until_well()

    async def _fail_over(self) -> None:
        """To a synchronous standby: nobody does anything."""
        await self._both.primary.require_standby()
        await self._clients.made()
        await self._both.fail_over()
        self._report.failovers += 1
        await self._until_well()
        await self._clients.made()
        await self._both.follow_again()

    async def _fail_over_with_loss(self) -> None:
        """To a standby that lacks changes; later the old primary is put back."""
        await self._both.standby.stop_following()
        await self._hurt_a_bookie()
        await self._clients.made()
        await self._both.fail_over()
        self._report.failovers += 1
        await self._cluster_goes_on_without_changes()
        await self._both.primary.stop()
        await self._both.standby.start()
        self._both.swap()
        await self._until_well()
        await self._both.follow_again()

    async def _cluster_goes_on_without_changes(self) -> None:
        """The loss is told, and the open ledger gets entries all the same."""
        if not self._cluster.is_alive(METADATA):
            self._cluster.start(METADATA)
        await until(
            partial(self._is_ready, 503, "database-went-back"), "the loss is told", SETTLED_S
        )
        self._report.waited += 1
        wanted = self._clients.kept + KEPT
        await until(lambda: self._clients.kept >= wanted, "the open ledger gets entries", SETTLED_S)

    async def _until_well(self) -> None:
        """The right database is there: the state ends by itself."""
        if not self._cluster.is_alive(METADATA):
            self._cluster.start(METADATA)
        await until(partial(self._is_ready, 200, None), "metadata is ready", SETTLED_S)

    async def _is_ready(self, status: int, code: str | None) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session,
                session.get(f"{self._cluster.url(METADATA)}/health/ready") as response,
            ):
                told = await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return False
        return response.status == status and told.get("code") == code


@asynccontextmanager
async def storm(report: Report, *, seed: int) -> AsyncIterator[Storm]:
    """A cluster of its own."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(scratch("ql-restore-"))
        both = await stack.enter_async_context(pair())
        cluster = await stack.enter_async_context(
            running(
                Stores(both.dsn, ""),
                bookies=BOOKIES,
                environment=ENVIRONMENT,
                lost_bookie_delay_s=1,
            )
        )
        yield Storm(cluster, both, folder, report, seed=seed)
