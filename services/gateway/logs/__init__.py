"""Named logs: ordered lists of ledgers that go on when a gateway or a bookie dies (rules 22-27)."""
