"""The gateway's public API: translates HTTP requests into calls to the engine and to logs.

Each resource has one module that declares its operations and handles them. A larger resource has a
second module with its models (`…models.py`). Ledgers and logs share `pages`, `reads`, `sockets`.
`http/` has the HTTP code that belongs to no resource; `access/` controls callers' access. This
package may import `logs`, and the engine's `interface`. Its code is independent of quorums.
"""
