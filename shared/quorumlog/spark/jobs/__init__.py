"""Maintenance jobs, each a program and a function.

Run a job with `python -m quorumlog.spark.jobs.<name>`, with `spark-submit` of the same module, or
by calling `quorumlog.spark.jobs.<name>.run(spark, …)`. A job prints a report (`--json`) and
changes nothing with `--dry-run`. Exit status: 0 success, 1 problems found, 2 wrong usage,
3 failure or an incomplete check.
"""
