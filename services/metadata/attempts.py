"""Tokens of applied changes, each written in the transaction of its change.

After a lost response, a client finds out by the attempt's token whether its change was applied (rule
6). The latest tokens are also witnesses. A database that lacks a witness went back in time (rule 18a).
"""

from typing import Final
from uuid import uuid4

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.once import Once
from services.metadata.database import Connection

ACCEPTED: Final = "accepted as lost"
"""Target of a lost change whose loss an operator accepted. Only the change's token is stored."""

_ONCE: Final = "once "
"""Prefix of a client request's target, before a digest of the content and the result."""

_PLACING: Final = ("log ", "create log ", "transaction ")
"""Targets of changes that place ledgers in a log. A rebuild finds the tokens of such changes in
copies of the ledgers' rows, and stores them as changes of these ledgers (rule 18f)."""


async def target_of(connection: Connection, attempt: str) -> str | None:
    """Return the target of the change that used this token, or None."""
    # The row lock is a write, so a transaction that relies on this token commits only after a
    # synchronous standby has the token. A killed and restarted primary may return commits that no
    # standby has.
    found: str | None = await connection.fetchval(
        "SELECT target FROM attempts WHERE attempt = $1 FOR KEY SHARE", attempt
    )
    return found


async def is_applied(connection: Connection, attempt: str, target: str) -> bool:
    """Whether this attempt was applied. The caller holds the target's lock.

    An attempt whose loss was accepted counts as not applied, so that a retry can make the change. A
    log's change also counts as not applied if a rebuild restored only a ledger's place in the log
    (`_PLACING`). Raises: InvalidRequest if the token was used for another change.
    """
    found = await target_of(connection, attempt)
    places = found is not None and found.startswith("ledger ") and target.startswith(_PLACING)
    if found not in (None, ACCEPTED, target) and not places:
        raise used_otherwise(found)
    return found == target


async def try_record(connection: Connection, attempt: str, target: str) -> bool:
    """Record that this transaction applies the attempt.

    Waits for the end of a concurrent transaction that records the same attempt, and returns False
    if that transaction has applied the attempt.
    """
    recorded = await connection.fetchval(
        "INSERT INTO attempts (attempt, target) VALUES ($1, $2) ON CONFLICT (attempt) DO UPDATE"
        f" SET target = excluded.target WHERE attempts.target = '{ACCEPTED}'"
        " OR (attempts.target LIKE 'ledger %' AND $3) RETURNING true",
        attempt,
        target,
        target.startswith(_PLACING),
    )
    connection.settled = attempt
    return recorded is not None


async def record_attempt(connection: Connection, attempt: str, target: str) -> None:
    """Like `try_record`. Raises: InvalidRequest if the token was used for another change."""
    if not await try_record(connection, attempt, target):
        raise used_otherwise(await target_of(connection, attempt))


async def found_once(connection: Connection, once: Once | None) -> str | None:
    """Return the result of the first copy of a client's request, or None if no copy was carried out
    or `once` is None. The caller must hold a lock that all copies of the request take, or use
    `try_once` to detect concurrent copies.

    Raises: InvalidRequest if the first copy had a different content.
    """
    found = None if once is None else await target_of(connection, once.token)
    if once is None or found in (None, ACCEPTED):
        return None
    content, _, left = found.removeprefix(_ONCE).partition(" ")
    if content != once.content:
        pointer, detail = "/header/Idempotency-Key", "was used for another request: send a new key"
        errors = [{"pointer": pointer, "detail": detail}]
        raise InvalidRequest(f"{pointer}: {detail}", errors=errors)
    return left


async def try_once(connection: Connection, once: Once | None, left: object = "") -> bool:
    """Record that this transaction carries out a client's request, with the result `left`. Waits
    for a concurrent copy of the request, and returns False if this copy was carried out. Without
    `once`, no record is written.
    """
    if once is None:
        return True
    return await try_record(connection, once.token, f"{_ONCE}{once.content} {left}")


async def record_change(connection: Connection, target: str) -> None:
    """Record a new token for a change that has none, so that a loss of the change can be
    detected (rule 18a).
    """
    await record_attempt(connection, str(uuid4()), target)


def used_otherwise(target: str | None) -> InvalidRequest:
    """The error for a token that was used for another change."""
    detail = f"the attempt's token was used for another change ({target}): use a new token"
    return InvalidRequest(detail)
