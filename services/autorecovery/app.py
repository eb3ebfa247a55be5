"""Builds the autorecovery application: auditor, checker, workers, operators' routes and metrics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from functools import partial
from math import inf
from typing import Final
from uuid import uuid4

from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog.errors import QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.operations import add_routes
from quorumlog.net.ports import MachineTimes, Ports
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.net.sessions import service_session
from quorumlog.net.timers import Tasks, Timers, awake, restarted
from quorumlog.wire.bodies import ServiceHeartbeat
from quorumlog.wire.versions import CHANNEL, shown
from services.autorecovery.auditor import Auditor
from services.autorecovery.checker import Checker
from services.autorecovery.config import Config
from services.autorecovery.findings import KnownLosses
from services.autorecovery.handlers import PARTS, ROUTES, AutorecoveryParts
from services.autorecovery.steering import PacedBookies, Steering
from services.autorecovery.worker import Worker
from services.autorecovery.writers import Writers

_HEARTBEAT_S: Final = 1.0
_COPY_BYTES: Final = 1 << 20
"""Maximum size of one read of a repair. It is also the largest burst above a copy limit."""


class Measures(Collector):
    """The Prometheus metrics of this process, collected at each scrape."""

    def __init__(self, app: web.Application) -> None:
        """`app`: the application to measure; it has no metrics until its parts have started."""
        self._app = app

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics with their current values."""
        parts = self._app.get(PARTS)
        if parts is None:
            return
        gauges: tuple[tuple[str, str, float], ...] = (
            ("is_auditor", "1: this process is the auditor", parts.auditor.is_auditor),
            ("lost_bookies", "Bookies whose entries are copied to others", len(parts.auditor.lost)),
            (
                "draining_bookies",
                "Bookies whose entries are being moved to other bookies",
                len(parts.auditor.draining),
            ),
            ("paused", "1: an operator has paused copying", parts.steering.is_paused),
            ("working", "Running repairs", parts.worker.working),
            ("audit_seconds", "How long the last audit took", parts.auditor.audit_s),
            ("check_seconds", "How long the last check of all copies took", parts.checker.pass_s),
            (
                "lost_entries",
                "Entries that no bookie can serve: restore a copy, or accept the loss",
                parts.losses.entries,
            ),
            (
                "misplaced_ledgers",
                "Ledgers whose copies are in fewer zones than possible",
                parts.checker.misplaced_count,
            ),
            (
                "copy_limit_bytes",
                "Copy limit in bytes per second; 0: no limit",
                parts.steering.bytes_per_s or 0,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"quorumlog_autorecovery_{name}", text, value=value)
        counters: tuple[tuple[str, str, float], ...] = (
            ("repaired", "Repairs completed", parts.worker.repaired),
            ("failed", "Repairs that failed and will be retried", parts.worker.failed),
            ("copied_bytes", "Bytes written to repaired members", parts.pace.copied_bytes),
            ("copied_entries", "Entries written to repaired members", parts.pace.copied_entries),
            ("checked_ledgers", "Ledgers whose copies were compared", parts.checker.checked),
            ("lacking_ranges", "Ranges that a check found missing", parts.checker.lacking),
            ("differing_ranges", "Ranges whose copies differ: an alarm", parts.checker.differing),
            ("checks_unanswered", "Members that did not answer a check", parts.checker.unknown),
            ("audits", "Audits", parts.auditor.audits),
            ("recoveries", "Abandoned ledgers recovered", parts.auditor.recovered),
            (
                "recoveries_failed",
                "Recoveries that failed and will be retried",
                parts.auditor.blocked_count,
            ),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"quorumlog_autorecovery_{name}", text, value=value)


def build(config: Config) -> web.Application:
    """Builds the application. Its background tasks run from its startup to its cleanup."""
    app = web.Application(middlewares=[answers_problems])

    async def work(app: web.Application) -> AsyncIterator[None]:
        async with _running(config) as parts:
            app[PARTS] = parts
            yield

    async def ready() -> None:
        return

    add_shared_routes(
        app,
        (route.operation for route in ROUTES),
        ready=ready,
        title="quorumlog autorecovery",
        hosts=config.hosts,
        authenticator=config.authenticator,
        formats={"channel": shown(CHANNEL)},
    )
    add_routes(app, ROUTES)
    app.cleanup_ctx.append(work)
    app[METRICS].register(Measures(app))
    return app


@contextlib.asynccontextmanager
async def _running(config: Config) -> AsyncIterator[AutorecoveryParts]:
    """Context manager that runs the auditor, the checker and the workers."""
    name = str(uuid4())
    tasks, timers = Tasks(), Timers(asyncio.get_running_loop(), awake().time)
    async with service_session(config.credentials) as session:
        metadata = MetadataClient(config.metadata_urls, session)
        directory = Directory(metadata.bookies)
        bookies = BookieClient(directory.address, session, failed=directory.quarantine.failed)
        ports = Ports(bookies, metadata, directory, timers, tasks)
        pace = PacedBookies(bookies)
        paced = Ports(
            pace,
            metadata,
            directory,
            timers,
            tasks,
            # Repairs have no quorum timeout, because a paced add may wait long before it is sent.
            # Once the add is sent, its channel always reports a result, at worst `unknown`.
            MachineTimes(quorum_s=inf),
            read_bytes_max=_COPY_BYTES,
        )
        repairs = RepairClient(metadata, name)
        steering = Steering(config, metadata, repairs, pace)
        losses = KnownLosses(HoldingsClient(directory, session))
        parts = AutorecoveryParts(
            Auditor(name, config, metadata, repairs, ports, Writers(session), steering),
            Checker(config, metadata, repairs, directory, session, losses, ports),
            losses,
            metadata,
            pace,
            repairs,
            steering,
            Worker(repairs, directory, paced, session, losses, steering),
        )
        for work in (
            partial(_send_heartbeats, metadata, name, config.url),
            partial(metadata.keep_confirmed, _HEARTBEAT_S),
            partial(parts.steering.follow, parts.auditor.trigger),
            directory.follow,
            parts.auditor.run,
            partial(parts.checker.run, lambda: parts.auditor.is_auditor),
            parts.pace.run,
            partial(parts.worker.run, tasks),
        ):
            tasks.start(restarted(work))
        try:
            yield parts
        finally:
            await tasks.close()
            timers.close()
            await bookies.close()


async def _send_heartbeats(metadata: MetadataClient, name: str, url: str) -> None:
    while True:
        with contextlib.suppress(QuorumLogError):  # the metadata client logs the failure
            await metadata.send_service_heartbeat("autorecovery", name, ServiceHeartbeat(url=url))
        await asyncio.sleep(_HEARTBEAT_S)
