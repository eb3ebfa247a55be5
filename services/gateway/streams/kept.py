"""Bodies of catch-up reads, kept for the next reader: what many read from a stream's beginning is read from bookies once.

A page of 1 MiB in records of 64 KiB costs a gateway and its bookies 2.2 ms, and a kept one a quarter of that
(docs/performance.md).
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from quorumlog.protocol.log import LogMetadata
from services.gateway.logs.values import LogValues, Start

KEPT_BYTES_MAX: Final = 64 << 20
"""Of all bodies (taste)."""

_PAGE_BYTES: Final = 1 << 10
"""Of a page in memory besides its body."""

Page = tuple[LogValues, bytes]
"""A page that tells where it begins and ends, and its body."""


class KeptPages:
    """Pages by where they begin; the one that was not asked for longest goes first.

    Invariant: each kept page is full. So neither its records nor its end ever change: records at an offset of one
    creation of a log never do, and only a page with room grows. Who asks shows a row that was read for the request, or
    a moment before: of a log that was deleted, made again or truncated before that, nothing is found.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        """Nothing is kept."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._pages: OrderedDict[tuple[str, str, int], Page] = OrderedDict()

    @property
    def bytes_kept(self) -> int:
        """Of all pages: a length would be taken for their number, and an empty cache for none."""
        return self._bytes

    def find(self, row: LogMetadata, start: Start) -> Page | None:
        """The page that begins at an offset, or at the log's first one."""
        at = row.first_offset if start == "earliest" else start
        if not isinstance(at, int) or at < row.first_offset:
            return None
        key = (row.name, row.created_at, at)
        found = self._pages.get(key)
        if found is not None:
            self._pages.move_to_end(key)
        return found

    def keep(self, row: LogMetadata, page: LogValues, body: bytes) -> None:
        """Keep a page that is full; any other one may change."""
        if not page.is_full:
            return
        key = (row.name, row.created_at, page.first)
        replaced = self._pages.pop(key, None)
        if replaced is not None:
            self._bytes -= _size(replaced)
        self._pages[key] = replace(page, values=()), body  # the body has them
        self._bytes += _size(self._pages[key])
        while self._bytes > self._bytes_max:
            self._bytes -= _size(self._pages.popitem(last=False)[1])


def _size(page: Page) -> int:
    return len(page[1]) + _PAGE_BYTES
