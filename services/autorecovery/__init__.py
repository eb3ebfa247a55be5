"""Autorecovery repairs missing copies and recovers abandoned ledgers. It stores no state. The
auditor finds lost bookies and abandoned ledgers, the checker compares copies, and workers perform
the queued repairs. The module `findings` contains pure functions, and `check` sends requests to
bookies. Autorecovery may import `quorumlog.net`, `wire` and `protocol`, but no other service.
"""
