"""What the logs of a gateway tell Prometheus."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.logs.manager import LogManager
from services.gateway.logs.transactions import Transactions


class _LogMetrics(Collector):
    def __init__(self, logs: LogManager, transactions: Transactions | None) -> None:
        self._logs, self._transactions = logs, transactions

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now."""
        counts = self._logs.counts
        owned = "Logs that this gateway owns"
        yield GaugeMetricFamily("quorumlog_logs_owned", owned, self._logs.ownership.owned)
        for name, text, value in (
            ("takeovers", "Logs taken over or sealed", counts.takeovers),
            ("requests", "Append requests that were acknowledged here", counts.requests),
            ("records", "Records that were acknowledged here", counts.records),
            ("duplicates", "Repeats of producers, answered as the first time", counts.duplicates),
        ):
            yield CounterMetricFamily(f"quorumlog_log_{name}", text, value)
        if self._transactions is not None:
            text = "Ledgers of transactions that came onto a log through this gateway"
            count = self._transactions.published_ledgers
            yield CounterMetricFamily("quorumlog_published_ledgers", text, count)


def add_log_metrics(
    logs: LogManager, transactions: Transactions | None, registry: CollectorRegistry
) -> None:
    """Show the logs' numbers under /metrics."""
    registry.register(_LogMetrics(logs, transactions))
