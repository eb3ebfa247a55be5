"""Streams of the Durable Streams protocol: ours beside the protocol's own server, in one run."""
