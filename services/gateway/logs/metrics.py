"""Metrics of a gateway's logs: read at scrape time."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.logs.handle import LOGS_COUNTED_MAX, OTHER_LOGS
from services.gateway.logs.manager import LogManager
from services.gateway.logs.transactions import Transactions


class _LogMetrics(Collector):
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


def add_log_metrics(
    logs: LogManager, transactions: Transactions | None, registry: CollectorRegistry
) -> None:
    """Register the logs' metrics."""
    registry.register(_LogMetrics(logs, transactions))
