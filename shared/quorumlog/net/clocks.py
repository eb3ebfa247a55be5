"""The database's clock as this process hears it: judged by `protocol/clock.py`, with a log line for each change of mind."""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Final

from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S, DatabaseClock

log = logging.getLogger(__name__)

CLOCK_SETTING: Final = (
    "if the database's clock jumps by more than this, or differs by more from this machine's clock, nothing is deleted by"
    " age (docs/guides/database.md)"
)


class HeardClock:
    """The clock of one database, in one process."""

    def __init__(self, difference_s: float = CLOCK_DIFFERENCE_S) -> None:
        self._clock = DatabaseClock(difference_s)
        self._is_doubted = False
        """By the last line of the log."""

    @property
    def doubt(self) -> str:
        """Why nothing may be deleted by age; empty: it may (rule 26c)."""
        return self._clock.doubt

    def hear(self, database_ms: float) -> str:
        """Take a time that the database told just now, and return `doubt`."""
        monotonic_s = asyncio.get_running_loop().time()
        wall_ms = datetime.now(UTC).timestamp() * 1000
        doubt = self._clock.hear(database_ms, wall_ms=wall_ms, monotonic_s=monotonic_s)
        if bool(doubt) != self._is_doubted:
            self._is_doubted = bool(doubt)
            event = "clock-doubted" if doubt else "clock-trusted"
            log.warning(event, extra={"database_ms": int(database_ms), "why": doubt})
        return doubt

    def now_ms(self) -> int | None:
        """The database's time now as it was before it jumped; None before the first one was heard."""
        return self._clock.now_ms(asyncio.get_running_loop().time())
