"""Found by PySpark because of its name: registers the format `quorumlog` in every session."""

from quorumlog.spark.source import QuorumLogSource as DefaultSource

__all__ = ["DefaultSource"]
