"""Autorecovery: finds missing copies and abandoned ledgers, and repairs them. Keeps no state.

The auditor queues what it finds, workers repair it, checkers compare copies; their conclusions are pure
(`findings`) or rest on bookies' answers (`check`, `losses`). May use `quorumlog.net`, `wire` and
`protocol`, and no other service.
"""
