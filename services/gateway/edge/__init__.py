"""The gateway's public face: HTTP in, calls of the engine and of logs out. It knows nothing of quorums.

A resource has two modules: `…_operations.py` declares what its routes take and give, the other one does
it. `pages`, `streams`, `sockets` and `pipe` are the same for ledgers and logs.
May use `logs`, and of the engine only `interface`.
"""
