"""What travels: bodies, frames, columns, problem documents, strict JSON. No sockets.

May use `protocol` and `errors`. `problems` and `columns` need no package but, for the latter,
pyarrow: executors of Spark import them from a zip.
"""
