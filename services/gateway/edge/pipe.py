"""Appends that come in a stream: gathered while one append is in flight, acknowledged in order.

One append at a time keeps the order of the stream, whoever the writer is; what comes meanwhile is
the next one, so a fast stream makes large runs by itself and a slow one is not held up.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from quorumlog.errors import QuorumLogError
from quorumlog.net.budget import PEER
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.room import Room
from services.gateway.interface import Appended

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_RUN_BYTES_MAX: Final = 2 << 20
"""What one append takes: large enough for the disks, small enough for a steady rhythm (taste)."""
_BUFFER_BYTES_MAX: Final = 4 << 20
"""What a stream may be ahead of its acknowledgements; then it is read no further."""


class Append(Protocol[T_contra]):
    """Where a stream's appends go: a ledger, or a log."""

    async def __call__(self, items: Sequence[T_contra], /, *, expect: int | None) -> Appended:
        """Append items; returns when they are acknowledged."""
        ...


_ITEM_BYTES: Final = 64
"""What an item takes besides its own bytes, so that a buffer of empty ones has an end too."""


class Pipe(Generic[T]):
    """The appends of one stream: of entries, or of a log's records.

    Invariants: entries are appended in the order in which they were put; after the first error
    nothing more is appended; what is in the buffer, or waits for it, is counted in the room.
    """

    def __init__(
        self,
        append: Append[T],
        room: Room,
        *,
        size: Callable[[T], int],
        expect: int | None = None,
    ) -> None:
        """`size` tells an item's bytes; `expect` what the first one must get."""
        self._append = append
        self._room = room
        self._peer = PEER.get()
        self._size = size
        self._expect = expect
        self._items: deque[T] = deque()
        self._bytes = 0
        self._is_finished = False
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self.error: QuorumLogError | None = None
        """Why the stream ended, where it did not end by itself."""

    async def put(self, items: Sequence[T]) -> None:
        """Append these in their turn. Waits while the stream is too far ahead."""
        size = sum(map(self._size, items)) + _ITEM_BYTES * len(items)
        # Before the wait: these items are in memory already.
        self._room.bodies.take(self._peer, size)
        try:
            while self._bytes and self._bytes + size > _BUFFER_BYTES_MAX:
                self._drained.clear()
                await self._drained.wait()
        except asyncio.CancelledError:
            self._room.bodies.give(self._peer, size)
            raise
        self._items.extend(items)
        self._bytes += size
        self._filled.set()

    def finish(self, error: QuorumLogError | None = None) -> None:
        """Nothing more comes; what was put is still appended."""
        if error is not None:
            # Its frames hold this pipe, in a cycle, and the message that was wrong, up to 16 MiB of it
            # in three forms; the next full collection may be hours away.
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = self.error or error
        self._is_finished = True
        self._filled.set()

    async def acknowledged(self) -> AsyncIterator[Appended]:
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
                    appended = await self._append(run, expect=self._expect)
                except QuorumLogError as error:
                    self.error = error
                    return
                if self._expect is not None:
                    # What a client expects of a stream holds for all of it: one that broke may
                    # still be appending here while its client goes on in another.
                    self._expect = appended.last + 1
                yield appended
        finally:
            self._room.bodies.give(self._peer, self._bytes)
            self._bytes = 0
            self._items.clear()

    def _take(self) -> list[T]:
        """The next run; its bytes count no more, they are the engine's now."""
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
