"""Append the items of a stream, in order.

One append at a time keeps the stream's order, whichever gateway is the writer. Items that arrive
during an append form the next append. Fast streams thus make large appends; slow streams don't wait.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from aiohttp import web

from quorumlog.errors import BadRequest, QuorumLogError, RequestTimeout, TooLarge
from quorumlog.net.budget import PEER
from quorumlog.net.responses import REQUEST_ID
from quorumlog.net.timers import awake, awake_timeout
from quorumlog.wire import problems
from services.gateway.edge.http import codings
from services.gateway.edge.http.body import in_turn, send_continue
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, INLINE_BYTES_MAX, Room
from services.gateway.edge.http.media import NDJSON
from services.gateway.edge.http.sending import opened
from services.gateway.interface import EntriesAppended

log = logging.getLogger(__name__)

T = TypeVar("T")
AppendItems = Callable[[Sequence[T], int | None], Awaitable[EntriesAppended]]
"""Appends items to a ledger or log, and returns the acknowledgement. The number, unless None, is
the entry id or offset that the first item must get.
"""

_RUN_BYTES_MAX: Final = 2 << 20
"""Maximum bytes of one append: large for throughput, small for a steady pace (chosen by judgement)."""
_BUFFER_BYTES_MAX: Final = 4 << 20
"""Maximum unacknowledged bytes of a stream. At this limit, the gateway pauses reading."""
_ITEM_BYTES: Final = 64
"""Overhead charged per item, which also bounds the number of empty items in the buffer."""

_LINE_OVERHEAD: Final = 1024
_LINE_WORK: Final = 100
"""CPU overhead of parsing one line, in equivalent bytes of the line."""
_ESCAPED: Final = 6
"""Maximum bytes of JSON per byte of a payload, as in \\u0000."""
ParseLine = Callable[[bytes, int, int], T]
"""Parses a line to an item. Arguments: the line, its number, and a payload's maximum bytes."""


@dataclass(eq=False)
class Pipe(Generic[T]):
    """Appends the items of one stream: entries, or records of a log.

    Invariants: items are appended in the order in which they were queued. After the first error, no
    item is appended. The budget counts items in the buffer, and items that wait for the buffer.
    """

    _append: AppendItems[T]
    _room: Room
    _size: Callable[[T], int]
    """Returns an item's size in bytes."""
    _expect: int | None = None
    """The id or offset that the first item must get."""
    _peer: str = field(default_factory=PEER.get)
    _items: deque[T] = field(default_factory=deque)
    _bytes: int = 0
    _is_finished: bool = False
    _is_over: bool = False
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _drained: asyncio.Event = field(default_factory=asyncio.Event)
    error: QuorumLogError | None = None
    """The error that ended the stream early, if any."""

    async def put(self, items: Sequence[T]) -> None:
        """Queue items to be appended. Waits while the buffer is full. Once the appends have ended,
        further items are dropped. Raises: Overloaded.
        """
        size = sum(map(self._size, items)) + _ITEM_BYTES * len(items)
        # Charge before the wait, because these items are already in memory.
        self._room.bodies.take(self._peer, size)
        try:
            while self._bytes and self._bytes + size > _BUFFER_BYTES_MAX:
                self._drained.clear()
                await self._drained.wait()
            if not self._is_over:
                self._items.extend(items)
                self._bytes += size
                size = 0
        finally:
            self._room.bodies.give(self._peer, size)
        self._filled.set()

    def finish(self, error: QuorumLogError | None = None) -> None:
        """End the stream. Items that are already queued are still appended."""
        if error is not None:
            # The traceback is in a reference cycle with this pipe, and keeps up to 48 MiB of the
            # message alive. The next full garbage collection may be hours away.
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = self.error or error
        self._is_finished = True
        self._filled.set()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """End the stream with the error that the block raises, if any."""
        try:
            yield
        except QuorumLogError as error:
            self.finish(error)
        except (web.RequestPayloadError, ConnectionError):
            self.finish(BadRequest("the body was truncated: resend the unacknowledged items"))
        except Exception:
            log.exception("unhandled-error")
            self.finish(QuorumLogError())

    async def acknowledged(self) -> AsyncGenerator[EntriesAppended, None]:
        """Append items and yield each acknowledgement, until the stream's end or first error."""
        try:
            while True:
                while not self._items:
                    if self._is_finished:
                        return
                    self._filled.clear()
                    await self._filled.wait()
                run = self._take()
                try:
                    appended = await self._append(run, self._expect)
                except QuorumLogError as error:
                    self.error = error
                    return
                if self._expect is not None:
                    # The expected id applies to the whole stream, because a broken stream may still
                    # append here while its client continues in another stream.
                    self._expect = appended.last + 1
                yield appended
        finally:
            self._room.bodies.give(self._peer, self._bytes)
            self._bytes = 0
            self._items.clear()
            self._is_over = True

    def _take(self) -> list[T]:
        """Remove the next run from the buffer. From now on, the engine counts the run's bytes."""
        run: list[T] = []
        size = 0
        while self._items and len(run) < BATCH_ENTRIES_MAX:
            next_bytes = self._size(self._items[0]) + _ITEM_BYTES
            if run and size + next_bytes > _RUN_BYTES_MAX:
                break
            run.append(self._items.popleft())
            size += next_bytes
        self._bytes -= size
        self._room.bodies.give(self._peer, size)
        self._drained.set()
        return run


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run work concurrently with the block, and cancel it when the block ends."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def append_lines(
    request: web.Request, room: Room, pipe: Pipe[T], *, parse: ParseLine[T], names: tuple[str, str]
) -> web.StreamResponse:
    """Append one item per line, and respond with one line per acknowledged run. Each acknowledgement
    covers all earlier runs. `names` are the JSON members for a run's first and last item.
    """
    response: web.StreamResponse | None = None
    async with (
        aclosing(pipe.acknowledged()) as runs,
        beside(_put_lines(request, room, pipe, parse)),
    ):
        async for appended in runs:
            if response is None:
                response = await opened(request, NDJSON)
            await response.write(
                f'{{"{names[0]}":{appended.first},"{names[1]}":{appended.last}}}\n'.encode()
            )
    if response is None:
        if pipe.error is not None:
            raise pipe.error
        response = await opened(request, NDJSON)
    if pipe.error is not None:
        await response.write(problems.to_bytes(pipe.error, request[REQUEST_ID]) + b"\n")
    await response.write_eof()
    return response


async def _put_lines(request: web.Request, room: Room, pipe: Pipe[T], parse: ParseLine[T]) -> None:
    """Parse each line of the body, and put its item into the pipe."""
    number = turn = 0

    def item(line: bytes, _count: int | None) -> T:
        return parse(line, number, room.limits.entry_bytes_max)

    with pipe.failing():
        await send_continue(request)
        async with aclosing(_lines(request, room)) as chunks:
            async for lines in chunks:
                items: list[T] = []
                try:
                    for line in lines:
                        if line and not line.isspace():
                            items.append(await in_turn(request, room, line, item))
                            number += 1
                            turn += len(line) + _LINE_WORK
                        if turn > INLINE_BYTES_MAX:
                            turn = 0
                            await asyncio.sleep(0)
                finally:
                    for start in range(0, len(items), BATCH_ENTRIES_MAX):
                        await pipe.put(items[start : start + BATCH_ENTRIES_MAX])
        pipe.finish()


async def _lines(request: web.Request, room: Room) -> AsyncGenerator[list[bytes], None]:
    """Yield the body's lines in groups that arrived together. An incomplete line is charged."""
    held, peer = 0, PEER.get()
    try:
        async for lines, rest_bytes in _split(request, room):
            room.bodies.give(peer, held)
            held = 0
            room.bodies.take(peer, rest_bytes)
            held = rest_bytes
            if lines:
                yield lines
    finally:
        room.bodies.give(peer, held)


async def _split(request: web.Request, room: Room) -> AsyncIterator[tuple[list[bytes], int]]:
    """Yield complete lines, and the bytes that the incomplete line and the decoder keep in memory.

    A line that has begun has a timeout; a stream may pause longer between lines. The timeouts do not
    count time during which this process was suspended.
    """
    limits, clock, unpacker = room.limits, awake(), codings.unpacker(request)
    line_bytes_max = _ESCAPED * limits.entry_bytes_max + _LINE_OVERHEAD
    rest, deadline, came = bytearray(), clock.time() + limits.stream_idle_s, 0
    while True:
        try:
            async with awake_timeout(deadline - clock.time()):
                chunk = await room.wait(request.content.readany())
        except TimeoutError as error:
            raise RequestTimeout("the next line did not arrive in time: reconnect") from error
        if chunk is None:
            raise RequestTimeout("this gateway is shutting down: continue at another gateway")
        if not chunk:
            if unpacker is not None:
                unpacker.finish()
            if rest:
                yield [bytes(rest)], 0
            return
        came += len(chunk)
        async for part in codings.unpacked(request, unpacker, chunk):
            if unpacker is not None:
                codings.check_expansion(request, came, limits.body_bytes_max)
            *lines, last = part.split(b"\n")
            if lines:
                lines[0] = bytes(rest) + lines[0]
                rest.clear()
            if not last:
                if lines:
                    deadline = clock.time() + limits.stream_idle_s
            elif not rest:
                deadline = clock.time() + limits.body_timeout_s
            else:
                deadline += len(part) / limits.body_rate_bytes_s_min
            rest += last
            if len(rest) > line_bytes_max:
                raise TooLarge(f"a line has more than {line_bytes_max} bytes: send shorter lines")
            yield lines, len(rest) + (0 if unpacker is None else unpacker.kept_bytes)
