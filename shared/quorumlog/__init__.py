"""quorumlog: replicated, append-only ledgers and logs over HTTP (the BookKeeper protocol).

Imports run one way (pyproject.toml): every folder may use `header` and `errors`, and each folder
may use the folders before it in this order: `protocol`, `wire`, `net` (services) and `client`
(users), `cli` and `spark`.
"""

__version__ = "0.1.0"
