"""HTTP of the public listener, without any resource: bodies in and out, their codings, and the room for them.

May use `edge/access` for the caller of a request, and no other module of `edge`.
"""
