"""Restores, failovers and rebuilds at random points of a storm.

Each ends as the runbook wants it: the newest database is put back, or the rows are rebuilt from the bookies and what
is still missing is accepted. With each rebuild a bookie starts empty, whose disk was lost together with the database.
Until then the database lacks changes, the operator is waited for, and nothing that was acknowledged may go, nor what was
deleted come back.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores, scratch
from quorumlog.protocol.rebuild import WITHOUT_COPIES
from tests.cluster.restore.clients import Clients
from tests.cluster.restore.found import Found
from tests.cluster.restore.logs import LOG
from tests.cluster.restore.operator import Operator
from tests.support.standby import Pair, pair
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.metadata.restores import dump, restore

ENVIRONMENT: Final = {
    **UNHURRIED,
    # Deletions wish to happen at once.
    "COLLECT_S": "1",
    "COLLECT_GRACE_S": "1",
    "AUDIT_S": "1",
    # What a slow machine does late is not lost: a deletion is answered once its members know of it.
    "SILENT_BOOKIE_S": "20",
}
BOOKIES: Final = 4
ACKS: Final = 30
"""Acknowledgements between two steps; a step comes after one to three times as many."""
KEPT: Final = 20
"""Entries of the open ledger while the database lacks changes; bookies look for garbage meanwhile."""
_TOLD: Final = ("conflict", "wait", "same")
"""What a rebuild does about that which it leaves to people."""
_WIPE: Final = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"


class Step(Enum):
    """What happens to the database, and how it ends."""

    RESTORE_AND_PUT_BACK = auto()
    """An older dump is restored, and later the newest one."""
    RESTORE_AND_REBUILD = auto()
    """There is no newer one: rows are rebuilt, and the rest is accepted."""
    FAIL_OVER = auto()
    """To a synchronous standby: nobody does anything."""
    FAIL_OVER_AND_PUT_BACK = auto()
    """To a standby that lacks changes; later the old primary is put back."""
    FAIL_OVER_AND_REBUILD = auto()
    REBUILD = auto()
    """Nothing is left of the database."""


RESTORES: Final = (Step.RESTORE_AND_REBUILD, Step.RESTORE_AND_PUT_BACK)
FAILOVERS: Final = (Step.FAIL_OVER_AND_PUT_BACK, Step.FAIL_OVER, Step.FAIL_OVER_AND_REBUILD)


@dataclass(slots=True)
class Report:
    """What was done and found."""

    restores: int = 0
    failovers: int = 0
    rebuilds: int = 0
    """In an empty database, and in one that went back."""
    wiped: int = 0
    """Bookies whose disks were lost together with the database."""
    waited: int = 0
    """How often the database lacked changes until an operator put the right one back or had its rows rebuilt."""
    committed: int = 0
    """Transactions."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """What rebuilds told of ledgers and logs that wait for an operator."""
    found: Found = field(default_factory=Found)

    def last_line(self) -> str:
        """The last line of `make restore`."""
        found = self.found
        return (
            f"restore: {self.restores} restores, {self.failovers} failovers, {self.rebuilds} rebuilds,"
            f" {self.wiped} wiped bookies, {found.ledgers} ledgers, {found.lost} lost, {found.truncated} truncated,"
            f" {found.resurrected} resurrected, {self.waited} waited for an operator"
        )


def _tell_nobody(_line: str) -> None: ...


class Storm:
    """One cluster, its two Postgres servers, those who write, and an operator."""

    def __init__(
        self,
        cluster: Cluster,
        both: Pair,
        folder: Path,
        report: Report,
        *,
        seed: int,
        deleters: int,
        notify: Callable[[str], None] = _tell_nobody,
    ) -> None:
        """`deleters` make and delete logs; `notify` gets a line of progress for each step."""
        self._cluster, self._both, self._folder = cluster, both, folder
        self._report, self._notify = report, notify
        self._dice = random.Random(f"restore-{seed}")
        self._clients = Clients(cluster.gateways, seed, deleters)
        self._operator = Operator(cluster)
        self._has_standby = True
        # Always the same one: an entry survives the loss of Qa - 1 of its copies.
        self._fragile = self._dice.choice(self._operator.named("bookie"))

    async def run(self, steps: list[Step]) -> None:
        """Do these in a random order, then judge."""
        self._dice.shuffle(steps)
        async with self._clients.writing():
            for number, step in enumerate(steps, start=1):
                begun = time.monotonic()
                await self._hurt_a_bookie()
                await self._do(step)
                took = time.monotonic() - begun
                self._notify(
                    f"{number}/{len(steps)} {step.name.lower().replace('_', ' ')}: {took:.0f} s"
                )
            await self._more(ACKS)
        self._report.committed = self._clients.logs.committed
        self._notify("everything is read")
        self._report.found = await self._clients.judged()

    async def _do(self, step: Step) -> None:
        match step:
            case Step.RESTORE_AND_PUT_BACK:
                await self._restore(self._put_dump_back)
            case Step.RESTORE_AND_REBUILD:
                await self._restore(self._rebuild_and_accept)
            case Step.FAIL_OVER:
                await self._fail_over()
            case Step.FAIL_OVER_AND_PUT_BACK:
                await self._fail_over_with_loss(self._put_primary_back)
            case Step.FAIL_OVER_AND_REBUILD:
                await self._fail_over_with_loss(self._rebuild_and_accept)
            case Step.REBUILD:
                await self._rebuild_from_nothing()

    async def _more(self, acks: int) -> None:
        """Wait for so many acknowledgements more."""
        ledgers = self._clients.ledgers
        wanted = ledgers.acknowledged + acks
        await until(lambda: ledgers.acknowledged >= wanted, "appends are acknowledged", SETTLED_S)

    async def _hurt_a_bookie(self) -> None:
        """Kill one for a while: ensembles change, and closed ledgers are moved."""
        name = self._dice.choice(self._operator.named("bookie"))
        await self._more(self._dice.randint(1, ACKS))
        await self._cluster.kill(name)
        await self._more(self._dice.randint(ACKS, 2 * ACKS))
        await self._cluster.restart(name)

    # --- losses ----------------------------------------------------------------------------------

    async def _restore(self, end: Callable[[], Awaitable[None]]) -> None:
        stores = self._stores
        async with self._clients.logs.spanning():
            old = await dump(stores, self._folder / "old")
        await self._changes_are_made()
        await self._kill_gateways()
        await self._operator.stop_metadata()
        await dump(stores, self._folder / "new")
        await restore(stores, old)
        self._report.restores += 1
        await self._cluster_goes_on_without_changes()
        await end()

    async def _until_followed(self) -> None:
        """There is a standby; a base backup for the next failover is not made before it is needed."""
        if not self._has_standby:
            await self._both.follow_again()
        self._has_standby = False

    async def _fail_over(self) -> None:
        await self._until_followed()
        await self._both.primary.require_standby()
        await self._clients.ledgers.make_one()
        await self._both.fail_over()
        self._report.failovers += 1
        await self._clients.ledgers.make_one()
        await self._operator.until_well()

    async def _fail_over_with_loss(self, end: Callable[[], Awaitable[None]]) -> None:
        await self._until_followed()
        async with self._clients.logs.spanning():
            await self._both.standby.stop_following()
        await self._changes_are_made()
        await self._kill_gateways()
        await self._both.fail_over()
        self._report.failovers += 1
        await self._cluster_goes_on_without_changes()
        await end()

    async def _rebuild_from_nothing(self) -> None:
        """Postgres is gone without a backup; so is the power of some machines, perhaps of all."""
        operator = self._operator
        await self._clients.ledgers.make_one()
        await self._kill_gateways()
        await operator.kill(operator.named("metadata"))
        if self._dice.choice((True, False)):
            await operator.kill(operator.named("bookie"))
        await self._both.primary.sql(_WIPE)
        await self._wipe_a_bookie()
        operator.start(operator.named("metadata"))
        await operator.kill(operator.named("autorecovery"))
        await self._accept_and_go_on(await operator.rebuild("--take-over"))

    # --- ends ------------------------------------------------------------------------------------

    async def _put_dump_back(self) -> None:
        await self._operator.stop_metadata()
        await restore(self._stores, self._folder / "new")
        await self._operator.until_well()

    async def _put_primary_back(self) -> None:
        await self._both.primary.stop()
        await self._both.standby.start()
        self._both.swap()
        await self._operator.until_well()

    async def _rebuild_and_accept(self) -> None:
        operator = self._operator
        await operator.kill(operator.named("autorecovery"))
        await self._wipe_a_bookie()
        if self._dice.choice((True, False)):
            operator.start([self._fragile])  # it waits until the loss is accepted
        await self._accept_and_go_on(await operator.rebuild())

    async def _accept_and_go_on(self, report: dict[str, Any]) -> None:
        """Accept what is still missing, start the gateways anew, and settle what the rebuild told."""
        operator = self._operator
        self._report.rebuilds += 1
        reported = await self._told_by(report)
        await operator.accept()
        await operator.kill(operator.named("gateway"))
        # What the gateways told in between.
        await operator.accept()
        await operator.until_well()
        if any("rebuild again" in finding["why"] for finding in reported):
            # A copy is of a bookie's last incarnation before its disk was lost. The bookie is a later one by now.
            await operator.kill([*operator.named("gateway"), *operator.named("autorecovery")])
            reported = await self._told_by(await operator.rebuild())
            await operator.until_well()
        for finding in reported:
            # A log without any ledger left may have been truncated, and one that had none yet may have been written and
            # deleted since: who knows that it was deleted says so.
            name = finding.get("log", LOG)
            if await self._clients.logs.is_deleted_again(name) or self._clients.logs.is_empty(name):
                continue
            # A ledger may be fenced before anybody has a copy of its row. What was acknowledged is read in the end.
            if finding["action"] != "same" and finding["why"] != WITHOUT_COPIES:
                self._report.findings.append(finding)
        await self._clients.ledgers.make_one()

    async def _told_by(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """What a rebuild leaves to the operator."""
        reported = [found for found in report["findings"] if found["action"] in _TOLD]
        counts = ", ".join(f"{count} {what}" for what, count in sorted(report["ledgers"].items()))
        self._notify(f"rebuilt: {counts}; {len(reported)} wait for an operator")
        for finding in reported:
            await self._tell_copies(finding)
        return reported

    async def _tell_copies(self, finding: dict[str, Any]) -> None:
        self._notify(str(finding))
        if "ledger_id" in finding:
            for line in await self._operator.copies(finding["ledger_id"]):
                self._notify(line)

    # --- between ---------------------------------------------------------------------------------

    async def _changes_are_made(self) -> None:
        """The newest database alone has these."""
        await self._hurt_a_bookie()
        await self._clients.ledgers.make_one()

    async def _wipe_a_bookie(self) -> None:
        """A disk is lost together with the database."""
        await self._operator.wipe(self._fragile)
        self._report.wiped += 1

    async def _kill_gateways(self) -> None:
        """None, one or all of them; they stay away until the right database is back."""
        gateways = self._operator.named("gateway")
        names = self._dice.sample(gateways, self._dice.randint(0, len(gateways)))
        if not names:
            ledgers = self._clients.ledgers
            await until(lambda: ledgers.is_open, "the open ledger is there", SETTLED_S)
        await self._operator.kill(names)

    async def _cluster_goes_on_without_changes(self) -> None:
        """The loss is told, and the open ledger gets entries all the same, if its writer lives."""
        await self._operator.until_told()
        self._report.waited += 1
        gateways = self._operator.named("gateway")
        if all(map(self._cluster.is_alive, gateways)):
            ledgers = self._clients.ledgers
            wanted = ledgers.kept + KEPT
            await until(lambda: ledgers.kept >= wanted, "the open ledger gets entries", SETTLED_S)

    @property
    def _stores(self) -> Stores:
        return Stores(self._both.primary.postgres.dsn(), "")


@asynccontextmanager
async def storm(
    report: Report,
    *,
    seed: int,
    deleters: int = 1,
    notify: Callable[[str], None] = _tell_nobody,
) -> AsyncIterator[Storm]:
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
                metadata_services=2,
                # Every second storm runs over mutual TLS.
                tls=seed % 2 == 1,
            )
        )
        yield Storm(cluster, both, folder, report, seed=seed, deleters=deleters, notify=notify)
