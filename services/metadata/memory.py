"""Tokens of changes that the database must contain, as far as this process knows (rule 18a). This
module does no IO.

The database's history is linear. A change whose transaction saw some tokens was committed after
these tokens, so the change's token replaces them. Therefore a process keeps only the tokens of
concurrent changes, and the tokens that callers presented since the last change. Counters would not
help, because a restored database catches up with every counter.
"""

import logging
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import DatabaseWentBack
from quorumlog.wire.bodies import token_of, witness_of

log = logging.getLogger(__name__)

_MISSING_MAX: Final = 1000
"""How many missing tokens are remembered (chosen by judgement). One missing token already stops all
changes. This process keeps its other tokens in `_held`, and callers present their tokens again."""


@dataclass(slots=True)
class Presented:
    """A request's witnesses, and the witnesses that the response returns after the check."""

    witnesses: tuple[str, ...]
    holder: str
    answer: tuple[str, ...] | None = None


PRESENTED: Final[ContextVar[Presented | None]] = ContextVar("presented", default=None)
"""The witnesses of the current request. None in background work."""


class Memory:
    """The tokens that one process keeps.

    Invariant: a token is dropped only after the commit of a change whose transaction saw the token
    in the database.
    """

    def __init__(self) -> None:
        self.cluster_id = ""
        """The id of the database's cluster. Witnesses of another cluster are rejected."""
        self._held: dict[str, None] = {}
        self.missing: dict[str, str] = {}
        """Tokens that the database lacked at the last check, each with its holder."""

    @property
    def wanted(self) -> set[str]:
        """Tokens that the database must contain."""
        return {*self._held, *self.missing}

    @property
    def witnesses(self) -> tuple[str, ...]:
        """Witnesses for clients to keep, which cover all changes that are known to this process."""
        return tuple(witness_of(self.cluster_id, token) for token in self._held)

    def note_committed(self, token: str, seen: Iterable[str]) -> None:
        """Store a committed change's token, and drop the tokens that its transaction saw."""
        for known in seen:
            self._held.pop(known, None)
        self._held[token] = None

    def presented(self, presented: Presented | None) -> tuple[str, ...]:
        """The tokens that a request presents. Raises: DatabaseWentBack for an invalid witness."""
        if presented is None:
            return ()
        tokens = []
        for witness in presented.witnesses:
            token = token_of(self.cluster_id, witness)
            if token is None:
                raise DatabaseWentBack(
                    f"the witness {witness} is malformed, or is not a witness of this cluster"
                    f" ({self.cluster_id})"
                )
            tokens.append(token)
        return tuple(tokens)

    def compare(self, wanted: Collection[str], found: Iterable[str], *, holder: str) -> None:
        """Compare wanted tokens with found tokens, and remember missing tokens. `holder` presented
        the tokens that this process does not keep. Raises: DatabaseWentBack if a token is missing.
        """
        there = set(found)
        lacking = sorted(set(wanted) - there)
        for token in lacking:
            if token in self.missing or len(self.missing) >= _MISSING_MAX:
                continue
            who = "this process" if token in self._held else holder
            self.missing[token] = who
            self._held.pop(token, None)
            log.error("database-went-back", extra={"witness": token, "holder": who})
        back = [token for token in self.missing if token in there]
        for token in back:
            del self.missing[token]
        if back and not self.missing:
            log.warning("database-is-back", extra={"witnesses": len(back)})
        self._held |= dict.fromkeys(token for token in wanted if token in there)
        if lacking:
            raise self.error(lacking)

    def error(self, lacking: Collection[str]) -> DatabaseWentBack:
        """Create the error for a database that lacks these tokens."""
        first = min(lacking)
        return DatabaseWentBack(
            f"the database lacks {len(lacking)} acknowledged changes, such as {first} (reported by"
            f" {self.missing.get(first, 'a caller')}). All changes are refused until the right"
            " database is back, or an operator accepts the loss: see the runbook",
            witnesses=[witness_of(self.cluster_id, token) for token in sorted(lacking)[:10]],
        )
