"""Spark on quorumlog: ledgers and logs as DataFrames, written exactly once.

`config`, and all that runs on executors, needs PySpark with pandas and pyarrow and nothing else,
so that a zip of this package is enough there.
"""
