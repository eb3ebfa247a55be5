"""The metadata service: ledger rows with compare-and-swap (Postgres), liveness (Redis)."""
