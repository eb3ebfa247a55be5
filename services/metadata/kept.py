"""Ledgers that bookies keep, since they hold a copy of a row whose change the database lacks (rule 18c).

A bookie names the attempts of its copies with the read that a deletion rests on. A change whose loss an operator
accepted is lacking as well: the operator lets the cluster go on, and gives nothing up that the lost history named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import CopyLost
from quorumlog.wire.bodies import KeptLedger, KeptLedgers
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


@dataclass(frozen=True, slots=True)
class HeldCopies:
    """The attempts of the copies of one ledger's row that a bookie holds."""

    holder: str
    attempts: tuple[str, ...]


async def lost_of(connection: Connection, memory: Memory, held: HeldCopies) -> Sequence[str]:
    """The changes that a bookie's copies are of and the database lacks; the caller reads the rows in the same snapshot.

    Raises: DatabaseWentBack where nobody has accepted any loss yet, so that this one becomes known.
    """
    targets = await _targets(connection, held.attempts)
    lost = _lacking(targets, held.attempts)
    if lost and not await connection.fetchval(
        "SELECT loss_accepted_at IS NOT NULL FROM cluster"
    ):  # fmt: skip
        memory.compare(lost, targets, holder=held.holder)
    return lost


async def check_held(connection: Connection, memory: Memory, held: HeldCopies) -> None:
    """Check that the database contains the changes that a bookie's copies of one ledger's rows are of.

    Raises: CopyLost, and as `lost_of`.
    """
    if lost := await lost_of(connection, memory, held):
        raise CopyLost(
            f"the database lacks {len(lost)} changes of which {held.holder} holds copies, {lost[0]} among them",
            attempts=lost,
        )


async def forget_holder(connection: Connection, holder: str) -> None:
    """Forget what a bookie kept whose data is gone; one that is alive tells it again with its next round."""
    await connection.execute("DELETE FROM kept_ledgers WHERE holder = $1", holder)


async def lacking(connection: Connection, attempts: Sequence[str]) -> Sequence[str]:
    """The changes that the database lacks; one whose loss was accepted is lacking."""
    return _lacking(await _targets(connection, attempts), attempts)


async def _targets(connection: Connection, attempts: Sequence[str]) -> Mapping[str, str]:
    records = await connection.fetch(_CONTAINED, attempts)
    return {record["attempt"]: record["target"] for record in records}


def _lacking(targets: Mapping[str, str], attempts: Sequence[str]) -> Sequence[str]:
    return [attempt for attempt in attempts if targets.get(attempt, ACCEPTED) == ACCEPTED]


class KeptStore(RowStore):
    """What bookies were refused, as operators read it."""

    @transactional
    async def note(
        self, connection: Connection, ledger_id: int, held: HeldCopies, lost: Sequence[str]
    ) -> None:
        """Note that a bookie keeps a ledger for these changes."""
        await connection.execute(_NOTE, ledger_id, lost, held.holder)

    @listing
    async def list(self, connection: Connection, *, after: int | None, limit: int) -> KeptLedgers:
        """How many ledgers are kept, and the first ones with ids above `after`."""
        count = await connection.fetchval(f"SELECT count(*) FROM ({_KEPT}) AS kept")
        records = await connection.fetch(
            f"SELECT * FROM ({_KEPT}) AS kept WHERE ledger_id > $1 ORDER BY ledger_id LIMIT $2",
            -1 if after is None else after,
            limit,
        )
        ledgers = tuple(value_of(KeptLedger, record) for record in records)
        return KeptLedgers(count=count, ledgers=ledgers)
