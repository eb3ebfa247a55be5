"""Content codings (RFC 9110, 8.4) of bodies that come: which are taken, and how they are unpacked piece by piece.

A few bytes may unpack to gigabytes. So nothing is unpacked whole: `Unpacker` gives pieces of a bounded size, and
whoever takes a piece counts it against its bounds before the next one is made.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Final

from aiohttp import hdrs, web

from quorumlog.errors import BadRequest, TooLarge, UnsupportedMediaType
from quorumlog.zstd import zstd

GZIP: Final = "gzip"
ZSTD: Final = "zstd"
CODINGS: Final = (ZSTD, GZIP)
"""The better one first: a third of the CPU for the same size (docs/performance.md)."""

_EXPANSION_MAX: Final = 100
"""Lines of JSON shrink to a tenth, rarely to a fiftieth (docs/performance.md); gzip can shrink to a thousandth, zstd to
a thirty-thousandth.
"""

PIECE_BYTES: Final = 128 << 10
"""Unpacked at once: a third of a millisecond at most (docs/performance.md), after which others have their turn."""

MEMBER_BYTES: Final = 4 << 10
"""What a member (gzip) or frame (zstd) counts for at least: an empty one has nine bytes, and costs as much as
unpacking so many.
"""

WINDOW_BYTES_MAX: Final = 8 << 20
"""How far a frame of zstd may refer back, and so what its decoder keeps (RFC 9659, 3)."""

_GZIP_BACK_BYTES: Final = 32 << 10
_ZSTD_OPTIONS: Final = {
    int(zstd.DecompressionParameter.window_log_max): WINDOW_BYTES_MAX.bit_length() - 1
}
_NAMES: Final = {"gzip": GZIP, "x-gzip": GZIP, "zstd": ZSTD}

UNPACKED: Final = web.RequestKey("unpacked_bytes", int)
"""What has come of a request's body by now, unpacked: quotas charge it."""
SAVED: Final = web.RequestKey("saved_bytes", int)
"""By how much a request's answer was shorter than what it says, until now: quotas charge that too."""


def coding_of(request: web.Request) -> str | None:
    """The coding of the request's body; None where it came as it is. Raises: UnsupportedMediaType."""
    if hdrs.CONTENT_ENCODING not in request.headers:
        return None
    # A header may come in several lines, which are one list.
    given = ",".join(request.headers.getall(hdrs.CONTENT_ENCODING))
    named = [name for part in given.split(",") if (name := part.strip().lower()) != "identity"]
    if not any(named):
        return None
    coding = _NAMES.get(named[0]) if len(named) == 1 else None
    if coding is None:
        raise UnsupportedMediaType(
            f"the body's Content-Encoding is {given[:100]!r}: this gateway takes one of {', '.join(CODINGS)}, or none",
            headers={hdrs.ACCEPT_ENCODING: ", ".join(CODINGS)},
        )
    return coding


def unpacker(request: web.Request) -> "Unpacker | None":
    """What unpacks the request's body; None where it came as it is. Raises: UnsupportedMediaType."""
    coding = coding_of(request)
    return None if coding is None else Unpacker(coding)


class Unpacker:
    """Unpacks one body: members (gzip) or frames (zstd), one after another.

    Invariant: between two pieces it keeps what is left of one chunk, and one decoder.
    """

    __slots__ = ("_decoder", "_least", "_new", "_produced", "_window", "coding")

    def __init__(self, coding: str) -> None:
        self.coding = coding
        is_zstd = coding == ZSTD
        self._new: Callable[[], _Gzip | _Zstd] = _Zstd if is_zstd else _Gzip
        self._window = WINDOW_BYTES_MAX if is_zstd else _GZIP_BACK_BYTES
        self._decoder: _Gzip | _Zstd | None = None
        self._produced = 0
        """Bytes of the member that is being unpacked, or was last."""
        self._least = 0
        """What that member counts for at least; 0 where there was none."""

    @property
    def kept_bytes(self) -> int:
        """What the decoder keeps to refer back to, at most."""
        return min(self._produced, self._window) if self._decoder is not None else 0

    def pieces(self, chunk: bytes) -> Iterator[tuple[bytes, int]]:
        """What a chunk of the body unpacks to, in pieces of PIECE_BYTES at most, maybe empty, each with what it counts
        for: its bytes, and where a further member begins what the one before lacks of MEMBER_BYTES.

        Raises: BadRequest.
        """
        while chunk:
            cost = 0
            if self._decoder is None:
                cost = max(0, self._least - self._produced)
                self._decoder, self._produced, self._least = self._new(), 0, MEMBER_BYTES
            decoder = self._decoder
            try:
                piece = decoder.decode(chunk)
                while True:
                    self._produced += len(piece)
                    yield piece, len(piece) + cost
                    if decoder.is_done or (decoder.is_hungry and len(piece) < PIECE_BYTES):
                        break
                    cost = 0
                    piece = decoder.decode(b"")
                    if not piece and decoder.is_hungry:
                        break
            except (zlib.error, zstd.ZstdError) as error:
                raise BadRequest(f"the body is not {self.coding}, or damaged: {error}") from error
            chunk = b""
            if decoder.is_done:
                chunk, self._decoder = decoder.rest, None

    def finish(self) -> None:
        """The body has ended. Raises: BadRequest where a part of it is missing. No bytes at all are no body."""
        if self._decoder is not None:
            raise BadRequest(f"the body is cut short: its {self.coding} does not end")


async def unpacked(
    request: web.Request, unpacker: Unpacker, chunk: bytes
) -> AsyncGenerator[bytes, None]:
    """What a chunk of a request's body unpacks to, piece by piece, counted in `UNPACKED` before it is given. Others
    have their turn in between. Raises: BadRequest.
    """
    turn = 0
    for piece, cost in unpacker.pieces(chunk):
        request[UNPACKED] = request.get(UNPACKED, 0) + cost
        yield piece
        turn += cost
        if turn >= PIECE_BYTES:
            turn = 0
            await asyncio.sleep(0)


def check_expansion(request: web.Request, came: int, first_bytes: int) -> None:
    """Raise TooLarge where a body unpacks to far more than a sender of such a body would have sent: each byte that came
    must pay for the work on what it unpacks to, beyond the first ones.
    """
    if request[UNPACKED] > first_bytes + _EXPANSION_MAX * came:
        raise TooLarge(
            f"the body unpacks to more than {_EXPANSION_MAX} times what came, and {first_bytes} bytes"
        )


class _Gzip:
    """A member of gzip."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decode(self, data: bytes) -> bytes:
        """A piece of what is left and `data` unpack to. Raises: zlib.error."""
        return self._decoder.decompress(data or self._decoder.unconsumed_tail, PIECE_BYTES)

    @property
    def is_hungry(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def is_done(self) -> bool:
        return self._decoder.eof

    @property
    def rest(self) -> bytes:
        return self._decoder.unused_data


class _Zstd:
    """A frame of zstd."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)

    def decode(self, data: bytes) -> bytes:
        """A piece of what is left and `data` unpack to. Raises: zstd.ZstdError."""
        return self._decoder.decompress(data, PIECE_BYTES)

    @property
    def is_hungry(self) -> bool:
        return self._decoder.needs_input

    @property
    def is_done(self) -> bool:
        return self._decoder.eof

    @property
    def rest(self) -> bytes:
        return self._decoder.unused_data
