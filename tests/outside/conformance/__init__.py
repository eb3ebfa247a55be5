"""The conformance suite of the Durable Streams protocol, against a cluster of real processes."""
