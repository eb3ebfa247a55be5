"""Lines of history of a database that goes back (rule 18a), as the judge knows them.

What was answered in a lost line stays answered: the judge's books of entries, ends and deletions know
of no lines. Here stands which changes the database lacks, and which rows they made.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.row_copy import RowName, name_of
from tests.model.sim.plan import SECOND
from tests.model.sim.world import Violation

if TYPE_CHECKING:
    from tests.model.sim.services.tables import Tables

TELL_US: Final = 3 * SECOND
"""Who knows better has told by then: once a second each holder presents what it holds."""


class Restores:
    """What the present line lacks."""

    def __init__(self) -> None:
        self.right: Tables | None = None
        """The tables that went, while they may still be put back."""
        self.lost: frozenset[str] = frozenset()
        """Tokens of answered changes that the database lacks, and whose loss nobody accepted."""
        self._rows: dict[tuple[int, RowName], LedgerMetadata] = {}
        self.count = 0
        """How often the database went back."""
        self.since = 0
        """When it went back last."""
        self.knowers: Callable[[int, frozenset[str]], list[str]] = lambda _since, _lost: []
        """Who lives since then, holds one of these tokens, and has had nothing in its way."""

    def made(self, row: LedgerMetadata) -> None:
        """A row of some line, of which bookies may keep a copy."""
        self._rows[row.ledger_id, name_of(row)] = row

    def row_of(self, ledger_id: int, name: RowName) -> LedgerMetadata:
        """The row that a copy is of."""
        return self._rows[ledger_id, name]

    def went_back(self, right: "Tables", older: "Tables", now: int) -> None:
        """Older tables stand in the place of the right ones."""
        self.right, self.since = right, now
        self.lost |= right.attempts.keys() - older.attempts.keys()
        self.count += 1

    def settled(self, present: Iterable[str]) -> None:
        """An operator decided; `present`: the tokens that the database has now."""
        self.right = None
        self.lost -= set(present)

    def changed(self, what: str, now: int, *, is_known: bool) -> None:
        """Something was changed though the database lacks changes. Raises: Violation if that was known."""
        if is_known:
            raise Violation(f"rule 18a: the database went back, that was known, and yet {what}")
        late = self.right is not None and now - self.since > TELL_US
        if late and (names := self.knowers(self.since, self.lost)):
            raise Violation(f"rule 18a: {names} know that the database went back, yet {what}")
