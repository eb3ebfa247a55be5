"""Who may do what at the public listener: scopes and grants, callers by token, JWT or ticket, quotas, and the guard.

May use the declarations of operations, and `logs` for the log of a transaction.
"""
