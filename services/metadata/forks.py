"""Forks: which logs name ledgers that were made for others, and which names of deleted logs are taken by forks.

A ledger that was made for a log is deleted in a transaction that sees no row naming it: neither its own log's (it is in
`unnamed_ledgers` then) nor a fork's (`shared_ledgers`). Nothing is counted, so nothing can drift (rule 27a). Whoever adds
a row here, or deletes a ledger, holds the lock of the ledger's row, and looks after that: a snapshot from before the
lock may lack what another transaction has just committed.
"""

from collections.abc import Collection, Iterable
from typing import Final

from quorumlog.errors import InvalidRequest, LogDeleted
from quorumlog.protocol.log import LogMetadata
from services.metadata.database import Connection
from services.metadata.sql import ids_of

NOT_SHARED: Final = "NOT EXISTS (SELECT FROM shared_ledgers s WHERE s.ledger_id = unnamed_ledgers.ledger_id OFFSET 0)"
"""Of a row in `unnamed_ledgers`: no fork names the ledger. With the offset it is asked of one row after another, by the
index: a join would read both tables whole before the first row of a page.
"""

KEPT: Final = (
    "WITH RECURSIVE descendants AS (SELECT fork FROM forks WHERE source = $1"
    " UNION SELECT f.fork FROM descendants d CROSS JOIN LATERAL"
    " (SELECT fork FROM forks WHERE source = d.fork OFFSET 0) f)"
    " SELECT EXISTS (SELECT FROM descendants d WHERE"
    " (SELECT body IS NOT NULL FROM logs WHERE logs.name = d.fork))"
)
"""Whether a fork of this log, or a fork of a deleted one, exists."""


async def check_name_free(connection: Connection, name: str) -> None:
    """Raise LogDeleted if forks of the deleted log of this name exist."""
    if await connection.fetchval(KEPT, name):
        raise LogDeleted(f"the log {name} is deleted, and forks of it are not", log=name)


async def note_source(connection: Connection, name: str, source: str | None) -> None:
    """Note what a log that is being created is forked from, if it is a fork."""
    await connection.execute("DELETE FROM forks WHERE fork = $1", name)
    if source is not None:
        await connection.execute("INSERT INTO forks (fork, source) VALUES ($1, $2)", name, source)


async def forget_source(connection: Connection, name: str) -> None:
    """Drop what a log that is being deleted was forked from, unless it has forks itself."""
    await connection.execute(
        "DELETE FROM forks f WHERE f.fork = $1"
        " AND NOT EXISTS (SELECT FROM forks g WHERE g.source = $1)",
        name,
    )


async def share(connection: Connection, fork: LogMetadata) -> None:
    """Name ledgers of other logs for a fork, whose source's row is locked and names them.

    Raises: InvalidRequest for one that is not CLOSED, or deleted.
    """
    wanted = sorted(item.ledger_id for item in fork.shared)
    closed = await ids_of(
        connection,
        "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
        " ORDER BY ledger_id FOR SHARE",
        wanted,
    )
    gone = sorted({*wanted} - {*closed})
    if gone:
        raise InvalidRequest(
            f"ledger {gone[0]} is not CLOSED, or deleted", log=fork.name, ledger_id=gone[0]
        )
    await write_shared(connection, fork)


async def shared_among(connection: Connection, ledgers: Collection[int]) -> set[int]:
    """Which of these ledgers, whose rows are locked, a fork names."""
    query = "SELECT DISTINCT ledger_id FROM shared_ledgers WHERE ledger_id = ANY($1::bigint[])"
    return {*await ids_of(connection, query, sorted(ledgers))}


async def let_go(connection: Connection, fork: str, ledgers: Iterable[int]) -> None:
    """A fork, whose row is locked, names these shared ledgers no more. What nobody names then is swept as unnamed."""
    await connection.execute(
        "DELETE FROM shared_ledgers WHERE log = $1 AND ledger_id = ANY($2::bigint[])",
        fork,
        sorted(ledgers),
    )


async def write_shared(connection: Connection, fork: LogMetadata) -> None:
    """Make the table say what a row names: of a new fork, or a rebuilt one (rule 18d)."""
    wanted = sorted(item.ledger_id for item in fork.shared)
    await connection.execute(
        "DELETE FROM shared_ledgers WHERE log = $1 AND ledger_id <> ALL($2::bigint[])",
        fork.name,
        wanted,
    )
    await connection.execute(
        "INSERT INTO shared_ledgers (ledger_id, log) SELECT unnest($1::bigint[]), $2"
        " ON CONFLICT DO NOTHING",
        wanted,
        fork.name,
    )


async def forget_deleted(connection: Connection, ledgers: Collection[int]) -> None:
    """The deletion of these ledgers is proven by bookies (rule 18d): no log named them then."""
    await connection.execute(
        "DELETE FROM shared_ledgers WHERE ledger_id = ANY($1::bigint[])", sorted(ledgers)
    )
