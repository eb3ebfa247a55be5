"""The service's Prometheus metrics of requests, databases, and the whole cluster.

The cluster's gauges are updated periodically, not when scraped, so that scraping is cheap and never
waits for a database. Every metadata service exports the same cluster gauges, so use one service's
gauges, or the maximum.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Final, get_args

import prometheus_client
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog.errors import QuorumLogError
from quorumlog.net.service import METRICS
from quorumlog.wire.bodies import BookieState
from quorumlog.wire.repair_bodies import RepairSummary
from services.metadata.database import Database
from services.metadata.http import MetadataParts

_UPDATE_S: Final = 2.0
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
"""Methods with their own label. Clients could invent any number of other methods."""


class MetadataMetrics(Collector):
    """The metrics of one service, with gauges of the cluster as of the latest update."""

    def __init__(self, app: web.Application, parts: MetadataParts, database: Database) -> None:
        """The queue's gauges are zero until the first update."""
        self._parts = parts
        self._database = database
        self._queue = RepairSummary(ledgers=0, items=0, waiting=0, oldest_s=0.0)
        self._kept_ledgers = 0
        self._states: Counter[str] | None = None
        """The number of bookies in each state. None until the first update."""
        registry = app[METRICS]
        registry.register(self)
        self.requests = prometheus_client.Counter(
            "quorumlog_metadata_requests",
            "Requests by route and status",
            ("method", "route", "status"),
            registry=registry,
        )
        self.seconds = prometheus_client.Histogram(
            "quorumlog_metadata_request_seconds",
            "How long requests took, streams excepted",
            ("method", "route"),
            registry=registry,
        )

    async def run(self) -> None:
        """Update the cluster's gauges in an endless loop. During outages, they don't change."""
        while True:
            with contextlib.suppress(QuorumLogError):
                await self._update()
            await asyncio.sleep(_UPDATE_S)

    async def _update(self) -> None:
        await self._database.run(self._database.count_waiting)
        self._queue = await self._parts.repairs.summary()
        self._kept_ledgers = (await self._parts.kept.list(limit=1)).count
        found = await self._parts.liveness.bookies(await self._parts.cookies.list())
        self._states = Counter(bookie.state for bookie in found.bookies)

    def collect(self) -> Iterable[Metric]:
        """The current values of all metrics."""
        parts, queue, memory = self._parts, self._queue, self._database.memory
        gauges: tuple[tuple[str, str, float], ...] = (
            ("metadata_postgres_up", "1 if Postgres answers", self._database.reach.is_up),
            (
                "metadata_missing_witnesses",
                "Acknowledged changes that Postgres lacks, since it went back in time (rule 18a)",
                len(memory.missing),
            ),
            (
                "metadata_kept_ledgers",
                "Ledgers that bookies keep, since they hold copies of metadata that Postgres lacks",
                self._kept_ledgers,
            ),
            (
                "metadata_waiting_commits",
                "Changes that were given up and wait in Postgres for its synchronous standby",
                self._database.waiting_commits,
            ),
            ("metadata_redis_up", "1 if Redis accepts writes", parts.liveness.reach.is_up),
            ("metadata_followers", "Open streams", parts.changes.follower_count),
            (
                "metadata_clock_doubted",
                "1 while nothing is deleted by age, since Postgres' clock may be wrong (rule 26c)",
                self._database.clock.doubt != "",
            ),
            ("metadata_transactions_open", "Transactions that are OPEN", parts.transactions.open),
            ("metadata_orphan_ledgers", "Ledgers that no log names", parts.transactions.orphans),
            (
                "under_replicated_ledgers",
                "Ledgers with a member that lacks entries, now.",
                queue.ledgers,
            ),
            ("repair_items", "Items of the repair queue, now.", queue.items),
            (
                "repair_items_waiting",
                "Items that failed and wait for their next try.",
                queue.waiting,
            ),
            ("repair_oldest_seconds", "Age of the oldest item.", queue.oldest_s),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"quorumlog_{name}", text, value)
        for how in ("committed", "aborted", "expired"):
            yield CounterMetricFamily(
                f"quorumlog_metadata_transactions_{how}",
                f"Transactions that were {how} through this service",
                self._database.counted[how],
            )
        bookies = GaugeMetricFamily(
            "quorumlog_bookies", "Registered bookies by state.", labels=("state",)
        )
        if self._states is not None:
            for state in get_args(BookieState):
                bookies.add_metric((state,), self._states[state])
        yield bookies


REQUEST_METRICS: Final = web.AppKey("request_metrics", MetadataMetrics)


@web.middleware
async def measures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that counts each request, and measures its duration."""
    began = asyncio.get_running_loop().time()
    response = await handler(request)
    metrics = request.app[REQUEST_METRICS]
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical
    method = request.method if request.method in _METHODS else "other"
    metrics.requests.labels(method, route, response.status).inc()
    if response.content_length is not None:
        took_s = asyncio.get_running_loop().time() - began
        metrics.seconds.labels(method, route).observe(took_s)
    return response
