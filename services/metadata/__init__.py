"""The metadata service: ledger rows with compare-and-swap (Postgres), liveness (Redis).

Only this service may use asyncpg and redis. It may import `quorumlog.net`, `wire` and `protocol`,
and no other service.
"""
