"""Appends that come in a stream: gathered while one append is in flight, acknowledged in order.

One append at a time keeps the order of the stream, whichever gateway is the writer. Items that come meanwhile
are the next append: a fast stream makes large runs by itself, and a slow one is not held up.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from aiohttp import web

from quorumlog.errors import BadRequest, QuorumLogError
from quorumlog.net.budget import PEER
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.http.room import Room
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
