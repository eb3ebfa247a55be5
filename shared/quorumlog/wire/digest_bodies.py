"""`POST /v1/ledgers/{id}/digests` of a bookie: what it holds of ranges, compared without being read
over the wire. Asked by autorecovery's checks and before a loss is accepted.
"""

from typing import Annotated

from pydantic import ConfigDict, Field, WithJsonSchema

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.quorum import QUORUM_MAX
from quorumlog.wire.bodies import Body

_Id = Annotated[int, Field(ge=0, le=ID_MAX)]
Range = Annotated[
    tuple[_Id, _Id],
    # The same as `prefixItems`, which some readers of OpenAPI do not know.
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": ID_MAX},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


class _Told(Body):
    """A bookie's word. A newer bookie may say more: what is not known here is left out."""

    model_config = ConfigDict(extra="ignore")


class DigestsAsked(Body):
    """Ranges to be digested, for comparing replicas without reading them over the wire."""

    ranges: Annotated[tuple[Range, ...], Field(max_length=1000)]
    modulus: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 1
    residue: Annotated[int, Field(ge=0, lt=QUORUM_MAX)] = 0
    """Only entries that are `residue` modulo `modulus`: one write set of a striped ledger."""
    from_disk: bool = False
    """What is on its way to the disk is waited for, and all is read back from there."""


class RangeDigest(_Told):
    """SHA-256 over ledger, entry, length and payload of what is held of a range.

    LACs and authentication codes are left out: a recovery writes an entry again with its own.
    """

    first: int
    last: int
    entries: int
    """How many of the asked kind are held and could be read."""
    present: tuple[Range, ...]
    """What the index names of the range, of any kind; at most 1,000 ranges."""
    digest: str
    damaged: tuple[Range, ...]
    """Entries of the asked kind that should be here and could not be read."""


class DigestsBody(_Told):
    """Digests of ranges. In limbo, what is not present is unknown."""

    bookie: str
    ledger_id: int
    limbo: bool
    digests: tuple[RangeDigest, ...]
