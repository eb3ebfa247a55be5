"""Builds autorecovery: an auditor, a checker, workers, the routes for operators, and the metrics."""

from collections.abc import AsyncIterator, Iterable

from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog.net.operations import add_routes
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.wire.versions import CHANNEL, shown
from services.autorecovery.config import Config
from services.autorecovery.handlers import ROUTES
from services.autorecovery.parts import PARTS, running


class Measures(Collector):
    """Metrics of this process, read at each scrape."""

    def __init__(self, app: web.Application) -> None:
        """There are no metrics until the application has its parts."""
        self._app = app

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        parts = self._app.get(PARTS)
        if parts is None:
            return
        gauges: tuple[tuple[str, str, float], ...] = (
            ("is_auditor", "This process audits", parts.auditor.is_auditor),
            ("lost_bookies", "Bookies whose entries are copied to others", len(parts.auditor.lost)),
            (
                "draining_bookies",
                "Bookies whose ledgers are moved away",
                len(parts.auditor.draining),
            ),
            ("paused", "1: nothing is copied", parts.steering.is_paused),
            ("working", "Repairs under way", parts.workers.working),
            ("audit_seconds", "How long the last audit took", parts.auditor.audit_s),
            ("check_seconds", "How long the last check of all copies took", parts.checker.pass_s),
            (
                "lost_entries",
                "Entries that no bookie can serve: accept the loss",
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
            ("repaired", "Repairs completed", parts.counts.repaired),
            ("failed", "Repairs that failed and will be retried", parts.counts.failed),
            ("copied_bytes", "Bytes written to repaired members", parts.pace.copied_bytes),
            ("copied_entries", "Entries written to repaired members", parts.pace.copied_entries),
            ("checked_ledgers", "Ledgers whose copies were compared", parts.checker.checked),
            ("lacking_ranges", "Ranges found lacking by a check", parts.checker.lacking),
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
    """Build the application, which runs its background work from startup to cleanup."""
    app = web.Application(middlewares=[answers_problems])

    async def work(app: web.Application) -> AsyncIterator[None]:
        async with running(config) as parts:
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
