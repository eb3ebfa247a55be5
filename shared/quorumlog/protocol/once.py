"""The name that all copies of one client's request share, so that it is carried out once (rule 6a)."""

from dataclasses import dataclass
from typing import Annotated

from quorumlog.protocol.values import Attempt, Bounds


@dataclass(frozen=True, slots=True)
class Once:
    """The name of a request, made by its first sender.

    Unlike the attempt token of a compare-and-swap (rule 6), which names one change of one row, it goes through every
    retry, at whichever gateway, and stays the same when the change is made from a newer row.
    """

    token: Attempt
    """A UUID, made of the caller, the operation, what it is on, and the caller's key."""
    content: Annotated[str, Bounds(pattern="^[0-9a-f]{32}$")]
    """A keyed digest of what is asked for: the token with another content is a mistake of the caller."""
