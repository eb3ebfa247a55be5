"""Named logs: ordered lists of ledgers that continue when a gateway or a bookie dies (rules 22-27).

The package may import `engine`, and does not depend on the public HTTP API. `internal` and `peers`
implement the requests between gateways.
"""
