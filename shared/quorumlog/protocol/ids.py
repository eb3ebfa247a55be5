"""Special ids, and the names of members. An ensemble's member is written `name@incarnation`
(`bookie-1@1`), and stands for the data that a bookie holds, not for an address (rule 15).
"""

from typing import Final

NO_ENTRY: Final = -1
"""The id before the first entry: the LAC of a ledger in which nothing is confirmed."""

ID_MAX: Final = 2**63 - 1
"""The greatest ledger or entry id (BookKeeper's ids are signed 64-bit)."""

NO_LEDGER: Final = -1
"""A value below all ledger ids, which means that there is no ledger."""

ASSIGNED_ID_END: Final = 2**52
"""The first ledger id that callers may choose. The metadata service assigns lower ids, counting up
from 1. The highest id below this bound on any bookie is therefore an assigned id. After a restore
from a backup, the database assigns only higher ids (rule 17).
"""

KEY_BYTES: Final = 32
"""The length of a ledger key."""


def member_name(member: str) -> str:
    """The bookie's name without its incarnation."""
    return member.rpartition("@")[0]


def member_incarnation(member: str) -> int:
    """The incarnation in a member's name. Raises ValueError if the name has none."""
    return int(member.rpartition("@")[2])


def member_of(name: str, incarnation: int) -> str:
    """The member `name@incarnation`."""
    return f"{name}@{incarnation}"
