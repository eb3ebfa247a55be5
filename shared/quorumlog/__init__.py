"""quorumlog: replicated, append-only ledgers and logs over HTTP (the BookKeeper protocol).

`header` and `errors` are used by all, then each folder by those to its right (pyproject.toml):
`protocol`, `wire`, `net` (services) and `client` (users), `cli` and `spark`.
"""

__version__ = "0.1.0"
