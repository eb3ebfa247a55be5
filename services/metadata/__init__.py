"""The metadata service: ledger rows with compare-and-swap (Postgres), liveness (Redis).

The only folder that may use asyncpg and redis. May use `quorumlog.net`, `wire` and `protocol`, and no
other service.
"""
