"""The processes of a cluster. They meet over HTTP, and none imports another.

Each may use `quorumlog.net`, `wire` and `protocol`, and nothing that is for users.
"""
