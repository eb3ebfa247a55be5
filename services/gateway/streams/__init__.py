"""The Durable Streams protocol at /v1/stream/{path}: a thin translation onto logs (docs/guides/durable-streams.md).

Source of all rules here: PROTOCOL.md of the repository durable-streams/durable-streams, whose section names the code
cites. May use `edge` and `logs`.
"""
