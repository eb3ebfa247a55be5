"""Runs a cluster on one machine, as processes: embedded Postgres and Redis, and all services.

The package imports none of the services; it uses them only by their commands and HTTP responses.
From `quorumlog`, it imports only the modules for settings, secrets and certificates.
"""
