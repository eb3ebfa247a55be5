"""HTTP code that no resource owns: request and response bodies, content codings, and budgets.

This package may import `edge/access` for a request's caller, and no other module of `edge`.
"""
