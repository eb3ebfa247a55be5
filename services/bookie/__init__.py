"""The bookie: stores entries in append-only files and keeps its promises.

From below: the log and its segments, the index and what replays them, records, what is held, the
store, what runs beside it (collection, scrub, limbo), and HTTP on top (pyproject.toml). What a bookie
takes and refuses is decided by `protocol/replica.py`; this folder has the files, threads and sockets.
May use `quorumlog.net`, `wire` and `protocol`, and no other service.
"""
