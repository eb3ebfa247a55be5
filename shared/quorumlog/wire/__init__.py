"""The formats on the wire: bodies, frames, columns, problem documents, strict JSON. No sockets.

The package may import `protocol` and `errors`. The module `problems` requires no other package, and
`columns` only pyarrow and numpy, because Spark's executors import them from a zip.
"""
