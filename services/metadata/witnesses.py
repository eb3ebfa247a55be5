"""Requests of witness holders, and an operator's acceptance of a loss (rule 18a)."""

import logging
from collections.abc import Collection, Sequence
from typing import Final

from quorumlog.errors import InvalidRequest, NotEnoughBookies
from quorumlog.wire.bodies import MissingWitness, WitnessState
from quorumlog.wire.witnesses import token_of, witness_of
from services.metadata.attempts import ACCEPTED, record_change
from services.metadata.database import Connection, Database, RowStore, transactional
from services.metadata.inquiry import Inquiry
from services.metadata.memory import PRESENTED

log = logging.getLogger(__name__)

_HELD_MAX: Final = 8
"""Above this number, all held tokens are replaced by one of this service's own (taste)."""

ACCEPT: Final = (
    f"INSERT INTO attempts (attempt, target) SELECT unnest($1::uuid[]), '{ACCEPTED}'"
    " ON CONFLICT DO NOTHING"
)


class WitnessStore(RowStore):
    """The memory of this process, and its database."""

    def __init__(self, database: Database, inquiry: Inquiry) -> None:
        super().__init__(database)
        self._inquiry = inquiry

    async def confirm(self) -> WitnessState:
        """Check that the database has what the request presents and what this process holds;
        returns witnesses that stand for all of it, at least one.

        Raises: DatabaseWentBack.
        """
        await self._mark_if_due()
        return self.state()

    @transactional
    async def _mark_if_due(self, connection: Connection) -> None:
        """Make a change of this service's own that stands for all tokens, if none or many are held."""
        memory = self.database.memory
        known = len(memory.wanted | set(memory.presented(PRESENTED.get())))
        if not 1 <= known <= _HELD_MAX:
            await record_change(connection, "mark")

    def state(self) -> WitnessState:
        """The tokens held, and those that the database lacked when last checked."""
        memory = self.database.memory
        return WitnessState(
            held=memory.witnesses,
            missing=tuple(
                MissingWitness(witness=witness_of(memory.cluster_id, token), holder=holder)
                for token, holder in sorted(memory.missing.items())
            ),
        )

    async def accept(self, witnesses: Sequence[str], *, lost: Collection[str]) -> WitnessState:
        """Continue without these changes, as an operator decided. `lost`: bookies that never return.

        Raises: InvalidRequest; NotEnoughBookies while another bookie is silent, since ids of ledgers
        that it holds would be assigned again.
        """
        cluster_id = self.database.memory.cluster_id
        tokens = [token_of(cluster_id, witness) for witness in witnesses]
        if None in tokens:
            wrong = witnesses[tokens.index(None)]
            raise InvalidRequest(f"{wrong} is no witness of this cluster ({cluster_id})")
        silent = [name for name in await self._inquiry.ask() if name not in lost]
        if silent:
            raise NotEnoughBookies(
                f"{', '.join(silent)}: no answer. Ids of ledgers that a bookie holds must not be assigned"
                " again: start it, or, if it never returns, name it as lost",
                bookies=silent,
            )
        # Unchecked: the database lacks these tokens, and an operator decided to go on.
        await self.database.run(lambda connection: accept_tokens(connection, tokens))
        log.warning("loss-of-changes-accepted", extra={"witnesses": list(witnesses)})
        await self.database.probe()
        return self.state()


async def accept_tokens(connection: Connection, tokens: Sequence[str | None]) -> None:
    """Accept the loss of these changes."""
    async with connection.transaction():
        await connection.execute(ACCEPT, tokens)
        await connection.execute("UPDATE cluster SET loss_accepted_at = now()")
