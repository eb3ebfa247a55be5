"""Access control of the public listener: callers by token, JWT or ticket, grants and quotas.

This package may import the declarations of operations, and `logs` to find a transaction's log.
"""
