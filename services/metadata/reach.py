"""Whether a server that the service needs is within reach, and the log's lines about that: one for each change."""

import logging

log = logging.getLogger(__name__)


class Reach:
    """Of one server. Invariant: its log line about an outage has the error's text, and so has one about another error."""

    def __init__(self, *, away: str, there: str, deadline_s: float) -> None:
        """`away` and `there`: the events' names."""
        self._away, self._there, self._deadline_s = away, there, deadline_s
        self._told: str | None = None
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
        if text != self._told:
            log.warning(self._away, extra={"error": text})
        self._told = text

    def found(self) -> None:
        """A query was answered."""
        if self.is_up:
            return
        log.info(self._there)
        self.is_up, self._told = True, None
