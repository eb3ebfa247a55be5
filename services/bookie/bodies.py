"""What the bookie's plain HTTP takes and gives. The channel carries the same as frames."""

from typing import Annotated

from pydantic import Field, WithJsonSchema

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.quorum import QUORUM_MAX
from quorumlog.wire.bodies import Body

Id = Annotated[int, Field(ge=0, le=ID_MAX)]
Range = Annotated[
    tuple[Id, Id],
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


class VerdictBody(Body):
    """What this bookie says. Only `ok` and what is named absent are knowledge (rule 4: it names
    who says it, and about what).
    """

    bookie: str
    ledger_id: int
    first: int
    last: int
    status: str
    last_add_confirmed: int


class EntryBody(Body):
    """One entry; digest as hex, payload as base64."""

    entry_id: int
    last_add_confirmed: int
    length: int
    digest: str
    payload: str


class EntriesBody(VerdictBody):
    """What is held of a range. What neither `entries` nor `absent` names is unknown."""

    entries: tuple[EntryBody, ...] = ()
    absent: tuple[Range, ...] = ()


class HeldBody(Body):
    """What is held of a ledger."""

    bookie: str
    ledger_id: int
    fenced: bool
    limbo: bool
    last_add_confirmed: int
    highest_entry: int
    """No entry above it is held; -1 where none is."""
    entries: int
    bytes: int
    ranges: tuple[Range, ...] | None = None
    """Only where one ledger is asked for; at most 1,000 of them."""


class HeldList(Body):
    """A page of ledgers; `next` is the `after` of the next page."""

    bookie: str
    ledgers: tuple[HeldBody, ...]
    next: int | None = None


class DigestsAsked(Body):
    """Ranges to be digested, for comparing replicas without reading them over the wire."""

    ranges: Annotated[tuple[Range, ...], Field(max_length=1000)]
    modulus: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 1
    residue: Annotated[int, Field(ge=0, lt=QUORUM_MAX)] = 0
    """Only entries that are `residue` modulo `modulus`: one write set of a striped ledger."""
    from_disk: bool = False
    """What is on its way to the disk is waited for, and all is read back from there."""


class RangeDigest(Body):
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


class DigestsBody(Body):
    """Digests of ranges. In limbo, what is not present is unknown."""

    bookie: str
    ledger_id: int
    limbo: bool
    digests: tuple[RangeDigest, ...]


class ProcessBody(Body):
    """Who answers here, also while it starts: the bookie's name, and a token that the process drew
    when it began.
    """

    bookie: str
    process: str


class LimboBody(Body):
    """How far this incarnation is with what older ones may have lost, since the process began."""

    ledgers: int
    """In limbo now."""
    cleared: int
    checked_entries: int
    copied_entries: int
    missing_entries: int
    """Found missing when all seemed to be here, and queued for repair."""


class DamagedEntries(Body):
    """Entries that should be here and can't be read: unknown, never absent. Repair replaces them."""

    ledger_id: int
    ranges: tuple[Range, ...]
    segment: int
    offset: int


class DamagedStretch(Body):
    """Bytes of the log that are not what was written."""

    segment: int
    start: int
    end: int
    reason: str


class DamageBody(Body):
    """What reads and the scrubber found damaged and nobody has repaired yet."""

    bookie: str
    entries: tuple[DamagedEntries, ...]
    stretches: tuple[DamagedStretch, ...]
    is_cut: bool
    """There is more than is kept; look again when these are repaired."""


class MaintenancePut(Body):
    """`PUT /v1/maintenance`: whether scrubbing and compaction wait, until the next start."""

    paused: bool


class ScrubBody(Body):
    """How far the scrubber is, since the process began."""

    paused: bool
    segment: int
    """The last segment that was checked in this pass; 0 between passes."""
    checked_bytes: int
    passes: int
    damaged: int


class InfoBody(Body):
    """This bookie."""

    bookie: str
    cluster_id: str
    state: str
    zone: str
    durability: str
    free_bytes: int
    disk_low: bool
    """Less room than `WARN_BELOW_BYTES`: soon it takes no entries."""
    log_segment: int
    log_offset: int
    pending_bytes: int
    was_clean: bool
    copied_records: int
    limbo: LimboBody | None
    scrub: ScrubBody
    damages: int
    """Places known to be damaged (`GET /v1/damage`)."""
    counters: dict[str, int]
