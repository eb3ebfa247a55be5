"""What an operator's acceptance of a loss leaves: ledgers whose rows may be older than copies that bookies hold.

The lost history may have changed the row of every ledger that is not CLOSED. An acceptance notes these ledgers as
unproven. A change that ends such a ledger, or begins its recovery, names the copies of its row that bookies hold
(rule 18d): a recovery by an older row would cut off what was acknowledged under a later one.
"""

from collections.abc import Collection, Sequence
from typing import Final

from quorumlog.errors import CopyLost
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.metadata import audit
from services.metadata.attempts import ACCEPTED
from services.metadata.database import Connection
from services.metadata.kept import HeldCopies, lacking

_ACCEPT: Final = (
    f"INSERT INTO attempts (attempt, target) SELECT unnest($1::uuid[]), '{ACCEPTED}'"
    " ON CONFLICT DO NOTHING"
)
_LOST_BOOKIES: Final = (
    "UPDATE cluster SET lost_bookies = ARRAY(SELECT DISTINCT unnest(lost_bookies || $1::text[]))"
)
_UNPROVEN: Final = (
    "INSERT INTO unproven_ledgers SELECT ledger_id FROM ledgers"
    " WHERE state IN ('OPEN', 'IN_RECOVERY') AND body IS NOT NULL ON CONFLICT DO NOTHING"
)


class RowUnproven(Exception):
    """Bookies may hold a later row of this ledger: they have to be asked before it ends."""

    def __init__(self, row: LedgerMetadata) -> None:
        super().__init__(row.ledger_id)
        self.row = row


async def accept_tokens(connection: Connection, tokens: Collection[str]) -> None:
    """Accept the loss of these changes."""
    async with connection.transaction():
        await connection.execute(_ACCEPT, sorted(tokens))
        await connection.execute("UPDATE cluster SET loss_accepted_at = now()")
        await connection.execute(_UNPROVEN)
        await audit.keep(connection)


async def note_lost(connection: Connection, bookies: Collection[str]) -> None:
    """These bookies never return: nobody waits for copies that they may hold."""
    if not bookies:
        return
    async with connection.transaction():
        await connection.execute(_LOST_BOOKIES, sorted(bookies))
        await audit.keep(connection)


async def check_end(
    connection: Connection,
    old: LedgerMetadata,
    new: LedgerMetadata,
    held: Sequence[HeldCopies] | None,
) -> None:
    """Check that a locked row may become one that is not OPEN. `held`: what bookies hold, once they were asked.

    Raises: RowUnproven; CopyLost where the database lacks a change that a copy is of.
    """
    if old.state is State.CLOSED or new.state is State.OPEN:
        return
    is_unproven = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM unproven_ledgers WHERE ledger_id = $1)", old.ledger_id
    )
    if not is_unproven:
        return
    if held is None:
        raise RowUnproven(old)
    for copies in held:
        if lost := await lacking(connection, copies.attempts):
            raise CopyLost(
                f"{copies.holder} holds a copy of a row of the ledger that the database lacks: run `quorumlog metadata"
                " rebuild`, or accept that the ledger may lack entries (`quorumlog cluster accept --ledger"
                f" {old.ledger_id}`)",
                ledger_id=old.ledger_id,
                bookie=copies.holder,
                attempts=lost,
            )
    await prove(connection, old.ledger_id)


async def prove(connection: Connection, ledger_id: int) -> bool:
    """Nobody need ask for copies of this ledger's row any more; returns whether that was needed."""
    deleted: int | None = await connection.fetchval(
        "DELETE FROM unproven_ledgers WHERE ledger_id = $1 RETURNING ledger_id", ledger_id
    )
    return deleted is not None
