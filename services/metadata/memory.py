"""What this process knows that the database must contain (rule 18a). No IO.

The database's history is a line: a change whose own transaction saw tokens there was committed after
them, and its token stands for them. So few tokens are held: those of changes that were under way at
once, and those that others have presented since the last change.
Nothing is compared by magnitude: a restored database catches up with every counter.
"""

import logging
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import DatabaseWentBack
from quorumlog.wire.witnesses import token_of, witness_of

log = logging.getLogger(__name__)

_MISSING_MAX: Final = 1000
"""Remembered of what the database lacks: one is enough to stop everything (taste)."""


@dataclass(slots=True)
class Presented:
    """What a request presents, and what its answer hands back once the database contained it."""

    witnesses: tuple[str, ...]
    holder: str
    answer: tuple[str, ...] | None = None


PRESENTED: Final[ContextVar[Presented | None]] = ContextVar("presented", default=None)
"""Of the request that is being handled; None in background work."""


class Memory:
    """The tokens of one process.

    Invariant: a token is let go of only for the token of a change that was committed by a
    transaction which saw it in the database.
    """

    def __init__(self) -> None:
        self.cluster_id = ""
        """Of the database as it was opened: another cluster's witnesses count for nothing."""
        self._held: dict[str, None] = {}
        self._missing: dict[str, str] = {}
        """What the database lacked when it was looked at last, and who told of it."""

    @property
    def missing(self) -> dict[str, str]:
        """What the database lacks, and who told of it; empty while all is well."""
        return dict(self._missing)

    @property
    def wanted(self) -> set[str]:
        """Tokens that the database must contain."""
        return {*self._held, *self._missing}

    @property
    def witnesses(self) -> tuple[str, ...]:
        """What others may hold on to: it stands for all that this process knows of."""
        return tuple(witness_of(self.cluster_id, token) for token in self._held)

    def answered(self, token: str, seen: Iterable[str]) -> None:
        """A change was committed, whose transaction saw these tokens."""
        for known in seen:
            self._held.pop(known, None)
        self._held[token] = None

    def presented(self, presented: Presented | None) -> tuple[str, ...]:
        """The tokens that a request presents. Raises: DatabaseWentBack for another cluster's."""
        if presented is None:
            return ()
        tokens = []
        for witness in presented.witnesses:
            token = token_of(self.cluster_id, witness)
            if token is None:
                raise DatabaseWentBack(
                    f"the witness {witness} is damaged or of another cluster than this one"
                    f" ({self.cluster_id})"
                )
            tokens.append(token)
        return tuple(tokens)

    def compare(self, wanted: Collection[str], found: Iterable[str], *, holder: str) -> None:
        """The database was looked at for tokens. Raises: DatabaseWentBack if it lacks one."""
        there = set(found)
        lacking = sorted(set(wanted) - there)
        for token in lacking:
            if token not in self._missing and len(self._missing) < _MISSING_MAX:
                who = "this process" if token in self._held else holder
                self._missing[token] = who
                log.error("database-went-back", extra={"witness": token, "holder": who})
            self._held.pop(token, None)
        back = [token for token in self._missing if token in there]
        for token in back:
            del self._missing[token]
        if back and not self._missing:
            log.warning("database-is-back", extra={"witnesses": len(back)})
        self._held |= dict.fromkeys(token for token in wanted if token in there)
        if lacking:
            raise self.error(lacking)

    def error(self, lacking: Collection[str]) -> DatabaseWentBack:
        """What is answered while the database lacks these."""
        first = min(lacking)
        return DatabaseWentBack(
            f"the database lacks {len(lacking)} changes that it had answered, {first} among them"
            f" (told by {self._missing.get(first, 'somebody')}). Nothing is changed or deleted until"
            " the right database is back, or an operator accepts the loss: see the runbook",
            witnesses=[witness_of(self.cluster_id, token) for token in sorted(lacking)[:10]],
        )
