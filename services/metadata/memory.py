"""Tokens of changes that the database must contain, as far as this process knows (rule 18a). This
module does no IO.

The database's history is linear. A change whose transaction saw some tokens was committed after
them, so the change's token stands for them. A process therefore holds few tokens: those of
concurrent changes, and those that callers presented since the last change. Counters are not
compared, because a restored database catches up with every counter.
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
"""How many missing tokens are remembered. Chosen by judgement, since one missing token stops all
changes. A further token stays with its holder: this process has it in `_held`, others present it
again."""


@dataclass(slots=True)
class Presented:
    """A request's witnesses, and those that its answer returns after the database's check."""

    witnesses: tuple[str, ...]
    holder: str
    answer: tuple[str, ...] | None = None


PRESENTED: Final[ContextVar[Presented | None]] = ContextVar("presented", default=None)
"""The witnesses of the request that is being handled; None in background work."""


class Memory:
    """The tokens that one process holds.

    Invariant: a token is dropped only when a change is committed whose transaction saw the token in
    the database.
    """

    def __init__(self) -> None:
        self.cluster_id = ""
        """The id of the database's cluster. Witnesses of another cluster are rejected."""
        self._held: dict[str, None] = {}
        self.missing: dict[str, str] = {}
        """Tokens that the database lacked when last checked, each with its holder."""

    @property
    def wanted(self) -> set[str]:
        """Tokens that the database must contain."""
        return {*self._held, *self.missing}

    @property
    def witnesses(self) -> tuple[str, ...]:
        """Witnesses for clients to keep, which stand for all changes that this process knows."""
        return tuple(witness_of(self.cluster_id, token) for token in self._held)

    def note_committed(self, token: str, seen: Iterable[str]) -> None:
        """Hold the token of a committed change, instead of the tokens that its transaction saw."""
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
                    f"the witness {witness} is damaged or of another cluster than this one"
                    f" ({self.cluster_id})"
                )
            tokens.append(token)
        return tuple(tokens)

    def compare(self, wanted: Collection[str], found: Iterable[str], *, holder: str) -> None:
        """Compare wanted tokens with those found, and remember missing ones; `holder`: the
        presenter of tokens that this process does not hold. Raises: DatabaseWentBack if a token is
        missing.
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
        """The error to raise because the database lacks these tokens."""
        first = min(lacking)
        return DatabaseWentBack(
            f"the database lacks {len(lacking)} changes that it had acknowledged, such as {first}"
            f" (known to {self.missing.get(first, 'a caller')}). Nothing is changed or deleted"
            " until the right database is back, or an operator accepts the loss: see the runbook",
            witnesses=[witness_of(self.cluster_id, token) for token in sorted(lacking)[:10]],
        )
