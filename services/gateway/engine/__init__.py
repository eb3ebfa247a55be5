"""The client protocol behind one gateway: ledgers that it writes, reads, recovers and deletes.

May use `interface` of the gateway; it knows nothing of logs and of HTTP's public face.
`peers` is what gateways ask of each other.
"""

from services.gateway.engine.engine import Engine

__all__ = ["Engine"]
