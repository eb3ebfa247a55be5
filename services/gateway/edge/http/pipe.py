"""Appends that come in a stream: gathered while one append is in flight, acknowledged in order.

One append at a time keeps the order of the stream, whichever gateway is the writer. Items that come meanwhile
are the next append: a fast stream makes large runs by itself, and a slow one is not held up.
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
"""Append items to a ledger or to a log; returns when they are acknowledged. The number, where there is one, is
the id or offset that the first item must get.
"""

_RUN_BYTES_MAX: Final = 2 << 20
"""One append: large enough for the disks, small enough for a steady rhythm (taste)."""
_BUFFER_BYTES_MAX: Final = 4 << 20
"""How far a stream may be ahead of its acknowledgements before it is read no further."""
_ITEM_BYTES: Final = 64
"""What an item takes besides its own bytes, so that a buffer of empty items has an end too."""

_LINE_OVERHEAD: Final = 1024
_LINE_WORK: Final = 100
"""A line's own work, as bytes of a body."""
_ESCAPED: Final = 6
"""Bytes of JSON for one byte of a payload, at most: \\u0000."""
ParseLine = Callable[[bytes, int, int], T]
"""The item of a line, of its text, its number, and the most bytes that a payload may have."""


class Pipe(Generic[T]):
    """The appends of one stream: of entries, or of a log's records.

    Invariants: items are appended in the order in which they were put; after the first error nothing
    more is appended; the room counts all items in the buffer, and those that wait for a place in it.
    """

    def __init__(
        self,
        append: AppendItems[T],
        room: Room,
        *,
        size: Callable[[T], int],
        expect: int | None = None,
    ) -> None:
        """`size` gives an item's bytes; `expect` is the id or offset that the first item must get."""
        self._append = append
        self._room = room
        self._peer = PEER.get()
        self._size = size
        self._expect = expect
        self._items: deque[T] = deque()
        self._bytes = 0
        self._is_finished = False
        self._is_over = False
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self.error: QuorumLogError | None = None
        """What ended the stream too early."""

    async def put(self, items: Sequence[T]) -> None:
        """Append items in their turn. Waits while the stream is too far ahead; once the appends are over
        the items are dropped.
        """
        size = sum(map(self._size, items)) + _ITEM_BYTES * len(items)
        # Before the wait: these items are in memory already.
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
        """End the stream: all items that were put are still appended."""
        if error is not None:
            # Its frames hold this pipe, in a cycle, and the message that was wrong, up to 16 MiB of it
            # in three forms; the next full collection may be hours away.
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = self.error or error
        self._is_finished = True
        self._filled.set()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """End the stream with the error of a block, if it has one."""
        try:
            yield
        except QuorumLogError as error:
            self.finish(error)
        except (web.RequestPayloadError, ConnectionError):
            self.finish(BadRequest("the stream was cut short"))
        except Exception:
            log.exception("unhandled-error")
            self.finish(QuorumLogError())

    async def acknowledged(self) -> AsyncGenerator[EntriesAppended, None]:
        """Append, and give each acknowledgement; ends with the stream, or at its first error."""
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
                    # The expectation holds for the whole stream: a broken stream may still be appending
                    # here while its client goes on in another one.
                    self._expect = appended.last + 1
                yield appended
        finally:
            self._room.bodies.give(self._peer, self._bytes)
            self._bytes = 0
            self._items.clear()
            self._is_over = True

    def _take(self) -> list[T]:
        """The next run. The room counts its bytes no more: the engine does."""
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
    """Run work beside a block, and end it with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def append_lines(
    request: web.Request, room: Room, pipe: Pipe[T], *, parse: ParseLine[T], names: tuple[str, str]
) -> web.StreamResponse:
    """Append one item a line; answer one line for each acknowledged run, cumulative. `names` are the members
    for a run's first and last item.
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
    """Put the item of each line of the body into the pipe."""
    number = turn = 0

    def item(line: bytes) -> T:
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
    """The lines of a body, as many as come at once. The room counts what has come of the next line.

    Raises: RequestTimeout, TooLarge, Overloaded.
    """
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
    """Whole lines, and how many bytes of what follows are kept: of the next line, and of a decoder.

    A line that has begun must be complete in time; between lines a stream may rest for longer. Both in
    time awake: bytes that came while this process stood still came in time.
    """
    limits, clock, unpacker = room.limits, awake(), codings.unpacker(request)
    line_bytes_max = _ESCAPED * limits.entry_bytes_max + _LINE_OVERHEAD
    rest, deadline, came = bytearray(), clock.time() + limits.stream_idle_s, 0
    while True:
        try:
            async with awake_timeout(deadline - clock.time()):
                chunk = await room.wait(request.content.readany())
        except TimeoutError as error:
            raise RequestTimeout("the next line was not complete in time") from error
        if chunk is None:
            raise RequestTimeout("this gateway is about to end")
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
                raise TooLarge(f"a line of more than {line_bytes_max} bytes")
            yield lines, len(rest) + (0 if unpacker is None else unpacker.kept_bytes)
