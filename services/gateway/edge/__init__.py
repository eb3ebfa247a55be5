"""The gateway's public face: HTTP in, calls of the engine and of logs out. It knows nothing of quorums.

A resource has one module that declares its operations and handles them; the larger ones have their models beside it
(`…models.py`). `pages`, `reads` and `sockets` are the same for ledgers and logs. `http/` has what is HTTP and no
resource, `access/` who may do what.
May use `logs`, and of the engine only `interface`.
"""
