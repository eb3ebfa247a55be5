"""The gateway: the client protocol over HTTP. It keeps no state that another gateway could not find again.

`edge` is HTTP, `logs` puts named logs on ledgers, `engine` writes and reads ledgers; each layer uses the layers
after it (pyproject.toml). `interface` holds the values that pass between layers; `app` builds the layers.
May use `quorumlog.net`, `wire` and `protocol`, and no other service.
"""
