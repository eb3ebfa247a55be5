"""The one-machine cluster: runs embedded Postgres and Redis, and all services, as processes.

The package imports none of the services, so it knows them only by their responses. Of `quorumlog`,
it imports only what it needs for settings, secrets and certificates.
"""
