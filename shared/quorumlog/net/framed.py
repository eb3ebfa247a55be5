"""A connection of frames (`wire/frames.py`), which began as an HTTP request with an upgrade.

It is received into the messages' own buffers, and all that gathered in one turn of the event loop is sent by one call.
The HTTP protocol of aiohttp that the connection had before stays its owner: it counts the connection, its guard can cut
it, and it learns of its end.
"""

import asyncio
import ctypes
import io
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, Protocol

import aiohttp
from aiohttp import hdrs, web

from quorumlog.errors import BadRequest
from quorumlog.net.connections import is_followed
from quorumlog.net.sessions import ExpectedServer
from quorumlog.wire import frames, problems

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


SEND_BYTES_MAX: Final = 2 * 1024 * 1024
"""What has gathered is written in parts of about this size: between two of them the peer may stop reading."""

_READ_BYTES: Final = 64 * 1024
"""Read at once, of whatever comes. The rest of a message that is larger is read into its own buffer."""
_GOODBYE_S: Final = 1.0
"""How long a peer may take for the rest of what it is sent when its connection ends (taste)."""
_REFUSAL_BYTES: Final = 4096
_NO_TIMEOUT: Final = aiohttp.ClientTimeout()
"""Nor is there one for the connection's life. Whoever connects has a timeout of their own."""


class _Scratch(threading.local):
    """What all connections of a thread's event loop read into: what a read has brought is taken before the next one."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))


_scratch: Final = _Scratch()


class Speaker(Protocol):
    """Who speaks over a connection."""

    def received(self, fields: bytes, run: bytes) -> None:
        """Take a message. Raises: BadFrame."""

    def to_send(self) -> Sequence[bytes]:
        """The next frames to send, of about `SEND_BYTES_MAX`; nothing where there is none."""


class Framed(asyncio.BufferedProtocol):
    """One end of a connection of frames.

    Invariants:
      - `_kept` has what came and is not parsed: less than a frame's head, unless reading is paused;
      - while a message comes (`_fields`, `_run`), `_kept` is empty.
    """

    def __init__(self, speaker: Speaker) -> None:
        """`speaker` is told of messages once the connection is handed over (`take_over`)."""
        self._speaker = speaker
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection has ended: with BadFrame where the peer sent no frames, with OSError where the
        connection broke, and with whatever a defect raised."""
        self._former: asyncio.Protocol | None = None
        self._release: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._kept = b""
        self._fields: InPlace | None = None
        self._run: InPlace | None = None
        self._is_paused = False
        self._is_writing_paused = False
        self._is_flush_due = False
        self._error: Exception | None = None
        self._goodbye: asyncio.TimerHandle | None = None

    def take_over(
        self,
        transport: asyncio.Transport,
        former: asyncio.Protocol,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Speak frames over a connection from now on. `release` is called at its end."""
        self._transport, self._former, self._release = transport, former, release
        # A transport that reads goes on as its former protocol wanted.
        transport.pause_reading()
        transport.set_protocol(self)
        if not self._is_paused:
            transport.resume_reading()
        self.announce()

    def announce(self) -> None:
        """There is something to send: it goes at the end of this turn of the loop, with what else gathers."""
        if not self._is_flush_due and self._transport is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def pause(self) -> None:
        """Read no more for now; TCP slows the peer down."""
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on, what has come already first."""
        if self._is_paused:
            self._is_paused = False
            # Not at once: this may be called while a message is taken.
            self._loop.call_soon(self._read_on)

    def close(self) -> None:
        """End the connection, once what was sent is away."""
        transport = self._transport
        if transport is not None and self._goodbye is None:
            self._goodbye = self._loop.call_later(_GOODBYE_S, transport.abort)
            transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        for piece in (self._fields, self._run):
            if piece is not None and not piece.is_whole:
                return piece.room()
        view, kept = _scratch.view, self._kept
        view[: len(kept)] = kept
        return view[len(kept) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the messages that are complete with these bytes."""
        try:
            for piece in (self._fields, self._run):
                if piece is not None and not piece.is_whole:
                    piece.advance(nbytes)
                    self._take_if_whole()
                    return
            kept, self._kept = len(self._kept), b""
            self._parse(_scratch.view[: kept + nbytes])
        except Exception as error:  # noqa: BLE001  (`closed` tells it)
            self._break(error)

    def pause_writing(self) -> None:
        """The peer does not read, or not as fast."""
        self._is_writing_paused = True
        if self._former is not None:
            self._former.pause_writing()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._is_writing_paused = False
        if self._former is not None:
            self._former.resume_writing()
        self.announce()

    def eof_received(self) -> None:
        """The peer has closed its end: so does this one."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end."""
        self._transport = None
        if self._goodbye is not None:
            self._goodbye.cancel()
        former, self._former = self._former, None
        error = self._error or exc
        if not self.closed.done():
            if error is None:
                self.closed.set_result(None)
            else:
                self.closed.set_exception(error)
        if former is not None:
            former.connection_lost(exc)
            self._release()

    def _break(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self.abort()

    def _parse(self, data: memoryview) -> None:
        """Take the whole messages of some bytes, begin the one that is not whole, and keep a part of a head."""
        at, end = 0, len(data)
        head_size = frames.FRAME_HEAD.size
        while end - at >= head_size and not self._is_paused and self._error is None:
            fields, run = frames.parse_frame_head(bytes(data[at : at + head_size]))
            at += head_size
            middle, stop = at + fields, at + fields + run
            if stop > end:
                self._begin(fields, run, data[at:])
                return
            self._speaker.received(bytes(data[at:middle]), bytes(data[middle:stop]))
            at = stop
        self._kept = bytes(data[at:])

    def _begin(self, fields: int, run: int, data: memoryview) -> None:
        self._fields, self._run = InPlace(fields), InPlace(run)
        self._run.take(data[self._fields.take(data) :])

    def _take_if_whole(self) -> None:
        fields, run = self._fields, self._run
        if fields is not None and run is not None and fields.is_whole and run.is_whole:
            self._fields = self._run = None
            self._speaker.received(fields.value(), run.value())

    def _read_on(self) -> None:
        transport = self._transport
        if self._is_paused or transport is None or self._error is not None:
            return
        try:
            kept, self._kept = self._kept, b""
            self._parse(memoryview(kept))
        except Exception as error:  # noqa: BLE001  (`closed` tells it)
            self._break(error)
        if not self._is_paused:
            transport.resume_reading()

    def _flush(self) -> None:
        self._is_flush_due = False
        try:
            while not self._is_writing_paused:
                transport = self._transport
                if transport is None or transport.is_closing():
                    return
                buffers = self._speaker.to_send()
                if not buffers:
                    return
                transport.writelines(buffers)
        except Exception as error:  # noqa: BLE001  (`closed` tells it)
            self._break(error)


async def accept(
    request: web.Request, speaker: Speaker, name: str
) -> tuple[Framed, web.StreamResponse]:
    """Answer 101 with the protocol's name, and speak frames from then on. Raises: BadRequest, ConnectionError."""
    if is_followed(request):
        raise BadRequest("bytes came behind the request for an upgrade: its answer comes first")
    answer = web.StreamResponse(
        status=HTTPStatus.SWITCHING_PROTOCOLS,
        headers={hdrs.CONNECTION: "Upgrade", hdrs.UPGRADE: name},
    )
    await answer.prepare(request)
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the caller has gone")
    framed = Framed(speaker)
    framed.take_over(transport, request.protocol)
    return framed, answer


class _Tail:
    """What aiohttp has received behind an answer that upgrades the connection."""

    def __init__(self) -> None:
        self.data = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""


async def connect(
    session: aiohttp.ClientSession,
    url: str,
    speaker: Speaker,
    names: Sequence[str],
    expected: ExpectedServer,
) -> Framed:
    """Ask `expected` for an upgrade to one of these protocols, and speak frames from then on. Raises: ClientError, OSError."""
    asked = {hdrs.CONNECTION: "Upgrade", hdrs.UPGRADE: ", ".join(names)}
    response = await session.get(url, headers=asked, timeout=_NO_TIMEOUT, ssl=expected)
    try:
        if response.status != HTTPStatus.SWITCHING_PROTOCOLS:
            body = await response.content.read(_REFUSAL_BYTES)
            why = problems.from_answer(response.status, body).detail
            raise aiohttp.ClientError(f"no upgrade to {', '.join(names)}: {response.status}, {why}")
        return _handed_over(response, speaker, names)
    except BaseException:
        response.close()
        raise


def _handed_over(
    response: aiohttp.ClientResponse, speaker: Speaker, names: Sequence[str]
) -> Framed:
    name, connection = response.headers.get(hdrs.UPGRADE), response.connection
    if name not in names or connection is None:
        raise aiohttp.ClientError(f"an upgrade to {name} where {', '.join(names)} was asked for")
    former, transport, tail = connection.protocol, connection.transport, _Tail()
    if former is None or transport is None or transport.is_closing():
        raise aiohttp.ClientConnectionResetError("the connection has ended")
    former.set_parser(tail, None)
    if tail.data:
        raise aiohttp.ClientError(f"{len(tail.data)} bytes came before anything was asked")
    framed = Framed(speaker)
    framed.take_over(transport, former, response.close)
    return framed
