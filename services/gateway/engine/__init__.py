"""The client protocol behind one gateway: writes, reads, recovers and deletes ledgers.

Of the gateway's other parts, the engine may import only `interface`: it knows neither logs nor the
public HTTP API. `peers` sends requests to other gateways.
"""

from services.gateway.engine.engine import Engine

__all__ = ["Engine"]
