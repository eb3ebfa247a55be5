"""`make bench`: benchmarks of quorumlog and of comparable systems."""
