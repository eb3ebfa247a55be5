"""Bytes that are filled in place: by a socket or by a file, without a copy."""

import ctypes
import io
from typing import Final

_blank: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""`_blank(None, size)`: bytes whose content is not set. Raises: MemoryError."""


class InPlace:
    """Bytes that come piece by piece.

    `BytesIO` gives its buffer away without a copy, as `bytes` that nobody can change any more. Memory of the size that a
    peer announces is taken only as its bytes come, since nothing writes to it before: `bytes(size)` would write zeros where
    the memory was in use before. What lay there is never given away (`is_whole`).
    """

    __slots__ = ("_at", "_file", "_view")

    def __init__(self, size: int) -> None:
        """Nothing has come. Raises: MemoryError."""
        self._file = io.BytesIO(_blank(None, size))
        self._view = self._file.getbuffer()
        self._at = 0

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._view[self._at :]

    def advance(self, count: int) -> None:
        """So many bytes have been written to `room`."""
        self._at += count

    def take(self, data: memoryview) -> int:
        """Copy as much as there is room for; how much that was."""
        count = min(len(data), len(self._view) - self._at)
        self._view[self._at : self._at + count] = data[:count]
        self._at += count
        return count

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._at == len(self._view)

    def value(self) -> bytes:
        """All of them."""
        assert self.is_whole
        return self._file.getvalue()
