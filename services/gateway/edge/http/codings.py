"""Content codings (RFC 9110, 8.4) of requests and responses (docs/reference/http.md, Compression).

A few bytes may decompress to gigabytes, so no body is decompressed as a whole. `Unpacker` yields
pieces of bounded size, and the caller charges each piece before requesting the next piece.

Responses to reads are compressed if they are long enough and have a compressible media type. These
responses are never compressed:
- responses about tokens and tickets, whose compressed length could reveal a secret to an attacker;
- responses with an ETag for `If-Match`, which identifies one representation (RFC 9110, 8.8.3);
- events, because each event would need a flush, and each idle tail a compressor;
- errors.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import lru_cache, partial
from typing import Any, Final

from aiohttp import hdrs, web

from quorumlog.errors import BadRequest, Overloaded, TooLarge, UnsupportedMediaType
from quorumlog.net.operations import JSON
from quorumlog.zstd import zstd
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import ARROW, FRAMES, HTML, NDJSON, OCTETS, weighted

GZIP: Final = "gzip"
ZSTD: Final = "zstd"
CODINGS: Final = (ZSTD, GZIP)
"""Codings, best first: zstd takes a third of gzip's CPU for the same size (docs/internals/performance.md)."""

_EXPANSION_MAX: Final = 100
"""Maximum ratio of decompressed to received bytes. JSON lines have a ratio of 10, rarely 50
(docs/internals/performance.md). gzip can reach 1,000, and zstd 30,000.
"""

PIECE_BYTES: Final = 128 << 10
"""Bytes decompressed before other requests get a turn: at most 0.33 ms (docs/internals/performance.md)."""

MEMBER_BYTES: Final = 4 << 10
"""Minimum charge for a member (gzip) or frame (zstd). An empty frame has only nine bytes, but costs
as much CPU as decompressing this many bytes.
"""

WINDOW_BYTES_MAX: Final = 8 << 20
"""Maximum window of a zstd frame, which its decoder keeps in memory (RFC 9659, 3)."""

_GZIP_BACK_BYTES: Final = 32 << 10
_ZSTD_OPTIONS: Final = {
    int(zstd.DecompressionParameter.window_log_max): WINDOW_BYTES_MAX.bit_length() - 1
}
_NAMES: Final = {"gzip": GZIP, "x-gzip": GZIP, "zstd": ZSTD}

UNPACKED: Final = web.RequestKey("unpacked_bytes", int)
"""Request key: decompressed bytes of the body so far. Quotas charge these bytes."""
SAVED: Final = web.RequestKey("saved_bytes", int)
"""Request key: bytes that compression has saved in the response so far. Quotas charge these bytes."""


def coding_of(request: web.Request) -> str | None:
    """Return the content coding of a request's body, or None. Raises: UnsupportedMediaType."""
    if hdrs.CONTENT_ENCODING not in request.headers:
        return None
    # A client may send the header in several lines, which form one list.
    given = ",".join(request.headers.getall(hdrs.CONTENT_ENCODING))
    named = [name for part in given.split(",") if (name := part.strip().lower()) != "identity"]
    if not any(named):
        return None
    coding = _NAMES.get(named[0]) if len(named) == 1 else None
    if coding is None:
        raise UnsupportedMediaType(
            f"Content-Encoding {given[:100]!r} is not supported: use {', '.join(CODINGS)} or none",
            headers={hdrs.ACCEPT_ENCODING: ", ".join(CODINGS)},
        )
    return coding


def unpacker(request: web.Request) -> "Unpacker | None":
    """Create the decompressor of a request's body, or None. Raises: UnsupportedMediaType."""
    coding = coding_of(request)
    return None if coding is None else Unpacker(coding)


class Unpacker:
    """Decompresses one body: a sequence of members (gzip) or frames (zstd).

    Invariant: between two pieces, only the rest of one chunk and one decoder are in memory.
    """

    __slots__ = ("_decoder", "_least", "_new", "_produced", "_window", "coding")

    def __init__(self, coding: str) -> None:
        self.coding = coding
        is_zstd = coding == ZSTD
        self._new: Callable[[], _Gzip | zstd.ZstdDecompressor] = (
            partial(zstd.ZstdDecompressor, options=_ZSTD_OPTIONS) if is_zstd else _Gzip
        )
        self._window = WINDOW_BYTES_MAX if is_zstd else _GZIP_BACK_BYTES
        self._decoder: _Gzip | zstd.ZstdDecompressor | None = None
        self._produced = 0
        """Decompressed bytes of the current or last member."""
        self._least = 0
        """Minimum charge for the current or last member; 0 if there was none."""

    @property
    def kept_bytes(self) -> int:
        """Maximum bytes that the decoder keeps in its window."""
        return min(self._produced, self._window) if self._decoder is not None else 0

    def pieces(self, chunk: bytes) -> Iterator[tuple[bytes, int]]:
        """Decompress a chunk of the body to pieces of at most PIECE_BYTES, some empty. Yields each
        piece with its charge: the piece's length, and at the start of a further member the bytes by
        which the previous member was shorter than MEMBER_BYTES. Raises: BadRequest.
        """
        while chunk:
            cost = 0
            if self._decoder is None:
                cost = max(0, self._least - self._produced)
                self._decoder, self._produced, self._least = self._new(), 0, MEMBER_BYTES
            decoder = self._decoder
            try:
                piece = decoder.decompress(chunk, PIECE_BYTES)
                while True:
                    self._produced += len(piece)
                    yield piece, len(piece) + cost
                    if decoder.eof or (decoder.needs_input and len(piece) < PIECE_BYTES):
                        break
                    cost = 0
                    piece = decoder.decompress(b"", PIECE_BYTES)
                    if not piece and decoder.needs_input:
                        break
            except (zlib.error, zstd.ZstdError) as error:
                raise BadRequest(f"the body is not valid {self.coding} data: {error}") from error
            chunk = b""
            if decoder.eof:
                chunk, self._decoder = decoder.unused_data, None

    def finish(self) -> None:
        """End the body, which may be empty. Raises: BadRequest if the last member is incomplete."""
        if self._decoder is not None:
            raise BadRequest(f"the body is truncated: its {self.coding} data is incomplete")


async def unpacked(
    request: web.Request, unpacker: Unpacker | None, chunk: bytes
) -> AsyncGenerator[bytes, None]:
    """Decompress a chunk to pieces, and count them in `UNPACKED`. Other requests get a turn in
    between. Without an unpacker, yields the chunk itself. Raises: BadRequest.
    """
    if unpacker is None:
        yield chunk
        return
    turn = 0
    for piece, cost in unpacker.pieces(chunk):
        request[UNPACKED] = request.get(UNPACKED, 0) + cost
        yield piece
        turn += cost
        if turn >= PIECE_BYTES:
            turn = 0
            await asyncio.sleep(0)


def check_expansion(request: web.Request, came: int, first_bytes: int) -> None:
    """Raise TooLarge if a body decompresses to more than `first_bytes` plus 100 times the number of
    received bytes (`came`). A small body must not cause far more work than its size suggests.
    """
    if request[UNPACKED] > first_bytes + _EXPANSION_MAX * came:
        raise TooLarge(
            f"the body decompresses to over {_EXPANSION_MAX} times its size plus {first_bytes} bytes"
        )


class _Gzip:
    """A decompressor of a gzip member with the interface of `ZstdDecompressor`."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decompress input to at most `max_length` bytes, and keep the rest. Raises: zlib.error."""
        return self._decoder.decompress(data or self._decoder.unconsumed_tail, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data


SLICE_BYTES: Final = 64 << 10
"""Bytes compressed before other requests get a turn: 0.33 ms (docs/internals/performance.md)."""

PACKS: Final = web.RequestKey("packs_answers", bool)
"""Request key: whether the response may be compressed. False for the cluster's own processes."""

_FORMS: Final = frozenset((JSON, NDJSON, FRAMES, ARROW, OCTETS, HTML, "text/plain"))
_SECRET: Final = ("/v1/tokens", "/v1/tickets")
_LEVEL: Final = 1
"""Level of gzip and zstd. The next level takes 50 % more CPU to save 10 % (docs/internals/performance.md)."""
_IDENTITY: Final = "identity"
_WORTH: Final = 8
"""A response is compressed only if its first slice shrinks by more than 1/_WORTH."""
_KEPT_BYTES: Final = {GZIP: 256 << 10, ZSTD: 1 << 20}
"""Memory that a compressor keeps (measured)."""


def coding_for(request: web.Request, room: Room, response: web.StreamResponse) -> str | None:
    """Choose the coding of a response, or None, regardless of its length. Updates `Vary`."""
    if not room.limits.compressed_answer_bytes_min or not _may_be_coded(request, response):
        return None
    vary = response.headers.get(hdrs.VARY)
    response.headers[hdrs.VARY] = f"{vary}, {hdrs.ACCEPT_ENCODING}" if vary else "Accept-Encoding"
    asked = request.headers.get(hdrs.ACCEPT_ENCODING)
    return None if asked is None else chosen(asked)[0]


def _may_be_coded(request: web.Request, response: web.StreamResponse) -> bool:
    return (
        request.get(PACKS, False)
        and response.status == 200
        and request.method in (hdrs.METH_GET, hdrs.METH_HEAD)
        and response.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0] in _FORMS
        and hdrs.ETAG not in response.headers
        and not request.path.startswith(_SECRET)
    )


@lru_cache(maxsize=256)
def chosen(accept: str) -> tuple[str | None, bool]:
    """Return the coding that a client prefers, or None, and whether plain responses are acceptable.

    A coding that matches only `*` is chosen only if the client refuses plain responses. A client
    that accepts no supported coding gets plain responses in any case (RFC 9110, 12.5.3).
    """
    given = dict(weighted(part) for part in accept.split(",") if part.strip())
    if "x-gzip" in given:
        given.setdefault(GZIP, given["x-gzip"])
    rest = given.get("*")
    plain = given.get(_IDENTITY, rest if rest == 0 else None)
    named = {coding: given[coding] for coding in CODINGS if given.get(coding)}
    if not named and plain == 0 and rest:
        named = {coding: rest for coding in CODINGS if coding not in given}
    best = max(named, key=lambda coding: named[coding], default=None)
    if best is not None and plain is not None and plain > named[best]:
        best = None
    return best, plain != 0


def pack(request: web.Request, room: Room, response: web.Response) -> None:
    """Compress a small response at once if compression makes it smaller."""
    coding, body = coding_for(request, room, response), response.body
    if coding is None or not isinstance(body, bytes) or not body:
        return
    needs = not chosen(request.headers[hdrs.ACCEPT_ENCODING])[1]
    if len(body) < room.limits.compressed_answer_bytes_min and not needs:
        return
    packed = zstd.compress(body, _LEVEL) if coding == ZSTD else zlib.compress(body, _LEVEL, 31)
    if len(packed) < len(body) or needs:
        response.body = packed
        response.headers[hdrs.CONTENT_ENCODING] = coding
        request[SAVED] = len(body) - len(packed)


def _shrinks(sample: bytes) -> bool:
    first = sample[:SLICE_BYTES]
    return len(zstd.compress(first, _LEVEL)) < len(first) - len(first) // _WORTH


class Packer:
    """Compresses a response that is sent in parts."""

    __slots__ = ("_packed", "_request", "_sync")

    def __init__(self, request: web.Request, coding: str) -> None:
        self._request = request
        request[SAVED] = 0
        self._packed: Any
        if coding == ZSTD:
            self._packed, self._sync = zstd.ZstdCompressor(_LEVEL), zstd.ZstdCompressor.FLUSH_BLOCK
        else:
            self._packed, self._sync = zlib.compressobj(_LEVEL, wbits=31), zlib.Z_SYNC_FLUSH

    async def parts(self, data: bytes, *, is_flushed: bool = False) -> AsyncIterator[bytes]:
        """Compress `data`. Other requests get a turn in between. With `is_flushed`, flush the
        compressor, so that the client can decode all of `data` at once.
        """
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            if start:
                await asyncio.sleep(0)
            part = view[start : start + SLICE_BYTES]
            packed = self._packed.compress(part)
            self._request[SAVED] += len(part) - len(packed)
            if packed:
                yield packed
        if is_flushed:
            packed = self._packed.flush(self._sync)
            self._request[SAVED] -= len(packed)
            yield packed

    def end(self) -> bytes:
        """Return the last compressed bytes of the response."""
        end: bytes = self._packed.flush()
        return end


def begin(
    request: web.Request,
    room: Room,
    response: web.StreamResponse,
    *,
    size: int | None = None,
    sample: bytes = b"",
) -> Packer | None:
    """Create a compressor for a response whose head is still unsent. Returns None if `size` is
    small, if `sample` (the beginning) does not shrink, or if the budget for responses is used up.
    """
    coding = coding_for(request, room, response)
    if coding is None:
        return None
    needs = not chosen(request.headers[hdrs.ACCEPT_ENCODING])[1]
    is_short = size is not None and size < room.limits.compressed_answer_bytes_min
    if not needs and (is_short or (sample and not _shrinks(sample))):
        return None
    try:
        room.keep(request, _KEPT_BYTES[coding])
    except Overloaded:
        return None
    response.headers[hdrs.CONTENT_ENCODING] = coding
    response.headers.popall(hdrs.CONTENT_LENGTH, None)
    return Packer(request, coding)
