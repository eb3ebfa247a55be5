"""Bodies as aiohttp's client sends them."""

from io import BytesIO
from typing import Final

_WHOLE_BYTES: Final = 1 << 20
"""aiohttp writes bytes in one piece. Beyond this it warns that the event loop stands still meanwhile."""


def outgoing(body: bytes | None) -> bytes | BytesIO | None:
    """A body for one request: a large one is sent in pieces."""
    return body if body is None or len(body) <= _WHOLE_BYTES else BytesIO(body)
