"""Converts bodies to a form that aiohttp's client sends without blocking the event loop."""

from io import BytesIO
from typing import Final

_WHOLE_BYTES: Final = 1 << 20
"""Size of `bytes` above which aiohttp warns, because writing them blocks the event loop."""


def outgoing(body: bytes | None) -> bytes | BytesIO | None:
    """A body for one request, in a form that is sent in pieces if it is large."""
    return body if body is None or len(body) <= _WHOLE_BYTES else BytesIO(body)
