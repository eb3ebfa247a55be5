"""The one-machine cluster: runs embedded Postgres and Redis, and all services, as processes.

The package imports none of the services, so it knows them only by their responses. It imports only
the parts of `quorumlog` for settings, secrets and certificates.
"""
