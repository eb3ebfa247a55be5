"""What operators watch of an engine: read when somebody scrapes, never on the hot path."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.engine.engine import Engine


def add_metrics(engine: Engine, registry: CollectorRegistry) -> None:
    """Give an engine's gauges to a registry."""
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("open_ledgers", "Ledgers that this process writes.", lambda: engine.open_ledgers),
        (
            "degraded_ledgers",
            "Of those, the ones with a bookie that takes no part (redundancy is less than asked).",
            lambda: len(engine.degraded_ledgers()),
        ),
        (
            "append_in_flight_bytes",
            "Payload that is taken and not yet acknowledged.",
            lambda: engine.in_flight_bytes,
        ),
        (
            "bookie_channels",
            "Bookies with a standing connection.",
            lambda: sum(engine.channels().values()),
        ),
        (
            "bookie_channels_broken",
            "Bookies that were asked and have none.",
            lambda: sum(not is_open for is_open in engine.channels().values()),
        ),
        (
            "bookies_quarantined",
            "Bookies that fail here though they are called live.",
            lambda: len(engine.quarantined),
        ),
        (
            "narrow_ledgers",
            "Ledgers made here in fewer zones than asked, since the start.",
            lambda: engine.placing.narrow_count,
        ),
    )
    registry.register(_Changes(engine))
    for name, text, read in gauges:
        Gauge(f"quorumlog_gateway_{name}", text, registry=registry).set_function(read)


class _Changes(Collector):
    """A counter that the engine keeps itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """As it is now."""
        yield CounterMetricFamily(
            "quorumlog_gateway_ensemble_changes",
            "Times that a writer here put another bookie in a place.",
            value=self._engine.ensemble_changes,
        )
