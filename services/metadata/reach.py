"""Whether a server that the service needs is within reach, and the log's lines about that: one for each change."""

import logging
from typing import Final

log = logging.getLogger(__name__)

_LINES_OF_OUTAGE: Final = 10
"""Errors of one outage that are logged: each query fails with one (taste)."""


class Reach:
    """Of one server. Invariant: the log has each error's text once in an outage, that of the first ones."""

    def __init__(self, *, away: str, there: str, deadline_s: float) -> None:
        """`away` and `there`: the events' names."""
        self._away, self._there, self._deadline_s = away, there, deadline_s
        self._told: set[str] = set()
        self.is_up = False
        """Whether the last query reached the server."""

    def lost(self, error: BaseException) -> None:
        """A query failed."""
        is_late = isinstance(error, TimeoutError) and not str(error)
        # redis-py's errors have no text in their repr.
        text = f"{type(error).__name__}: {error}"
        if is_late:
            text = f"no answer within {self._deadline_s:g} s"
        self.is_up = False
        if text not in self._told and len(self._told) < _LINES_OF_OUTAGE:
            self._told.add(text)
            log.warning(self._away, extra={"error": text})

    def found(self) -> None:
        """A query was answered."""
        if self.is_up:
            return
        log.info(self._there)
        self.is_up = True
        self._told.clear()
