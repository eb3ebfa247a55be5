"""Benchmarks, load and the cluster of the tests."""
