"""Reread the rows on which this process relies, after a gap in the stream of changes (rule 16a).

A write handle or a log's owner that missed the change by which it was superseded would go on writing to a
ledger or log that nobody reads any more. All rows are read from the primary, in bulk and in the background.
Appends go on meanwhile, since writing an open ledger needs no metadata. The handle or owner judges its row.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from quorumlog.errors import QuorumLogError
from quorumlog.wire.bodies import HEADS_MAX

log = logging.getLogger(__name__)

Key = TypeVar("Key", int, str)
Head = TypeVar("Head")

_RETRY_S: Final = 0.5
"""Pause between tries without metadata; each try also takes its client's deadline."""

_LOGGED_MAX: Final = 10


class Rereads(Generic[Key, Head]):
    """The rows to reread. Invariant: a key stays wanted until its row was read by a request that began after
    the key became wanted.
    """

    def __init__(
        self,
        live_keys: Callable[[], Iterable[Key]],
        read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]],
        apply: Callable[[Head], None],
    ) -> None:
        """`live_keys` gives the keys of all rows on which this process relies; `read` asks the primary,
        and `apply` gets each row. A missing row is logged as an error and proves nothing: its handle or owner goes
        on (rule 18).
        """
        self._live_keys: Callable[[], Iterable[Key]] = live_keys
        self._read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]] = read
        self._apply: Callable[[Head], None] = apply
        self._wanted: dict[Key, int] = {}
        """Each key with the number of the request before or during which it became wanted."""
        self._requests = 0
        self._is_due = asyncio.Event()
        self.gaps = 0
        """Gaps in the stream of changes so far."""

    @property
    def waiting(self) -> int:
        """Rows to reread."""
        return len(self._wanted)

    def gap(self) -> None:
        """Reread every row: changes may have been missed."""
        self.gaps += 1
        for key in self._live_keys():
            self.want(key)

    def want(self, key: Key) -> None:
        """Reread one row."""
        self._wanted[key] = self._requests
        self._is_due.set()

    async def run(self) -> None:
        """Reread wanted rows for ever."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._wanted:
                if not await self._read_some():
                    await asyncio.sleep(_RETRY_S)

    async def _read_some(self) -> bool:
        """Send one request; False if it failed."""
        asked = sorted(self._wanted)[:HEADS_MAX]
        self._requests += 1
        try:
            heads = await self._read(asked)
            for key in asked:
                if key in heads:
                    self._apply(heads[key])
        except QuorumLogError as error:
            log.warning("rows-not-reread", extra={"rows": len(asked), "error": repr(error)})
            return False
        except Exception:
            # A bug must not end a task that the gateway depends on.
            log.exception("rereading-broke")
            return False
        missing = [key for key in asked if key not in heads]
        if missing:
            log.error("rows-missing", extra={"rows": missing[:_LOGGED_MAX], "count": len(missing)})
        for key in asked:
            # A key that became wanted meanwhile stays: this answer may be older.
            if self._wanted[key] < self._requests:
                del self._wanted[key]
        return True
