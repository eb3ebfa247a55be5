"""The client protocol behind one gateway."""

from services.gateway.engine.engine import Engine, EngineConfig, EngineForLogs
from services.gateway.engine.metrics import add_metrics

__all__ = ["Engine", "EngineConfig", "EngineForLogs", "add_metrics"]
