"""What the bookie's plain HTTP takes and gives. The channel carries the same as frames."""

from quorumlog.wire.bodies import Body
from quorumlog.wire.digest_bodies import Range


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
