"""The services of a cluster. They talk over HTTP, and no service imports another one.

A service may use `quorumlog.net`, `wire` and `protocol`, and none of the client-side packages.
"""
