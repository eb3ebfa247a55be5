"""Content codings (RFC 9110, 8.4) of request bodies and responses (docs/guides/http.md, Compression).

A few bytes may unpack to gigabytes. So no body is unpacked whole: `Unpacker` gives pieces of a bounded size, and
whoever takes a piece counts it against its bounds before the next one is made.

Responses to reads are compressed if they are long enough and of a form that shrinks. Never: the responses about tokens and
tickets (what a page chose beside a secret would reveal the secret by its length), responses with an ETag (another coding
is another representation, RFC 9110, 8.8.3, and this one is for `If-Match`), events (each would need a flush of its own,
and each idle tail a compressor), and errors.
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
        self._new: Callable[[], _Gzip | zstd.ZstdDecompressor] = (
            partial(zstd.ZstdDecompressor, options=_ZSTD_OPTIONS) if is_zstd else _Gzip
        )
        self._window = WINDOW_BYTES_MAX if is_zstd else _GZIP_BACK_BYTES
        self._decoder: _Gzip | zstd.ZstdDecompressor | None = None
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
                raise BadRequest(f"the body is not {self.coding}, or damaged: {error}") from error
            chunk = b""
            if decoder.eof:
                chunk, self._decoder = decoder.unused_data, None

    def finish(self) -> None:
        """The body has ended. Raises: BadRequest where a part of it is missing. No bytes at all are no body."""
        if self._decoder is not None:
            raise BadRequest(f"the body is cut short: its {self.coding} does not end")


async def unpacked(
    request: web.Request, unpacker: Unpacker | None, chunk: bytes
) -> AsyncGenerator[bytes, None]:
    """What a chunk of a request's body unpacks to, piece by piece, counted in `UNPACKED` before it is given. Others
    have their turn in between. Without an unpacker the chunk as it is. Raises: BadRequest.
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
    """Raise TooLarge where a body unpacks to far more than a sender of such a body would have sent: each byte that came
    must pay for the work on what it unpacks to, beyond the first ones.
    """
    if request[UNPACKED] > first_bytes + _EXPANSION_MAX * came:
        raise TooLarge(
            f"the body unpacks to more than {_EXPANSION_MAX} times what came, and {first_bytes} bytes"
        )


class _Gzip:
    """Unpacks a member of gzip as `ZstdDecompressor` unpacks a frame, whose interface zlib lacks."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """A piece of what is left and `data` unpack to. Raises: zlib.error."""
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
"""Compressed at once: a third of a millisecond (docs/performance.md), after which others have their turn."""

PACKS: Final = web.RequestKey("packs_answers", bool)
"""True for requests of clients: the cluster's own processes are near, and ask for nothing that they have to unpack."""

_FORMS: Final = frozenset((JSON, NDJSON, FRAMES, ARROW, OCTETS, HTML, "text/plain"))
_SECRET: Final = ("/v1/tokens", "/v1/tickets")
_LEVEL: Final = 1
"""Of both codings: the next ones take half as much CPU again for a tenth fewer bytes (docs/performance.md)."""
_IDENTITY: Final = "identity"
_WORTH: Final = 8
"""A slice that shrinks by less than one part of so many is no reason to compress what follows."""
_KEPT_BYTES: Final = {GZIP: 256 << 10, ZSTD: 1 << 20}
"""What a compressor keeps (measured)."""


def coding_for(request: web.Request, room: Room, response: web.StreamResponse) -> str | None:
    """The coding of an answer whose length does not matter; None: as it is. Notes that the answer depends on it."""
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
    """The coding that a client likes best, None for none, and whether an answer may also come as it is (RFC 9110, 12.5.3).

    A coding that the client does not name is not chosen for its `*`, unless it refuses answers as they are. A client
    that takes nothing of ours gets answers as they are: it may know what to do with them.
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
    """Compress an answer that is short enough to be compressed at once, where it shrinks."""
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
    """Compresses an answer that is sent part by part."""

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
        """What `data` adds to the answer; others have their turn in between. `is_flushed`: all of it, so that the
        client can read it before more comes.
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
        """What ends the answer."""
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
    """What compresses an answer whose head is not sent yet; None where it goes as it is: so does one of too few
    bytes (`size`, where it is known), one whose beginning, the `sample`, does not shrink, and one for whose compressor
    there is no room.
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
