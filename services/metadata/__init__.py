"""The metadata service: the only one that knows Postgres and Redis."""
