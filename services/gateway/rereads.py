"""Rows that somebody here rests on, read again after a gap in the news (rule 16a).

A handle or an owner that missed the news of its end would go on where nobody reads any more. The rows
are read from the primary in bulk and in the background, until all are: appends go on meanwhile, since
an open ledger is written without metadata. What a row says is judged by whoever rests on it.
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

_AGAIN_S: Final = 0.5
"""Between two tries while the metadata service is away: each lasts for its client's deadline too."""

_NAMED_MAX: Final = 10


class Rereads(Generic[Key, Head]):
    """The rows that are to be read again. Invariant: a key is wanted until a row was read after
    it had become so.
    """

    def __init__(
        self,
        resting: Callable[[], Iterable[Key]],
        read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]],
        learned: Callable[[Head], None],
    ) -> None:
        """`resting` gives the keys of all rows that matter here; `read` asks the primary, and
        `learned` is told what it says. A row that it does not have says nothing: it is an alarm, and
        what rests on it goes on (rule 18).
        """
        self._resting: Callable[[], Iterable[Key]] = resting
        self._read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]] = read
        self._learned: Callable[[Head], None] = learned
        self._wanted: dict[Key, int] = {}
        """With the number of the request before or during which each became so."""
        self._requests = 0
        self._is_due = asyncio.Event()
        self.gaps = 0
        """So far."""

    @property
    def waiting(self) -> int:
        """How many rows are to be read again."""
        return len(self._wanted)

    def gap(self) -> None:
        """News may have been missed: every row that matters is read again."""
        self.gaps += 1
        for key in self._resting():
            self.want(key)

    def want(self, key: Key) -> None:
        """Read one row again: something was heard of it."""
        self._wanted[key] = self._requests
        self._is_due.set()

    async def run(self) -> None:
        """Read what is wanted, for ever."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._wanted:
                if not await self._read_some():
                    await asyncio.sleep(_AGAIN_S)

    async def _read_some(self) -> bool:
        """One request; False where nobody answered it."""
        asked = sorted(self._wanted)[:HEADS_MAX]
        self._requests += 1
        try:
            heads = await self._read(asked)
            for key in asked:
                if key in heads:
                    self._learned(heads[key])
        except QuorumLogError as error:
            log.warning("rows-not-reread", extra={"rows": len(asked), "error": repr(error)})
            return False
        except Exception:
            # A defect must not end what a gateway can't do without.
            log.exception("rereading-broke")
            return False
        missing = [key for key in asked if key not in heads]
        if missing:
            log.error("rows-missing", extra={"rows": missing[:_NAMED_MAX], "count": len(missing)})
        for key in asked:
            # What has become wanted meanwhile is asked for again: this answer may be older.
            if self._wanted[key] < self._requests:
                del self._wanted[key]
        return True
