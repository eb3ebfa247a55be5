"""Bodies of the bookie's plain HTTP API. The channel carries the same content as frames."""

from dataclasses import dataclass

from quorumlog.wire.bodies import Body
from quorumlog.wire.rebuild_bodies import Range


class VerdictBody(Body):
    """The bookie's answer about a range of entries. Callers may rely only on the status `ok`, and
    on entries reported as absent. The body names the bookie and the range (rule 4).
    """

    bookie: str
    ledger_id: int
    first: int
    last: int
    status: str
    last_add_confirmed: int


class EntryBody(Body):
    """One entry, with the digest in hex and the payload in base64."""

    entry_id: int
    last_add_confirmed: int
    length: int
    digest: str
    payload: str


class EntriesBody(VerdictBody):
    """Stored entries of a range. An entry in neither `entries` nor `absent` is unknown."""

    entries: tuple[EntryBody, ...] = ()
    absent: tuple[Range, ...] = ()


class HeldBody(Body):
    """The bookie's stored data about one ledger."""

    bookie: str
    ledger_id: int
    fenced: bool
    limbo: bool
    last_add_confirmed: int
    highest_entry: int
    """The highest id of a stored entry; -1 if none is stored."""
    entries: int
    bytes: int
    ranges: tuple[Range, ...] | None = None
    """At most 1,000 ranges; None in a list of ledgers."""


class HeldList(Body):
    """A page of ledgers; `next` is the `after` of the next page."""

    bookie: str
    ledgers: tuple[HeldBody, ...]
    next: int | None = None


class ProcessBody(Body):
    """The bookie's name and the answering process's random token; available during startup too."""

    bookie: str
    process: str


@dataclass(slots=True)
class LimboProgress:
    """Progress since the start in restoring entries that older incarnations may have lost."""

    ledgers: int = 0
    """Number of ledgers in limbo now."""
    cleared: int = 0
    checked_entries: int = 0
    """Number of entries that belong on this bookie by the metadata, in ledgers that have left limbo."""
    copied_entries: int = 0
    missing_entries: int = 0
    """Number of entries that the final checks found missing and queued for repair."""


class DamagedEntries(Body):
    """Entries whose indexed copy is unreadable. They are unknown, never absent, until a repair."""

    ledger_id: int
    ranges: tuple[Range, ...]
    segment: int
    offset: int


class DamagedStretch(Body):
    """Bytes of the log that fail their checksum."""

    segment: int
    start: int
    end: int
    reason: str


class DamageBody(Body):
    """Damage found by reads and the scrubber, and not repaired yet."""

    bookie: str
    entries: tuple[DamagedEntries, ...]
    stretches: tuple[DamagedStretch, ...]
    is_cut: bool
    """Whether the list is incomplete. Request the list again when the listed damage is repaired and
    the scrubber has completed a pass.
    """


class MaintenancePut(Body):
    """`PUT /v1/maintenance`: pause scrubbing and compaction until a resume or a restart."""

    paused: bool


@dataclass(slots=True)
class ScrubProgress:
    """The scrubber's progress since the process started."""

    paused: bool = False
    segment: int = 0
    """The last segment checked in this pass; 0 between passes."""
    checked_bytes: int = 0
    passes: int = 0
    damaged: int = 0


class InfoBody(Body):
    """The state of a bookie."""

    bookie: str
    cluster_id: str
    state: str
    zone: str
    durability: str
    free_bytes: int
    read_only_below_bytes: int
    """The free space below which the bookie rejects writers' entries (`READ_ONLY_BELOW_BYTES`)."""
    disk_low: bool
    """Whether free space is below `WARN_BELOW_BYTES`: writers' entries will soon be rejected."""
    log_segment: int
    log_offset: int
    pending_bytes: int
    was_clean: bool
    copied_records: int
    limbo: LimboProgress | None
    scrub: ScrubProgress
    damages: int
    """Number of known damaged places (`GET /v1/damage`)."""
    counters: dict[str, int]
    """Counters since the process started. `log_sync_us` (microseconds) divided by `log_syncs` is the
    mean time of a sync.
    """
