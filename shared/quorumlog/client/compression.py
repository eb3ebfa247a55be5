"""What the SDK sends compressed, and asks for compressed, where its user wants that."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

CODINGS: Final = ("gzip", "zstd")

_LEVEL: Final = 1
"""Of both: the next ones take half as much CPU again for a tenth fewer bytes (docs/performance.md)."""
_SHORT_BYTES: Final = 1024
"""Shorter bodies go as they are: a packet carries them anyway."""
_LONG_BYTES: Final = 1 << 20
"""Longer ones are compressed by a thread, so that the event loop goes on meanwhile (some milliseconds)."""


class Compression:
    """Compresses the bodies of requests by one content coding."""

    def __init__(self, coding: str) -> None:
        """Raises: ValueError, TypeError."""
        if not isinstance(coding, str):
            raise TypeError(f"compression is a str, not {type(coding).__name__}")
        if coding not in CODINGS:
            raise ValueError(f"compression is gzip or zstd, not {coding!r}")
        self.coding = coding
        self._pack = _zstd() if coding == "zstd" else _gzip

    async def packed(self, body: bytes) -> bytes | None:
        """The body compressed; None where it is short, or does not shrink."""
        if len(body) < _SHORT_BYTES:
            return None
        if len(body) > _LONG_BYTES:
            packed = await asyncio.to_thread(self._pack, body)
        else:
            packed = self._pack(body)
        return packed if len(packed) < len(body) else None


def _gzip(data: bytes) -> bytes:
    return zlib.compress(data, _LEVEL, 31)


def _zstd() -> Callable[[bytes], bytes]:
    """Raises: ValueError where there is no zstd, which Python has from 3.14 on."""
    try:
        from quorumlog.zstd import zstd  # noqa: PLC0415
    except ImportError:
        raise ValueError("compression 'zstd' needs: pip install 'quorumlog[zstd]'") from None
    return lambda data: bytes(zstd.compress(data, _LEVEL))
