"""The jobs that keep a cluster in order, each a program and a function.

`python -m quorumlog.spark.jobs.<name> --help`, `spark-submit` of the same module, or
`quorumlog.spark.jobs.<name>.run(spark, …)`. A job says what it did as a report (`--json`), changes
nothing with `--dry-run`, and ends with 0 when all is well, 1 when it found something wrong, 2 when
it was called wrongly, 3 when it could not be done or could not look everywhere.
"""
