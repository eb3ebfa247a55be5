"""Maintenance jobs, each a program and a function.

`python -m quorumlog.spark.jobs.<name> --help`, `spark-submit` of the same module, or
`quorumlog.spark.jobs.<name>.run(spark, …)`. A job prints a report (`--json`), changes nothing with
`--dry-run`, and exits with 0 when all is well, 1 when it found something wrong, 2 after wrong usage, 3
when it failed or could not look everywhere.
"""
