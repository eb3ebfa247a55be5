"""Apache BookKeeper itself as a peer."""
