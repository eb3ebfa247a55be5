"""The one-machine cluster: embedded Postgres and Redis, and all services as processes.

Starts them and ends them in order. Imports nothing of them, and of `quorumlog` only what makes certificates: a
cluster is what its processes answer.
"""
