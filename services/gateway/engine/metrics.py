"""Metrics of an engine for operators: read at scrape time, never on the hot path."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.engine.engine import Engine


class _EngineMetrics(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        engine, handles = self._engine, self._engine.handles
        channels = list(engine.channels().values())
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
                len(engine.quarantined),
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


def add_metrics(engine: Engine, registry: CollectorRegistry) -> None:
    """Register an engine's metrics."""
    registry.register(_EngineMetrics(engine))
