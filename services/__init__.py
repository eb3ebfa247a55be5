"""The services of a cluster. They communicate over HTTP, and no service imports another service.

A service may use `quorumlog.net`, `wire` and `protocol`, and none of the client-side packages.
"""
