"""The gateway: serves the client protocol over HTTP. Any other gateway can replace it at any time.

`edge` is the HTTP API, `logs` builds named logs from ledgers, `engine` writes and reads ledgers.
Each layer may use the layers after it (pyproject.toml). `interface` defines the values that layers
exchange, and `app` builds the layers. A gateway may use `quorumlog.net`, `wire` and `protocol`.
"""
