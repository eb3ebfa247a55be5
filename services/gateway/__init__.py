"""The gateway: the client protocol over HTTP. It keeps nothing that another one can't find again.

`edge` is HTTP, `logs` puts named logs on ledgers, `engine` writes and reads ledgers; each uses those
below it (pyproject.toml). `interface` holds the values that they hand each other, `app` builds them.
May use `quorumlog.net`, `wire` and `protocol`, and no other service.
"""
