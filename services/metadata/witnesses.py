"""Requests of processes that keep witnesses, and the acceptance of losses (rule 18a)."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from quorumlog.errors import CopyLost, InvalidRequest, NotEnoughBookies
from quorumlog.wire.bodies import MissingWitness, WitnessState, token_of, witness_of
from services.metadata.attempts import record_attempt, record_change
from services.metadata.database import Connection, RowStore, transactional
from services.metadata.inquiry import Inquiry
from services.metadata.ledgers import lock_ledger, write_row
from services.metadata.losses import accept_tokens, note_lost, prove
from services.metadata.memory import PRESENTED
from services.metadata.rebuild import Notify, Rebuilder

log = logging.getLogger(__name__)

_HELD_MAX: Final = 8
"""If a process has more tokens, one new token replaces all of them (chosen by judgement)."""


@dataclass(eq=False)
class WitnessStore(RowStore):
    """Checks witnesses in the database, and accepts losses of changes."""

    _inquiry: Inquiry
    _rebuilder: Rebuilder

    async def confirm(self) -> WitnessState:
        """Check that the database contains the request's witnesses and this process's tokens. The
        response has at least one witness. A database that contains the response's witnesses also
        contains all changes whose witnesses were checked.

        Raises: DatabaseWentBack.
        """
        await self._mark_if_due()
        return self.state()

    @transactional
    async def _mark_if_due(self, connection: Connection) -> None:
        """If this process has no or too many tokens, make a change whose token replaces them."""
        memory = self.database.memory
        known = len(memory.wanted | set(memory.presented(PRESENTED.get())))
        if not 1 <= known <= _HELD_MAX:
            await record_change(connection, "mark")

    def state(self) -> WitnessState:
        """Return this process's tokens, and the tokens that the database lacked when checked."""
        memory = self.database.memory
        return WitnessState(
            held=memory.witnesses,
            missing=tuple(
                MissingWitness(witness=witness_of(memory.cluster_id, token), holder=holder)
                for token, holder in sorted(memory.missing.items())
            ),
        )

    async def accept(
        self,
        witnesses: Sequence[str],
        *,
        lost: Collection[str],
        ledgers: Sequence[int],
        notify: Notify,
    ) -> WitnessState:
        """Accept the loss of these witnesses' changes, as an operator decided. `lost` has bookies
        that never return. `ledgers` keep the database's rows, although bookies have copies of other
        rows. `notify` receives lines of progress.

        Raises: InvalidRequest; NotEnoughBookies while another bookie is silent, because ids of its
        ledgers could be assigned again; CopyLost while a rebuild would write rows (rule 18d).
        """
        if not (witnesses or lost or ledgers):
            raise InvalidRequest("send at least one witness, lost bookie or ledger")
        cluster_id = self.database.memory.cluster_id
        tokens = set()
        for witness in witnesses:
            token = token_of(cluster_id, witness)
            if token is None:
                raise InvalidRequest(f"{witness} is not a witness of this cluster ({cluster_id})")
            tokens.add(token)
        # Don't check witnesses, because an operator accepts that the database lacks these tokens.
        await self.database.run(lambda connection: note_lost(connection, lost))
        if tokens:
            await self._accept_tokens(tokens, lost, notify)
            log.warning("loss-of-changes-accepted", extra={"witnesses": list(witnesses)})
            await self.database.probe()
        for ledger_id in ledgers:
            await self._accept_row(ledger_id)
        return self.state()

    async def _accept_tokens(
        self, tokens: Collection[str], lost: Collection[str], notify: Notify
    ) -> None:
        silent = [name for name in await self._inquiry.ask() if name not in lost]
        if silent:
            raise NotEnoughBookies(
                f"these bookies do not respond: {', '.join(silent)}. Start them, or name them as lost if they never"
                " return: the ids of their ledgers must not be assigned again",
                bookies=silent,
            )
        if behind := await self._rebuilder.count_behind(lost, notify):
            raise CopyLost(
                f"the database's rows of {behind} ledgers are missing, or older than the bookies' copies: first run"
                " `quorumlog metadata rebuild`, because a recovery by an older row would cut off acknowledged entries",
                ledgers=behind,
            )
        await self.database.run(lambda connection: accept_tokens(connection, tokens))

    @transactional
    async def _accept_row(self, connection: Connection, ledger_id: int) -> None:
        """Keep the database's row, and mark that the ledger may lack entries."""
        row = await lock_ledger(connection, ledger_id)
        if not await prove(connection, ledger_id):
            raise InvalidRequest("the ledger has no loss to accept", ledger_id=ledger_id)
        attempt = str(uuid4())
        marked = replace(row, may_lack_entries=True)
        await write_row(connection, marked.changed_by(attempt, row))
        await record_attempt(connection, attempt, f"ledger {ledger_id}")
        log.warning("loss-of-rows-accepted", extra={"ledger": ledger_id})
