"""Access control of the public listener: scopes, grants, quotas, and callers by token, JWT or
ticket.

This package may import the declarations of operations, and `logs` for the log of a transaction.
"""
