"""The bookie stores entries in append-only files, persists fences and answers reads.

The layers, from the bottom up: the log and its segments; the index and the replay; records;
ledgers; the store; background work (collection, scrub, limbo); HTTP (see pyproject.toml).
`protocol/replica.py` decides what a bookie accepts; this folder does the work with files, threads
and sockets. This folder may import `quorumlog.net`, `wire` and `protocol`, but no other service.
"""
