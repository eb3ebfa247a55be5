"""Builds the bookie: its store, its routes, its metrics."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog.net.connections import UPGRADES
from quorumlog.net.operations import add_routes
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.wire.frames import MESSAGE_BYTES_MAX
from quorumlog.wire.versions import CHANNEL, shown
from services.bookie import directory, index
from services.bookie.config import Config
from services.bookie.handlers import BOOKIE, ROUTES
from services.bookie.runtime import BookieRuntime, end_process

_COUNTERS: Final = (
    "log_bytes",
    "log_records",
    "log_syncs",
    "checkpoints",
    "damaged_reads",
    "scrubbed_bytes",
    "scrub_damages",
    "dropped_ledgers",
    "removed_segments",
    "compacted_bytes",
)

_MISSING_ROWS: Final = "ledgers whose metadata was missing without a tombstone: nothing was deleted"
_REFUSALS: Final = (
    "refused handshakes: the peer and this bookie have no version of the channel in common"
)
_KEPT_LEDGERS: Final = (
    "ledgers kept because the database lacks metadata of which this bookie holds a copy"
)


def build(config: Config, *, end: Callable[[int, str], None] = end_process) -> web.Application:
    """Build the application. It listens at once, and is ready once the bookie is registered."""
    app = web.Application(middlewares=[answers_problems], client_max_size=MESSAGE_BYTES_MAX)
    app[BOOKIE] = BookieRuntime(config, end=end)
    app[UPGRADES] = True

    async def live(app: web.Application) -> AsyncIterator[None]:
        app[BOOKIE].start()
        yield
        await app[BOOKIE].stop()

    async def end_channels(app: web.Application) -> None:
        # The server waits for its handlers when it shuts down, and open channels are handlers.
        app[BOOKIE].close_channels()

    app.on_shutdown.append(end_channels)
    app.cleanup_ctx.append(live)

    add_shared_routes(
        app,
        (route.operation for route in ROUTES),
        ready=app[BOOKIE].ready,
        title="quorumlog bookie",
        hosts=config.hosts,
        authenticator=config.authenticator,
        formats={
            "channel": shown(CHANNEL),
            "directory": str(directory.FORMAT),
            "index": index.FORMAT.decode(),
        },
    )
    app[METRICS].register(_StoreMetrics(app))
    add_routes(app, ROUTES)
    return app


class _StoreMetrics(Collector):
    """The store's metrics, collected at scrape time, so that they cost nothing on the hot path."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics; none before the bookie serves."""
        store = self._app[BOOKIE].store
        if store is None:
            return
        for name in _COUNTERS:
            yield CounterMetricFamily(
                f"bookie_{name}", f"{name.replace('_', ' ')} so far", value=store.counters[name]
            )
        bookie = self._app[BOOKIE]
        for family, name, text, value in (
            (GaugeMetricFamily, "damages", "damaged places of the log", store.damages.count),
            (CounterMetricFamily, "missing_rows", _MISSING_ROWS, bookie.rows.missing_count),
            (CounterMetricFamily, "channel_refusals", _REFUSALS, bookie.channel_refusals),
            (GaugeMetricFamily, "kept_ledgers", _KEPT_LEDGERS, len(bookie.rows.kept)),
            (GaugeMetricFamily, "pending_bytes", "queued", store.pending.bytes),
            (GaugeMetricFamily, "free_bytes", "room on disk", store.disk.free_bytes()),
            (GaugeMetricFamily, "disk_low", "1: little room left", store.disk.is_low),
            (GaugeMetricFamily, "read_only", "1: no normal adds", store.takes_no_adds),
        ):
            yield family(f"bookie_{name}", text, value=value)
        if bookie.limbo is not None:
            progress, copied = bookie.limbo.progress, store.counters["limbo_copied_entries"]
            for name, value in (
                ("ledgers", progress.ledgers),
                ("checked_entries", progress.checked_entries),
                ("copied_entries", copied),
            ):
                text = f"limbo: {name.replace('_', ' ')} (docs/internals/bookie.md)"
                yield GaugeMetricFamily(f"bookie_limbo_{name}", text, value=value)
