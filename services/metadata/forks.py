"""The ledgers that forks share with other logs, and names of deleted logs that forks reserve.

A log's ledger is deleted only in a transaction that sees no row with a reference to the ledger. The
ledger's own log no longer references a ledger in `unnamed_ledgers`, and `shared_ledgers` has the
references of forks. Reference counts could drift, so there are none (rule 27a). A transaction that
shares or deletes a ledger first locks the ledger's row, because an earlier snapshot may be stale.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from quorumlog.errors import InvalidRequest, LogDeleted
from quorumlog.protocol.log import NO_KEYS, LogMetadata, ledgers_of
from services.metadata.database import Connection
from services.metadata.sql import ids_of

NOT_SHARED: Final = "NOT EXISTS (SELECT FROM shared_ledgers s WHERE s.ledger_id = unnamed_ledgers.ledger_id OFFSET 0)"
"""The condition that no fork references a ledger in `unnamed_ledgers`. OFFSET 0 makes Postgres check
row by row with the index. A join would read both tables completely before a page's first row."""

KEPT: Final = (
    "WITH RECURSIVE descendants AS (SELECT fork FROM forks WHERE source = $1"
    " UNION SELECT f.fork FROM descendants d CROSS JOIN LATERAL"
    " (SELECT fork FROM forks WHERE source = d.fork OFFSET 0) f)"
    " SELECT EXISTS (SELECT FROM descendants d WHERE"
    " (SELECT body IS NOT NULL FROM logs WHERE logs.name = d.fork))"
)
"""Whether a log exists that was forked from this log, directly or through other forks."""


async def check_name_free(connection: Connection, name: str) -> None:
    """Raise LogDeleted if a deleted log of this name has forks."""
    if await connection.fetchval(KEPT, name):
        raise LogDeleted(f"the deleted log {name} has forks: delete the forks first", log=name)


async def note_source(connection: Connection, name: str, source: str | None) -> None:
    """Record the source log of a new fork. None means that the new log is not a fork."""
    await connection.execute("DELETE FROM forks WHERE fork = $1", name)
    if source is not None:
        await connection.execute("INSERT INTO forks (fork, source) VALUES ($1, $2)", name, source)


async def forget_source(connection: Connection, name: str) -> None:
    """Remove the record of a deleted fork's source, unless the deleted log itself has forks."""
    await connection.execute(
        "DELETE FROM forks f WHERE f.fork = $1"
        " AND NOT EXISTS (SELECT FROM forks g WHERE g.source = $1)",
        name,
    )


async def share(connection: Connection, fork: LogMetadata) -> LogMetadata:
    """Record the ledgers that a new fork shares with its source, whose row is locked. Returns the
    fork without lost indexes of keys (rule 27e).

    Raises: InvalidRequest if one of these ledgers is not CLOSED, or is deleted.
    """
    wanted = sorted(ledgers_of(fork.shared))
    closed = await ids_of(
        connection,
        "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
        " ORDER BY ledger_id FOR SHARE",
        wanted,
    )
    gone = sorted({item.ledger_id for item in fork.shared} - {*closed})
    if gone:
        raise InvalidRequest(
            f"ledger {gone[0]} must be CLOSED, not open or deleted",
            log=fork.name,
            ledger_id=gone[0],
        )
    items = (
        i if i.index in {*closed, None, NO_KEYS} else replace(i, index=None) for i in fork.items
    )
    fork = replace(fork, items=tuple(items))
    await write_shared(connection, fork)
    return fork


async def shared_among(connection: Connection, ledgers: Collection[int]) -> set[int]:
    """The `ledgers` that forks reference. Before a deletion, the caller locks the ledgers' rows."""
    query = "SELECT DISTINCT ledger_id FROM shared_ledgers WHERE ledger_id = ANY($1::bigint[])"
    return {*await ids_of(connection, query, sorted(ledgers))}


async def let_go(connection: Connection, fork: str, ledgers: Iterable[int]) -> None:
    """Record that a fork, whose row is locked, no longer references these shared ledgers. The sweep
    deletes ledgers that no log references any more.
    """
    await connection.execute(
        "DELETE FROM shared_ledgers WHERE log = $1 AND ledger_id = ANY($2::bigint[])",
        fork,
        sorted(ledgers),
    )


async def write_shared(connection: Connection, fork: LogMetadata) -> None:
    """Make `shared_ledgers` match the row of a new or rebuilt fork (rule 18d)."""
    wanted = sorted(ledgers_of(fork.shared))
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
    """Remove forks' references to ledgers whose deletion bookies have proven (rule 18d)."""
    await connection.execute(
        "DELETE FROM shared_ledgers WHERE ledger_id = ANY($1::bigint[])", sorted(ledgers)
    )
