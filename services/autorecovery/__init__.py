"""Autorecovery: repairs missing copies, and recovers abandoned ledgers. It keeps no state. The
auditor finds lost bookies and abandoned ledgers, the checker compares copies, and workers perform
the queued repairs. `findings` has pure functions, `check` asks bookies. Autorecovery may use
`quorumlog.net`, `wire` and `protocol`, and no other service.
"""
