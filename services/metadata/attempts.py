"""Tokens of applied changes, each written in the transaction of its change.

A client settles a change whose answer was lost by its attempt's token (rule 6). The tokens of the
latest changes are also the witnesses that show a database which went back in time (rule 18a).
"""

from enum import Enum
from typing import Final
from uuid import uuid4

from quorumlog.errors import InvalidRequest
from services.metadata.database import Connection

ACCEPTED: Final = "accepted as lost"
"""The target of a change whose loss an operator accepted: the token is there, and the change is not."""


async def target_of(connection: Connection, attempt: str) -> str | None:
    """The change that used this token, or None."""
    # The lock is a write: a transaction that answers by this token commits after a synchronous standby
    # has the token. A primary that was killed shows commits after its restart which no standby has.
    found: str | None = await connection.fetchval(
        "SELECT target FROM attempts WHERE attempt = $1 FOR KEY SHARE", attempt
    )
    return found


class EarlierTry(Enum):
    """What the database contains of an earlier try of a change."""

    NONE = "none"
    APPLIED = "applied"
    LOST = "lost"
    """It was applied in a history that is lost: an operator accepted that, or a rebuild found the token in the copy of
    a ledger's row that the change had placed in its log. What came of it is unknown here, and the change is made again
    under another token, on the row as it is: this one's copies tell of the lost history (rule 18b)."""


async def earlier_try(connection: Connection, attempt: str, target: str) -> EarlierTry:
    """What became of an earlier try of this change. The caller holds the target's lock.

    Raises: InvalidRequest if the token was used for another change.
    """
    found = await target_of(connection, attempt)
    if found is None:
        return EarlierTry.NONE
    if found == target:
        return EarlierTry.APPLIED
    places_ledgers = target.startswith(("log ", "create log ", "transaction "))
    if found == ACCEPTED or (places_ledgers and found.startswith("ledger ")):
        return EarlierTry.LOST
    raise used_otherwise(found)


async def is_applied(connection: Connection, attempt: str, target: str) -> bool:
    """As `earlier_try`: whether this attempt was applied."""
    return await earlier_try(connection, attempt, target) is EarlierTry.APPLIED


async def try_record(connection: Connection, attempt: str, target: str) -> bool:
    """Record that the present transaction applies this attempt; False if another one did.

    Waits for the end of a concurrent transaction that records the same attempt.
    """
    recorded = await connection.fetchval(
        "INSERT INTO attempts (attempt, target) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING true",
        attempt,
        target,
    )
    connection.settled = attempt
    return recorded is not None


async def record_attempt(connection: Connection, attempt: str, target: str) -> None:
    """As `try_record`. Raises: InvalidRequest if the token was used for another change."""
    if not await try_record(connection, attempt, target):
        raise used_otherwise(await target_of(connection, attempt))


async def record_change(connection: Connection, target: str) -> None:
    """Record a change that has no attempt, so that its loss is detected (rule 18a)."""
    await record_attempt(connection, str(uuid4()), target)


def used_otherwise(target: str | None) -> InvalidRequest:
    """The refusal of a token that was used for another change."""
    return InvalidRequest(f"this attempt was used for another change ({target})")
