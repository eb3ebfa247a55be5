"""The formats on the wire: bodies, frames, columns, problem documents, strict JSON. No sockets.

The package may use `protocol` and `errors`. `problems` needs no package, and `columns` needs only
pyarrow, because Spark's executors import them from a zip.
"""
