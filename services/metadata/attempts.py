"""Tokens of applied changes, each written in the transaction of its change.

A client settles a change whose answer was lost by its attempt's token (rule 6). The tokens of the
latest changes are also the witnesses that show a database which went back in time (rule 18a).
"""

from typing import Final
from uuid import uuid4

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.once import Once
from services.metadata.database import Connection

ACCEPTED: Final = "accepted as lost"
"""The target of a change whose loss an operator accepted: the token is there, and the change is not."""

_ONCE: Final = "once "
"""Begins the target of a client's request: its content, and what its first copy left."""

_PLACING: Final = ("log ", "create log ", "transaction ")
"""Changes that place ledgers in a log: a rebuild finds their tokens in copies of the ledgers' rows, and keeps them as
changes of these ledgers (rule 18f)."""


async def target_of(connection: Connection, attempt: str) -> str | None:
    """The change that used this token, or None."""
    # The lock is a write: a transaction that answers by this token commits after a synchronous standby
    # has the token. A primary that was killed shows commits after its restart which no standby has.
    found: str | None = await connection.fetchval(
        "SELECT target FROM attempts WHERE attempt = $1 FOR KEY SHARE", attempt
    )
    return found


async def is_applied(connection: Connection, attempt: str, target: str) -> bool:
    """Whether this attempt was applied. The caller holds the target's lock. One whose loss was accepted was not: its
    client may still ask what came of it, and the change is made now if it is legal. So may that of a log's change
    which came back only as the place of a ledger (`_PLACING`).

    Raises: InvalidRequest if the token was used for another change.
    """
    found = await target_of(connection, attempt)
    places = found is not None and found.startswith("ledger ") and target.startswith(_PLACING)
    if found not in (None, ACCEPTED, target) and not places:
        raise used_otherwise(found)
    return found == target


async def try_record(connection: Connection, attempt: str, target: str) -> bool:
    """Record that the present transaction applies this attempt; False if another one did.

    Waits for the end of a concurrent transaction that records the same attempt.
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
    """As `try_record`. Raises: InvalidRequest if the token was used for another change."""
    if not await try_record(connection, attempt, target):
        raise used_otherwise(await target_of(connection, attempt))


async def found_once(connection: Connection, once: Once | None) -> str | None:
    """What the first copy of a client's request left (`try_once`); None if no copy was carried out, or the request has
    no name. The caller holds a lock that all copies of the request take, or lets `try_once` tell them apart.

    Raises: InvalidRequest if the first copy asked for something else.
    """
    found = None if once is None else await target_of(connection, once.token)
    if once is None or found in (None, ACCEPTED):
        return None
    content, _, left = found.removeprefix(_ONCE).partition(" ")
    if content != once.content:
        pointer, detail = "/header/Idempotency-Key", "was used for another request"
        errors = [{"pointer": pointer, "detail": detail}]
        raise InvalidRequest(f"{pointer}: {detail}", errors=errors)
    return left


async def try_once(connection: Connection, once: Once | None, left: object = "") -> bool:
    """Record that the present transaction carries out a client's request, if that has a name, and what it leaves; False
    if a concurrent one did. Waits for that one's end.
    """
    if once is None:
        return True
    return await try_record(connection, once.token, f"{_ONCE}{once.content} {left}")


async def record_change(connection: Connection, target: str) -> None:
    """Record a change that has no attempt, so that its loss is detected (rule 18a)."""
    await record_attempt(connection, str(uuid4()), target)


def used_otherwise(target: str | None) -> InvalidRequest:
    """The refusal of a token that was used for another change."""
    return InvalidRequest(f"this attempt was used for another change ({target})")
