"""Rows of logs, as reads of this process have them."""

import asyncio
from typing import Final

from quorumlog.protocol.log import LogMetadata
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.values import STREAM_PREFIX

_ROWS_MAX: Final = 2000
"""Rows that are kept for reads within sealed ledgers."""

RECENT_S: Final = 0.2
"""For how long an answer of metadata serves the next pages of who reads on: a hundred pages and more. A deletion or
truncation by another gateway may stay invisible for this long (chosen by judgement, ADR 45 and 48).
"""


class LogRows:
    """Rows from the primary, and those that were read before."""

    def __init__(self, store: MetadataLogs) -> None:
        """No row is kept yet."""
        self._store = store
        self._clock = asyncio.get_running_loop().time
        self._rows: dict[str, tuple[LogMetadata, float]] = {}
        """With the time at which each was asked for."""
        self._changes = 0

    async def row(self, name: str) -> LogMetadata:
        """The row from the primary. Raises: NoSuchLog, MetadataUnavailable."""
        at_s, changes = self._clock(), self._changes
        try:
            row = await self._store.get(name)
        except Exception:
            self._rows.pop(name, None)
            raise
        if changes == self._changes:  # else the row may be that of before
            self._rows.pop(name, None)
            self._rows[name] = row, at_s
            if len(self._rows) > _ROWS_MAX:
                del self._rows[next(iter(self._rows))]
        return row

    def recent(self, name: str) -> LogMetadata | None:
        """A row that was asked for within RECENT_S, and that this process has not changed since."""
        row, at_s = self._rows.get(name, (None, 0.0))
        return row if self._clock() - at_s <= RECENT_S else None

    def known(self, name: str) -> LogMetadata | None:
        """A row from before, of a log whose ledgers are gone when the log is: a reader of the old row finds that out. A
        stream's may live on in its forks, or in what it is a fork of, while its name is another stream's (rule 27a).
        """
        return None if name.startswith(STREAM_PREFIX) else self._rows.get(name, (None,))[0]

    def changed(self, name: str) -> None:
        """This process has changed the row or deleted it: who asks here from now on is told so, also by an answer of the
        primary that is under way.
        """
        self._rows.pop(name, None)
        self._changes += 1
