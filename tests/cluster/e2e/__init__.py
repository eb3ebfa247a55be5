"""A whole cluster of real processes, and what may happen to it."""
