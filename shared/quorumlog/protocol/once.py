"""The name shared by all copies of a request, so that only one copy is carried out (rule 6a)."""

from dataclasses import dataclass
from typing import Annotated

from quorumlog.protocol.values import Attempt, Bounds


@dataclass(frozen=True, slots=True)
class Once:
    """The name of a request, made by the request's first sender.

    An attempt token (rule 6) names one change of one version of metadata. The name of a request
    is the same in all retries, at all gateways, even if the change is made from newer metadata.
    """

    token: Attempt
    """A UUID derived from the caller, the operation, its target and the caller's key."""
    content: Annotated[str, Bounds(pattern="^[0-9a-f]{32}$")]
    """A keyed digest of the request. Using one token with two digests is an error."""
