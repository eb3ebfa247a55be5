"""The Durable Streams protocol over logs."""
