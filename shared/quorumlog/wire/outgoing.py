"""Bodies in a form that aiohttp's client sends without blocking the event loop."""

from io import BytesIO
from typing import Final

_WHOLE_BYTES: Final = 1 << 20
"""aiohttp writes `bytes` in one piece, and warns beyond this size that it blocks the event loop."""


def outgoing(body: bytes | None) -> bytes | BytesIO | None:
    """A body for one request; a large body is sent in pieces."""
    return body if body is None or len(body) <= _WHOLE_BYTES else BytesIO(body)
