"""A connection that was upgraded from HTTP and carries frames (`wire/frames.py`).

A large message is read directly into its own buffer, and one call sends all frames of a turn of the
event loop. aiohttp's protocol object still owns the connection: it counts the connection, is
notified of its end, and can abort it through its guard.
"""

import asyncio
import ctypes
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

# Python's C API permits writes to a new `bytes` object until other code gets the object.
_blank: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""`_blank(None, size)` returns `bytes` with uninitialized content. Raises: MemoryError."""
_address: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)
_view: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE: Final = 0x200


class InPlace:
    """Immutable bytes of a known size, filled piece by piece and never copied.

    Unlike `bytes(size)`, the buffer is not filled with zeros. So even if the peer announces a large
    size, the system commits memory only as bytes arrive. Uninitialized memory is never returned,
    because `value` requires `is_whole`.

    Invariant: a view from `room` is used only while this object, which owns its memory, exists.
    """

    __slots__ = ("_at", "_data", "_view")

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes without content. Raises: MemoryError."""
        self._data: bytes = _blank(None, size)
        self._view: memoryview = _view(_address(self._data), size, _WRITABLE)
        self._at = 0

    def room(self) -> memoryview:
        """The unfilled part of the buffer."""
        return self._view[self._at :]

    def advance(self, count: int) -> None:
        """Record that `count` bytes were written to `room`."""
        self._at += count

    def take(self, data: memoryview) -> int:
        """Copy as many bytes of `data` as fit, and return their number."""
        count = min(len(data), len(self._view) - self._at)
        self._view[self._at : self._at + count] = data[:count]
        self._at += count
        return count

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self._at == len(self._view)

    def value(self) -> bytes:
        """The received bytes, once the buffer is whole."""
        assert self.is_whole
        return self._data


SEND_BYTES_MAX: Final = 2 * 1024 * 1024
"""Approximate size of one write, so that a slow peer can pause the writing."""

_READ_BYTES: Final = 64 * 1024
"""Maximum size of one read. The rest of a larger message is read directly into its buffer."""
_GOODBYE_S: Final = 1.0
"""Time for the peer to read the remaining bytes before a connection closes (by judgement)."""
_REFUSAL_BYTES: Final = 4096
_NO_TIMEOUT: Final = aiohttp.ClientTimeout()
"""No timeout for the upgrade or the connection, because callers of `connect` set their own."""


class _Scratch(threading.local):
    """A read buffer shared by a thread's connections: each read is processed before the next."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))


_scratch: Final = _Scratch()


class Speaker(Protocol):
    """The user of a connection, which processes received messages and supplies frames to send."""

    def received(self, fields: bytes, run: bytes) -> None:
        """Process a message. Raises: BadFrame."""

    def to_send(self) -> Sequence[bytes]:
        """The next frames to send, of about `SEND_BYTES_MAX` in total; empty if there are none."""


class Framed(asyncio.BufferedProtocol):
    """One end of a connection of frames.

    Invariants:
      - `_kept` has unparsed bytes, fewer than a frame's head, unless reading is paused;
      - while a message is being received (`_fields`, `_run`), `_kept` is empty.
    """

    def __init__(self, speaker: Speaker) -> None:
        """`speaker`: gets messages after the call of `take_over`."""
        self._speaker = speaker
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection has ended. The exception is BadFrame if the peer sent an invalid
        frame, OSError if the connection broke, or the exception of a defect."""
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
        """Exchange frames over `transport` from now on, and call `release` when it has closed."""
        self._transport, self._former, self._release = transport, former, release
        # A transport that is already reading would continue in the mode of its former protocol.
        transport.pause_reading()
        transport.set_protocol(self)
        if not self._is_paused:
            transport.resume_reading()
        self.announce()

    def announce(self) -> None:
        """Send the frames of `speaker` at the end of this turn of the event loop."""
        if not self._is_flush_due and self._transport is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def pause(self) -> None:
        """Stop reading for now; TCP then slows the peer down."""
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue reading; bytes that have already arrived are parsed first."""
        if self._is_paused:
            self._is_paused = False
            # Parse the bytes later, because `resume` may be called while a message is being processed.
            self._loop.call_soon(self._read_on)

    def close(self) -> None:
        """End the connection once all queued bytes are written, within `_GOODBYE_S`."""
        transport = self._transport
        if transport is not None and self._goodbye is None:
            self._goodbye = self._loop.call_later(_GOODBYE_S, transport.abort)
            transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """The memory for the next read."""
        for piece in (self._fields, self._run):
            if piece is not None and not piece.is_whole:
                return piece.room()
        view, kept = _scratch.view, self._kept
        view[: len(kept)] = kept
        return view[len(kept) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the messages that are complete with the `nbytes` new bytes."""
        try:
            for piece in (self._fields, self._run):
                if piece is not None and not piece.is_whole:
                    piece.advance(nbytes)
                    self._take_if_whole()
                    return
            kept, self._kept = len(self._kept), b""
            self._parse(_scratch.view[: kept + nbytes])
        except Exception as error:  # noqa: BLE001  (`closed` reports it)
            self._break(error)

    def pause_writing(self) -> None:
        """Stop sending, because the peer reads too slowly, or not at all."""
        self._is_writing_paused = True
        if self._former is not None:
            self._former.pause_writing()

    def resume_writing(self) -> None:
        """Continue sending, because the peer has caught up."""
        self._is_writing_paused = False
        if self._former is not None:
            self._former.resume_writing()
        self.announce()

    def eof_received(self) -> None:
        """Close this end, because the peer has closed its end."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete `closed`, and notify the former protocol."""
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
        """Process complete messages in `data`, begin an incomplete one, and keep a partial head."""
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
        except Exception as error:  # noqa: BLE001  (`closed` reports it)
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
        except Exception as error:  # noqa: BLE001  (`closed` reports it)
            self._break(error)


async def accept(
    request: web.Request, speaker: Speaker, name: str
) -> tuple[Framed, web.StreamResponse]:
    """Upgrade the connection to the protocol `name`. Raises: BadRequest, ConnectionError."""
    if is_followed(request):
        raise BadRequest(
            "bytes follow the request for an upgrade: send them only after the response 101"
        )
    answer = web.StreamResponse(
        status=HTTPStatus.SWITCHING_PROTOCOLS,
        headers={hdrs.CONNECTION: "Upgrade", hdrs.UPGRADE: name},
    )
    await answer.prepare(request)
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the caller has disconnected")
    framed = Framed(speaker)
    framed.take_over(transport, request.protocol)
    return framed, answer


class _Tail:
    """Collects bytes that aiohttp received after the response 101."""

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
    """Upgrade a new connection to one of the protocols `names`. Raises: ClientError, OSError."""
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
        raise aiohttp.ClientError(f"the peer upgraded to {name}, not to {', '.join(names)}")
    former, transport, tail = connection.protocol, connection.transport, _Tail()
    if former is None or transport is None or transport.is_closing():
        raise aiohttp.ClientConnectionResetError("the connection has ended")
    former.set_parser(tail, None)
    if tail.data:
        raise aiohttp.ClientError(f"the peer sent {len(tail.data)} bytes before the first request")
    framed = Framed(speaker)
    framed.take_over(transport, former, response.close)
    return framed
