"""The client protocol behind one gateway."""

from services.gateway.engine.engine import Engine, EngineConfig, EngineForLogs

__all__ = ["Engine", "EngineConfig", "EngineForLogs"]
