"""Changes that the database lost, the ledgers that bookies therefore keep, and accepted losses.

Before a bookie deletes a ledger, it requests the ledger's row, and reports which changes made its
copies of the row. If the database lacks one of these changes, the bookie keeps the ledger (rule
18c). A change counts as lost even after an operator accepted its loss. The acceptance lets the
cluster continue, but no ledger with a lost change is deleted.

The lost history may have changed the row of every ledger that is not CLOSED. An acceptance marks
these ledgers as unproven. Before an unproven ledger ends or is recovered, the service requests the
bookies' copies of the row (rule 18d), because a recovery by an older row would lose later entries.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import CopyLost
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import KeptLedger, KeptLedgers
from services.metadata import audit
from services.metadata.attempts import ACCEPTED
from services.metadata.database import Connection, RowStore, listing, transactional
from services.metadata.memory import Memory
from services.metadata.sql import value_of

_CONTAINED: Final = (
    "SELECT attempt::text AS attempt, target FROM attempts WHERE attempt = ANY($1::uuid[])"
)
_NOTE: Final = (
    "INSERT INTO kept_ledgers (ledger_id, attempt, holder) SELECT $1, unnest($2::uuid[]), $3"
    " ON CONFLICT DO NOTHING"
)
_KEPT: Final = (
    "SELECT k.ledger_id, array_agg(DISTINCT k.holder) AS holders,"
    " array_agg(DISTINCT k.attempt::text) AS attempts FROM kept_ledgers k"
    " WHERE NOT EXISTS (SELECT FROM attempts a WHERE a.attempt = k.attempt"
    f" AND a.target <> '{ACCEPTED}') GROUP BY k.ledger_id"
)
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


@dataclass(frozen=True, slots=True)
class HeldCopies:
    """The attempts of a bookie's copies of a ledger's row."""

    holder: str
    attempts: tuple[str, ...]


async def lost_of(connection: Connection, memory: Memory, held: HeldCopies) -> Sequence[str]:
    """The changes of a bookie's copies that the database lacks, in the caller's snapshot.

    Raises: DatabaseWentBack if a change is missing, and no operator has accepted a loss yet.
    """
    lost = await lacking(connection, held.attempts)
    if lost and not await connection.fetchval(
        "SELECT loss_accepted_at IS NOT NULL FROM cluster"
    ):  # fmt: skip
        memory.compare(lost, (), holder=held.holder)
    return lost


async def forget_holder(connection: Connection, holder: str) -> None:
    """Delete the list of ledgers that a bookie keeps. The bookie reports kept ledgers each round."""
    await connection.execute("DELETE FROM kept_ledgers WHERE holder = $1", holder)


async def lacking(connection: Connection, attempts: Sequence[str]) -> Sequence[str]:
    """The changes that the database lacks, including changes whose loss was accepted."""
    records = await connection.fetch(_CONTAINED, attempts)
    targets = {record["attempt"]: record["target"] for record in records}
    return [attempt for attempt in attempts if targets.get(attempt, ACCEPTED) == ACCEPTED]


class KeptStore(RowStore):
    """Lists the ledgers that bookies keep because the database lacks changes of them."""

    @transactional
    async def note(
        self, connection: Connection, ledger_id: int, held: HeldCopies, lost: Sequence[str]
    ) -> None:
        """Record that a bookie keeps a ledger, because the database lacks these changes."""
        await connection.execute(_NOTE, ledger_id, lost, held.holder)

    @listing
    async def list(self, connection: Connection, *, after: int = -1, limit: int) -> KeptLedgers:
        """A page of kept ledgers with ids above `after`, ascending, and the count of all kept
        ledgers. Bookies keep a ledger while they have a version that the database lacks (rule 18c).
        """
        count = await connection.fetchval(f"SELECT count(*) FROM ({_KEPT}) AS kept")
        records = await connection.fetch(
            f"SELECT * FROM ({_KEPT}) AS kept WHERE ledger_id > $1 ORDER BY ledger_id LIMIT $2",
            after,
            limit,
        )
        ledgers = tuple(value_of(KeptLedger, record) for record in records)
        return KeptLedgers(count=count, ledgers=ledgers)


class RowUnproven(Exception):
    """Bookies may have a later row of the ledger, so their copies must be read before it ends."""

    def __init__(self, row: LedgerMetadata) -> None:
        super().__init__(row.ledger_id)
        self.row = row


async def accept_tokens(connection: Connection, tokens: Collection[str]) -> None:
    """Record an accepted loss of changes, and mark ledgers that are not CLOSED as unproven."""
    async with connection.transaction():
        await connection.execute(_ACCEPT, sorted(tokens))
        await connection.execute("UPDATE cluster SET loss_accepted_at = now()")
        await connection.execute(_UNPROVEN)
        await audit.keep(connection)


async def note_lost(connection: Connection, bookies: Collection[str]) -> None:
    """Record that these bookies never return, so that no check waits for their copies."""
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
    """Check that a locked ledger may leave OPEN or end. `held` has copies of the row, if requested.

    Raises: RowUnproven if copies must be requested; CopyLost if the database lacks a copy's change.
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
                f"bookie {copies.holder} has a version of the ledger's metadata that the database lacks: run `quorumlog"
                " metadata rebuild`, or accept that the ledger may lack entries (`quorumlog cluster accept --ledger"
                f" {old.ledger_id}`)",
                ledger_id=old.ledger_id,
                bookie=copies.holder,
                attempts=lost,
            )
    await prove(connection, old.ledger_id)


async def prove(connection: Connection, ledger_id: int) -> bool:
    """Mark a ledger as no longer unproven. Returns whether the ledger was unproven before."""
    deleted: int | None = await connection.fetchval(
        "DELETE FROM unproven_ledgers WHERE ledger_id = $1 RETURNING ledger_id", ledger_id
    )
    return deleted is not None
