"""Metrics of an engine for operators: read at scrape time, never on the hot path."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.engine.engine import Engine


def add_metrics(engine: Engine, registry: CollectorRegistry) -> None:
    """Register an engine's metrics."""
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("open_ledgers", "Ledgers that this process writes.", lambda: len(engine.handles.live)),
        (
            "degraded_ledgers",
            "Of those, the ones with a bookie that takes no adds (reduced redundancy).",
            lambda: len(engine.degraded_ledgers()),
        ),
        (
            "append_in_flight_bytes",
            "Payload that is accepted and not yet acknowledged.",
            lambda: engine.handles.in_flight.used_bytes,
        ),
        (
            "bookie_channels",
            "Bookies with an open connection.",
            lambda: sum(engine.channels().values()),
        ),
        (
            "bookie_channels_broken",
            "Bookies that were contacted and have no open connection.",
            lambda: sum(not is_open for is_open in engine.channels().values()),
        ),
        (
            "bookies_quarantined",
            "Bookies that are listed as live and fail here.",
            lambda: len(engine.quarantined),
        ),
        (
            "narrow_ledgers",
            "Ledgers created here in fewer zones than requested, since the start.",
            lambda: engine.placing.narrow_count,
        ),
    )
    registry.register(_EnsembleChanges(engine))
    for name, text, read in gauges:
        Gauge(f"quorumlog_gateway_{name}", text, registry=registry).set_function(read)


class _EnsembleChanges(Collector):
    """A counter that the engine keeps itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The counter's present value."""
        yield CounterMetricFamily(
            "quorumlog_gateway_ensemble_changes",
            "Ensemble changes by writers of this process.",
            value=self._engine.throttled.ensemble_changes,
        )
