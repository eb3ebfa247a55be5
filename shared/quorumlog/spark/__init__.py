"""Spark on quorumlog: ledgers and logs as DataFrames, written exactly once.

`config` and the modules that run on executors need only PySpark with pandas and pyarrow, so a zip
of this package is enough there. The folder may use `errors`, `header` and the pure modules of
`protocol` and `wire`, but not the SDK. The extra `spark` installs the folder's dependencies.
"""
