"""Runs a cluster on one machine: embedded Postgres and Redis, and all services, as processes.

The package imports none of the services, so it depends only on their responses. From `quorumlog`,
it imports only the modules for settings, secrets and certificates.
"""
