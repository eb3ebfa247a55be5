"""Spark on quorumlog: ledgers and logs as DataFrames, written exactly once.

`config`, and every module that runs on executors, needs PySpark with pandas and pyarrow and nothing
else, so that a zip of this package is enough there. The folder may use `errors`, `header`, the pure
modules of `protocol` and `wire`, and no SDK: the extra `spark` brings what the folder imports.
"""
