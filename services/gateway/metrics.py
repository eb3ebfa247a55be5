"""Metrics of a gateway's engine and logs for operators: read at scrape time, never on the hot path."""

import asyncio
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.engine import Engine
from services.gateway.logs.handle import LOGS_COUNTED_MAX, OTHER_LOGS
from services.gateway.logs.lags import CONSUMERS_SHOWN_MAX, OTHER_CONSUMERS, Measured
from services.gateway.logs.manager import LogManager
from services.gateway.logs.transactions import Transactions


class EngineMetrics(Collector):
    """What an engine counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        engine, handles = self._engine, self._engine.handles
        channels = list(engine.bookies.channels().values())
        for name, text, value in (
            ("open_ledgers", "Ledgers that this process writes.", len(handles.live)),
            (
                "clock_doubted",
                "1 while nothing is deleted by age, since the database's clock may be wrong (rule 26c).",
                bool(engine.database_clock.doubt),
            ),
            (
                "degraded_ledgers",
                "Of those, the ones with a bookie that takes no adds (reduced redundancy).",
                len(engine.degraded_ledgers()),
            ),
            (
                "append_in_flight_bytes",
                "Payload that is accepted and not yet acknowledged.",
                handles.in_flight.used_bytes,
            ),
            (
                "recent_bytes",
                "Acknowledged entries that are in memory for readers at the tail.",
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
                "Bookies that are listed as live and fail here.",
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
    """What logs and transactions count."""

    def __init__(self, logs: LogManager, transactions: Transactions | None) -> None:
        self._logs, self._transactions = logs, transactions

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        ownership = self._logs.ownership
        counts, owned = ownership.counts, "Logs that this gateway owns"
        yield GaugeMetricFamily("quorumlog_logs_owned", owned, len(ownership.owned))
        for name, text, value in (
            ("takeovers", "Logs taken over or sealed", counts.takeovers),
            ("requests", "Append requests that were acknowledged here", counts.requests),
            ("records", "Records that were acknowledged here", counts.records),
            ("duplicates", "Repeats of producers, answered as the first time", counts.duplicates),
        ):
            yield CounterMetricFamily(f"quorumlog_log_{name}", text, value)
        text = f"By log: the {LOGS_COUNTED_MAX} first ones that this gateway appended to; the others are {OTHER_LOGS}"
        records = CounterMetricFamily("quorumlog_log_appended_records", text, labels=("log",))
        size = CounterMetricFamily("quorumlog_log_appended_bytes", text, labels=("log",))
        for name, appended in counts.by_log.items():
            records.add_metric((name,), appended.records)
            size.add_metric((name,), appended.bytes)
        yield records
        yield size
        if self._transactions is not None:
            text = "Ledgers of transactions that came onto a log through this gateway"
            count = self._transactions.published_ledgers
            yield CounterMetricFamily("quorumlog_published_ledgers", text, count)
        measured = self._logs.lags.measured
        if measured is not None:
            yield from _lags(measured)


def _lags(measured: Measured) -> Iterable[Metric]:
    """How far consumers are behind, at the gateway that owns their positions."""
    who = (
        f"of consumers: {CONSUMERS_SHOWN_MAX} by name; of the others the one that is most records behind, as"
        f" {OTHER_CONSUMERS}"
    )
    labels = ("log", "consumer")
    name = "quorumlog_consumer_lag_records"
    records = GaugeMetricFamily(name, f"Records that are not processed, {who}", labels=labels)
    name = "quorumlog_consumer_lag_seconds"
    seconds = GaugeMetricFamily(name, f"Age of the first of them, {who}", labels=labels)
    for lag in measured.lags:
        records.add_metric((lag.log, lag.consumer), lag.records)
        if lag.seconds is not None:
            seconds.add_metric((lag.log, lag.consumer), lag.seconds)
    yield records
    yield seconds
    text = "Consumers by what has become of their positions"
    states = GaugeMetricFamily("quorumlog_consumers", text, labels=("state",))
    for state, count in measured.states.items():
        states.add_metric((state,), count)
    yield states
    text = "Since the lag of consumers was measured"
    age_s = asyncio.get_running_loop().time() - measured.at_s
    yield GaugeMetricFamily("quorumlog_consumer_lag_age_seconds", text, age_s)
