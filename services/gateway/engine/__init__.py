"""The client protocol behind one gateway: ledgers that it writes, reads, recovers and deletes.

May use `interface` and `rereads` of the gateway; it knows nothing of logs and of HTTP's public face.
`internal` and `peers` are what gateways ask of each other.
"""

from services.gateway.engine.config import EngineConfig
from services.gateway.engine.engine import Engine
from services.gateway.engine.metrics import add_metrics

__all__ = ["Engine", "EngineConfig", "add_metrics"]
