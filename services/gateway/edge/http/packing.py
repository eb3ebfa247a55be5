"""Content codings of answers: which answer is compressed for whom, and how (docs/guides/http.md, Compression).

Compressed are answers to reads that are long enough and of a form that shrinks. Never: the answers about tokens and
tickets (what a page chose beside a secret would tell the secret by its length), answers with an ETag (another coding
is another representation, RFC 9110, 8.8.3, and this one is for `If-Match`), events (each would need a flush of its own,
and each idle tail a compressor), and errors.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from functools import lru_cache, partial
from typing import Final

from aiohttp import hdrs, web

from quorumlog.errors import Overloaded
from quorumlog.net.operations import JSON
from quorumlog.zstd import zstd
from services.gateway.edge.http.codings import CODINGS, GZIP, SAVED, ZSTD
from services.gateway.edge.http.media import ARROW, FRAMES, HTML, NDJSON, OCTETS, weighted
from services.gateway.edge.http.room import Room

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
    packed = _whole(coding, body)
    if len(packed) < len(body) or needs:
        response.body = packed
        response.headers[hdrs.CONTENT_ENCODING] = coding
        request[SAVED] = len(body) - len(packed)


def _whole(coding: str, data: bytes) -> bytes:
    return zstd.compress(data, _LEVEL) if coding == ZSTD else zlib.compress(data, _LEVEL, 31)


def _shrinks(sample: bytes) -> bool:
    first = sample[:SLICE_BYTES]
    return len(zstd.compress(first, _LEVEL)) < len(first) - len(first) // _WORTH


class Packer:
    """Compresses an answer that is sent part by part."""

    __slots__ = ("_compress", "_end", "_flush", "_request")

    def __init__(self, request: web.Request, coding: str) -> None:
        self._request = request
        request[SAVED] = 0
        self._compress: Callable[[memoryview], bytes]
        self._flush: Callable[[], bytes]
        self._end: Callable[[], bytes]
        if coding == ZSTD:
            packed = zstd.ZstdCompressor(_LEVEL)
            self._compress = packed.compress
            self._flush = partial(packed.flush, packed.FLUSH_BLOCK)
            self._end = packed.flush
        else:
            zipped = zlib.compressobj(_LEVEL, wbits=31)
            self._compress = zipped.compress
            self._flush = partial(zipped.flush, zlib.Z_SYNC_FLUSH)
            self._end = zipped.flush

    async def parts(self, data: bytes, *, is_flushed: bool = False) -> AsyncIterator[bytes]:
        """What `data` adds to the answer; others have their turn in between. `is_flushed`: all of it, so that the
        client can read it before more comes.
        """
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            if start:
                await asyncio.sleep(0)
            part = view[start : start + SLICE_BYTES]
            packed = self._compress(part)
            self._request[SAVED] += len(part) - len(packed)
            if packed:
                yield packed
        if is_flushed:
            packed = self._flush()
            self._request[SAVED] -= len(packed)
            yield packed

    def end(self) -> bytes:
        """What ends the answer."""
        return self._end()


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
