"""The metadata service: ledger metadata with compare-and-swap (Postgres), and liveness (Redis).

Only this service may use asyncpg and redis. It may import `quorumlog.net`, `wire` and `protocol`,
and no other service.
"""
