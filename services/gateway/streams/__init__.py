"""The Durable Streams protocol at /v1/stream/{path}, as a thin layer on top of logs
(docs/guides/durable-streams.md).

The rules here come from PROTOCOL.md in the repository durable-streams/durable-streams. Comments
cite this document's sections. The package may use `edge` and `logs`.
"""
