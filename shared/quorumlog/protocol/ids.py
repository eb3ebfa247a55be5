"""Special ids, and the names of members. A member of an ensemble is written `name@incarnation`
(`bookie-1@1`): it names the data that a bookie holds, not an address (rule 15).
"""

from typing import Final

NO_ENTRY: Final = -1
"""The id before the first entry: the LAC of a ledger in which nothing is confirmed."""

ID_MAX: Final = 2**63 - 1
"""The greatest ledger or entry id (BookKeeper's ids are signed 64-bit)."""

NO_LEDGER: Final = -1
"""A value below all ledger ids, where there is no ledger."""

ASSIGNED_ID_END: Final = 2**52
"""Callers choose ledger ids from here on; metadata assigns the ids below, counting up from 1. So
the highest id below this bound that a bookie holds was assigned, and a database that went back
assigns only higher ids (rule 17).
"""

KEY_BYTES: Final = 32
"""The length of a ledger key."""


def member_name(member: str) -> str:
    """The bookie's name without its incarnation."""
    return member.rpartition("@")[0]


def member_incarnation(member: str) -> int:
    """The incarnation in a member's name. Raises ValueError when there is none."""
    return int(member.rpartition("@")[2])


def member_of(name: str, incarnation: int) -> str:
    """The member `name@incarnation`."""
    return f"{name}@{incarnation}"
