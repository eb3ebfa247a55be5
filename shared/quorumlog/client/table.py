"""A log as a table: the newest record of each key, kept in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Self

from quorumlog.client import checks
from quorumlog.client.records import LogPage, LogRecord, Start
from quorumlog.errors import LogReplaced, OffsetTruncated


class Table:
    """The newest record of each key of a log, for `with` or `async with`. The table follows the
    log. `caught_up` waits until the table has all records that were confirmed before the call.

    The table has no records without a key, no keys whose newest record is a tombstone, and no
    records that the log has released. A record stays in the table after it expires. If an error,
    such as LogReplaced, stops the table from following the log, every method raises that error.
    """

    def __init__(
        self,
        read: Callable[..., Awaitable[LogPage]],
        end: Callable[[], Awaitable[tuple[int, str]]],
        wait_ms: int,
    ) -> None:
        """Use `Log.table` to create a table."""
        self._read, self._end, self._wait_ms = read, end, wait_ms
        self._records: dict[bytes, LogRecord] = {}
        self._first = self._next = 0
        self._created_at: str | None = None
        self._moved = asyncio.Event()
        """An event that is set after each page. A new event then replaces it."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to follow the log."""
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop following. The records stay in memory."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        start: Start = "earliest"
        wait_ms = 0  # otherwise `caught_up` would wait for a first record in an empty log
        while True:
            try:
                page = await self._read(start, wait_ms=wait_ms, created_at=self._created_at)
            except OffsetTruncated as error:
                start, wait_ms = int(error.members["first_offset"]), 0
                continue
            self._take(page)
            start, wait_ms = page.next, self._wait_ms
            if page.closed:
                return

    def _take(self, page: LogPage) -> None:
        for record in page.records:
            if record.is_tombstone:
                self._records.pop(record.key or b"", None)
            elif record.key is not None:
                self._records[record.key] = record
        if page.first_offset > self._first:
            self._first = page.first_offset
            kept = {k: r for k, r in self._records.items() if r.offset >= self._first}
            self._records = kept
        self._next, self._created_at = page.next, page.created_at
        self._moved.set()
        self._moved = asyncio.Event()

    async def caught_up(self) -> None:
        """Wait until the table has all records that were confirmed before this call.

        Raises: LogReplaced if the log was deleted and created again since the table was opened;
        ValueError outside `with` or `async with`.
        """
        _ = self._following()
        end, created_at = await self._end()
        while self._created_at is None or self._next < end or self._created_at != created_at:
            if self._created_at not in (None, created_at):
                raise LogReplaced(f"the log was created again at {created_at}: open a new table")
            moved = asyncio.create_task(self._moved.wait())
            await asyncio.wait((moved, self._following()), return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            self._checked()

    def _following(self) -> asyncio.Task[None]:
        self._checked()
        if self._task is None:
            raise ValueError("the table is not open: use it inside `with` or `async with`")
        return self._task

    def snapshot(self) -> Mapping[bytes, LogRecord]:
        """A copy of the table's records by key."""
        return dict(self._checked())

    def get(self, key: str | bytes) -> LogRecord | None:
        """The newest record of a key; None if the table lacks the key."""
        return self._checked().get(_key(key))

    def __getitem__(self, key: str | bytes) -> LogRecord:
        """The newest record of a key. Raises: KeyError if the table lacks the key."""
        return self._checked()[_key(key)]

    def __contains__(self, key: str | bytes) -> bool:
        """Whether the table has this key."""
        return _key(key) in self._checked()

    def __iter__(self) -> Iterator[bytes]:
        """Iterates over the keys that the table has now."""
        return iter(list(self._checked()))

    def __len__(self) -> int:
        """The number of keys in the table."""
        return len(self._checked())

    def _checked(self) -> dict[bytes, LogRecord]:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()
        return self._records


def _key(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else checks.text("a key", key).encode()
