"""Named logs: ordered lists of ledgers that go on when a gateway or a bookie dies (rules 22-27).

May use `engine` (through `ports`, but for what runs it) and knows nothing of HTTP's public face.
"""
