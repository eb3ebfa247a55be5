"""A database that goes back (rule 18a): older tables stand in the right ones' place for a while.

The judge's own books are those of the right line of history. Here stands what it knows of the other
one: which changes are lost there, and whether the service was told.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from tests.sim.plan import SECOND
from tests.sim.world import Violation

if TYPE_CHECKING:
    from tests.sim.services.tables import Tables

TELL_US: Final = 3 * SECOND
"""Who knows better has told by then: once a second each holder presents what it holds."""


class Restores:
    """What was saved of the tables, and which of them are in place."""

    def __init__(self) -> None:
        self._saved: list[Tables] = []
        self._right: Tables | None = None
        """The right tables, while older ones are in their place."""
        self._heard: set[str] = set()
        """Tokens that the service's process has answered or was presented, since it began."""
        self._since = 0
        """When older tables were put in place, or the process over them began."""
        self.lost: frozenset[str] = frozenset()
        """Tokens of answered changes that the older tables lack."""
        self.limit: str | None = None
        """What went by the older tables before anybody could know: the run says no more then.
        ADR 12, "Consequences": what was answered last, to processes that died or are cut off before
        anybody else heard of it, is not known.
        """
        self.knowers: Callable[[int, frozenset[str]], list[str]] = lambda _since, _lost: []
        """Who lives since then, holds one of these tokens, and has had nothing in its way."""

    @property
    def is_back(self) -> bool:
        """Whether older tables are in place."""
        return self._right is not None

    def save(self, tables: "Tables") -> None:
        """A backup. One that is made of older tables is none of the right line."""
        if not self.is_back:
            self._saved.append(tables.copy())

    def go_back(
        self, tables: "Tables", which: int, now: int, *, is_new_process: bool
    ) -> "Tables | None":
        """Older tables to be put in the place of these; None where nothing would be lost by any."""
        old = [saved for saved in self._saved if tables.attempts.keys() - saved.attempts.keys()]
        if self.is_back or not old:
            return None
        older = old[which % len(old)].copy()
        self._right, self._since = tables, now
        self.lost = frozenset(tables.attempts.keys() - older.attempts.keys())
        if is_new_process:
            self._heard.clear()
        return older

    def put_back(self) -> "Tables":
        """The right tables."""
        assert self._right is not None
        right, self._right, self.lost = self._right, None, frozenset()
        return right

    def heard(self, tokens: Iterable[str]) -> None:
        """The service's process answered these, or looked for them."""
        self._heard.update(tokens)

    def went_by(self, what: str, now: int, *, is_known: bool = False) -> None:
        """Something was done by older tables that is wrong by the right ones; `is_known`: to one whose own
        disk knew better. Raises: Violation, unless nobody could know.
        """
        if is_known or self._heard & self.lost:
            raise Violation(f"rule 18a: the database went back, that was known, and yet {what}")
        names = self.knowers(self._since, self.lost) if now - self._since > TELL_US else []
        if names:
            raise Violation(f"rule 18a: {names} know that the database went back, yet {what}")
        self.limit = (
            self.limit or f"{what}, {(now - self._since) / SECOND:.1f} s after it went back"
        )
