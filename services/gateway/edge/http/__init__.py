"""HTTP code that all resources share: request and response bodies, content codings, and budgets.

This package may import `edge/access` for a request's caller, and no other package of `edge`.
"""
