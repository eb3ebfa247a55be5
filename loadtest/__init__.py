"""Benchmarks, load generators, and the cluster that tests run against."""
