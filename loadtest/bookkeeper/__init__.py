"""Apache BookKeeper as a system that benchmarks compare quorumlog with."""
