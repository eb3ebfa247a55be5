"""Prometheus metrics of a gateway's engine and logs, computed at scrape time."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog.protocol.queue_state import Queue
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.http.middleware import Metrics
from services.gateway.edge.log_records import RecordRoutes
from services.gateway.engine import Engine
from services.gateway.logs.handle import LOGS_COUNTED_MAX, OTHER_LOGS
from services.gateway.logs.lags import CONSUMERS_SHOWN_MAX, OTHER_CONSUMERS, Measured
from services.gateway.logs.manager import LogManager
from services.gateway.logs.queues import QUEUES_SHOWN_MAX
from services.gateway.logs.subscriptions import SubscriptionService
from services.gateway.logs.transactions import Transactions
from services.gateway.rates import Counts
from services.gateway.streams.operations import APPEND

_DATA: Final = (
    EntryRoutes.operations["append_entries"].path,
    RecordRoutes.operations["append_records"].path,
    APPEND.path,
)
"""Paths to which clients append, and from which they read."""


def counts_of(metrics: Metrics, logs: LogManager | None) -> Counts:
    """Count public requests and appended records, for the samples of rates."""
    counts = dict.fromkeys(Counts._fields, 0.0)
    for method, route, status, count, seconds in metrics.totals():
        if route.startswith("/internal/"):
            continue
        counts["requests"] += count
        counts["errors"] += count if status >= 500 else 0
        if route in _DATA and method == "POST":
            counts["appends"] += count
            counts["append_s"] += seconds
        elif route in _DATA and method == "GET":
            counts["reads"] += count
    if logs is not None:
        done = logs.ownership.counts
        counts["records"], counts["append_bytes"] = done.records, done.bytes
    return Counts(**counts)


class EngineMetrics(Collector):
    """Metrics of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics with their current values."""
        engine, handles = self._engine, self._engine.handles
        channels = list(engine.bookies.channels().values())
        for name, text, value in (
            ("open_ledgers", "Ledgers that this process writes.", len(handles.live)),
            (
                "clock_doubted",
                "1: nothing is deleted by age, as the database's clock may be wrong (rule 26c).",
                bool(engine.database_clock.doubt),
            ),
            (
                "degraded_ledgers",
                "Ledgers of this process with a bookie that accepts no appends.",
                len(engine.degraded_ledgers()),
            ),
            (
                "append_in_flight_bytes",
                "Payload bytes that are accepted and not yet acknowledged.",
                handles.in_flight.used_bytes,
            ),
            (
                "recent_bytes",
                "Memory of acknowledged entries that are cached for readers at the tail.",
                handles.recent.bytes_kept,
            ),
            ("bookie_channels", "Bookies with an open connection.", channels.count(True)),
            (
                "bookie_channels_broken",
                "Bookies that were contacted and have no open connection.",
                channels.count(False),
            ),
            (
                "bookies_quarantined",
                "Bookies in quarantine: they are listed as live, but their requests failed here.",
                len(engine.directory.quarantine.names),
            ),
            (
                "narrow_ledgers",
                "Ledgers created here in fewer zones than requested, since the start.",
                engine.placing.narrow_count,
            ),
        ):
            yield GaugeMetricFamily(f"quorumlog_gateway_{name}", text, value)
        yield CounterMetricFamily(
            "quorumlog_gateway_ensemble_changes",
            "Ensemble changes by writers of this process.",
            engine.throttled.ensemble_changes,
        )
        yield CounterMetricFamily(
            "quorumlog_gateway_recent_reads",
            "Reads of entries that were answered from memory, without a bookie.",
            handles.recent.reads,
        )


class LogMetrics(Collector):
    """Metrics of logs and transactions."""

    def __init__(self, logs: LogManager, transactions: Transactions | None) -> None:
        self._logs, self._transactions = logs, transactions

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics with their current values."""
        ownership = self._logs.ownership
        counts, owned = ownership.counts, "Logs that this gateway owns"
        yield GaugeMetricFamily("quorumlog_logs_owned", owned, len(ownership.owned))
        for name, text, value in (
            ("takeovers", "Logs taken over or sealed", counts.takeovers),
            ("requests", "Append requests that were acknowledged here", counts.requests),
            ("records", "Records that were acknowledged here", counts.records),
            ("duplicates", "Retries of producers that got the first response", counts.duplicates),
            ("rewrites", "Ledgers written by rewrites", self._logs.rewrites.done),
            ("compacted_bytes", "Bytes that compaction saved", self._logs.rewrites.removed_bytes),
            ("rewrite_failures", "Rewrites and indexes that failed", self._logs.rewrites.failed),
            ("rewritten_bytes", "Bytes of ledgers written by rewrites", self._logs.rewrites.bytes),
            ("key_indexes", "Indexes of keys that were built here", self._logs.rewrites.indexed),
            ("key_lookups", "Uses of indexes of keys", self._logs.keys.lookups),
            ("key_skipped_bytes", "Bytes that lookups left unread", self._logs.keys.skipped_bytes),
            ("key_indexes_damaged", "Indexes that could not be used", self._logs.keys.damaged),
        ):
            yield CounterMetricFamily(f"quorumlog_log_{name}", text, value)
        text = f"By log: the first {LOGS_COUNTED_MAX} logs; all other logs as {OTHER_LOGS}"
        records = CounterMetricFamily("quorumlog_log_appended_records", text, labels=("log",))
        size = CounterMetricFamily("quorumlog_log_appended_bytes", text, labels=("log",))
        for name, appended in counts.by_log.items():
            records.add_metric((name,), appended.records)
            size.add_metric((name,), appended.bytes)
        yield records
        yield size
        text = f"Share of bytes that compaction has not read: the first {LOGS_COUNTED_MAX} logs"
        dirty = GaugeMetricFamily("quorumlog_log_dirty_share", text, labels=("log",))
        shares, names = self._logs.rewrites.dirty_shares, {*ownership.owned}
        for name in shares.keys() & names:
            dirty.add_metric((name,), shares[name])
        yield dirty
        if self._transactions is not None:
            text = "Ledgers of transactions that were published onto a log through this gateway"
            count = self._transactions.published_ledgers
            yield CounterMetricFamily("quorumlog_published_ledgers", text, count)
        yield from _queues(self._logs.queues.measured)
        yield from _subscriptions(self._logs.subscriptions)
        measured = self._logs.lags.measured
        if measured is not None:
            yield from _lags(measured)


def _queues(measured: Sequence[tuple[Queue, int, float | None]]) -> Iterable[Metric]:
    """Yields the progress of work queues, at the gateway that owns the log of queues."""
    which, labels = f"of the first {QUEUES_SHOWN_MAX} queues by name", ("log", "queue")
    families: list[GaugeMetricFamily | CounterMetricFamily] = [
        *(
            GaugeMetricFamily(f"quorumlog_queue_{name}", f"{text}, {which}", labels=labels)
            for name, text in (
                ("depth", "Records that are not done"),
                ("in_flight", "Records that workers have"),
                ("unsettled", "Records that were delivered and are unsettled"),
                ("oldest_seconds", "Age of the first unsettled record"),
            )
        ),
        *(
            CounterMetricFamily(f"quorumlog_queue_{name}", f"{text}, {which}", labels=labels)
            for name, text in (
                ("redeliveries", "Records given again"),
                ("dead_letters", "Records that went to the dead-letter log"),
                ("lost_records", "Records that the log dropped before they were settled"),
            )
        ),
    ]
    for row, depth, oldest_s in measured:
        counts = (row.redelivered, row.dead, row.lost)
        values = (depth, row.in_flight, len(row.given), oldest_s, *counts)
        for family, value in zip(families, values, strict=True):
            if value is not None:
                family.add_metric(row.key, value)
    yield from families


def _subscriptions(service: SubscriptionService) -> Iterable[Metric]:
    """Yields this gateway's deliveries, and the subscriptions' state if it owns their log."""
    for name, text, count in (
        ("deliveries", "Wakes that receivers accepted, or that were announced", service.deliveries),
        ("failures", "Attempts to deliver or announce a wake that failed", service.failures),
    ):
        yield CounterMetricFamily(f"quorumlog_subscription_{name}", text, count)
    if service.is_here:
        text = "Subscriptions of streams"
        yield GaugeMetricFamily("quorumlog_subscriptions", text, service.count)
        text = "Streams linked by subscriptions; at the limit, patterns link no more streams"
        yield GaugeMetricFamily("quorumlog_subscription_links", text, service.links)
        name = "quorumlog_subscription_oldest_undelivered_seconds"
        text = "Age of the oldest wake that no receiver has accepted"
        yield GaugeMetricFamily(name, text, service.oldest_ms / 1000)


def _lags(measured: Measured) -> Iterable[Metric]:
    """Yields the lag of consumers, at the gateway that owns the log of committed offsets."""
    who = (
        f"of consumers: {CONSUMERS_SHOWN_MAX} by name; of the others, the one with the most"
        f" unprocessed records as {OTHER_CONSUMERS}"
    )
    labels = ("log", "consumer")
    name = "quorumlog_consumer_lag_records"
    records = GaugeMetricFamily(name, f"Unprocessed records, {who}", labels=labels)
    name = "quorumlog_consumer_lag_seconds"
    seconds = GaugeMetricFamily(name, f"Age of the oldest unprocessed record, {who}", labels=labels)
    for lag in measured.lags:
        records.add_metric((lag.log, lag.consumer), lag.records)
        if lag.seconds is not None:
            seconds.add_metric((lag.log, lag.consumer), lag.seconds)
    yield records
    yield seconds
    text = "Consumers by the state of their committed offsets"
    states = GaugeMetricFamily("quorumlog_consumers", text, labels=("state",))
    for state, count in measured.states.items():
        states.add_metric((state,), count)
    yield states
    text = "Seconds since the lag of consumers was last measured"
    age_s = asyncio.get_running_loop().time() - measured.at_s
    yield GaugeMetricFamily("quorumlog_consumer_lag_age_seconds", text, age_s)
