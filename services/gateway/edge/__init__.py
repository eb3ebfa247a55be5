"""The gateway's public API: translates HTTP requests to calls of the engine and of logs.

Each resource has one module that declares its operations and handles them. A larger resource has a
second module with its models (`…models.py`). Ledgers and logs share `pages`, `reads`, `sockets`.
`http/` has the HTTP code that belongs to no resource; `access/` decides which caller may do what.
This package may import `logs`, and of the engine only `interface`. It knows nothing of quorums.
"""
