"""Maintenance jobs, each a program and a function.

Run a job with `python -m quorumlog.spark.jobs.<name>`, with `spark-submit` of the same module, or
by a call of `quorumlog.spark.jobs.<name>.run(spark, …)`. A job prints a report (`--json`) and
changes nothing with `--dry-run`. Exit status: 0 all is well, 1 it found something wrong, 2 wrong
usage, 3 it failed or could not check everything.
"""
