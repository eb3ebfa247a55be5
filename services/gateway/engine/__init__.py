"""The ledger operations of one gateway: writes, reads, recovers and deletes ledgers.

The engine may import only `interface` of the gateway's other packages, so it depends on neither
logs nor the public HTTP API. `peers` sends requests to other gateways.
"""

from services.gateway.engine.engine import Engine

__all__ = ["Engine"]
