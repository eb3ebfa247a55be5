"""`POST /v1/ledgers/{id}/digests` of a bookie: digests of ranges, so that replicas are compared without
sending their entries. Autorecovery's checks use it, and the gateway before it accepts a loss.
"""

from typing import Annotated

from pydantic import Field, WithJsonSchema

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.quorum import QUORUM_MAX
from quorumlog.protocol.values import EntryId
from quorumlog.wire.bodies import Body

Range = Annotated[
    tuple[EntryId, EntryId],
    # Equivalent to `prefixItems`, which some OpenAPI readers do not know.
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": ID_MAX},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


class DigestsAsked(Body):
    """Ranges to digest, so that replicas are compared without sending their entries."""

    ranges: Annotated[tuple[Range, ...], Field(max_length=1000)]
    modulus: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 1
    residue: Annotated[int, Field(ge=0, lt=QUORUM_MAX)] = 0
    """Digest only entries whose id is `residue` modulo `modulus`: one write set of a striped
    ledger."""
    from_disk: bool = False
    """Wait for pending writes, and read every copy from the disk."""


class RangeDigest(Body):
    """SHA-256 over ledger, entry id, length and payload of the stored entries of a range.

    LACs and authentication codes are left out: a recovery writes an entry again with its own.
    """

    first: int
    last: int
    entries: int
    """How many entries of the requested residue are stored and readable."""
    present: tuple[Range, ...]
    """Ranges in the index, of any residue; at most 1,000."""
    digest: str
    damaged: tuple[Range, ...]
    """Entries of the requested residue that are in the index and unreadable."""


class DigestsBody(Body):
    """Digests of ranges. In limbo, an entry that is not present is unknown."""

    bookie: str
    ledger_id: int
    limbo: bool
    digests: tuple[RangeDigest, ...]
