"""Types of the JSON objects that `info()` and similar methods return for logs, ledgers, consumers
and the cluster.

The objects are plain dicts at run time, so they also contain the members that a newer server adds.
"""

from typing import Any, Literal, NotRequired, TypedDict


class WriterInfo(TypedDict):
    """A process that writes a ledger or a log."""

    id: str
    url: str
    internal_url: str


class LogSettingsInfo(TypedDict):
    """The settings of a log. A limit of 0 means that there is no limit."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest: str
    metadata: dict[str, str]
    roll_bytes: int
    roll_entries: int
    roll_seconds: int
    retention_bytes: int
    retention_seconds: int
    merge_below_bytes: int
    cleanup_policy: str
    min_compaction_lag_s: int
    delete_retention_s: int
    max_dirty_percent: int
    batch_compression: str


class LogLedgerInfo(TypedDict):
    """A ledger of a log. `last_offset` is None until the ledger is closed."""

    ledger_id: int
    first_offset: int
    last_offset: int | None
    state: str


class LogInfo(TypedDict):
    """The current state of a log. Records below `next_offset` are durable. Times are RFC 3339."""

    name: str
    settings: LogSettingsInfo
    state: Literal["OPEN", "CLOSED"]
    first_offset: int
    next_offset: int
    archived_through: int | None
    deletion_protection: bool
    ledgers: list[LogLedgerInfo]
    owner: WriterInfo | None
    version: int
    created_at: str


class FragmentInfo(TypedDict):
    """A fragment: `bookies` store the entries from `first_entry` to the next fragment."""

    first_entry: int
    bookies: list[str]


class LedgerInfo(TypedDict):
    """The current state of a ledger.

    `last_entry` and `length` (bytes) are None until the ledger is closed.
    """

    ledger_id: int
    state: Literal["OPEN", "IN_RECOVERY", "CLOSED"]
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest: str
    last_entry: int | None
    length: int | None
    fragments: list[FragmentInfo]
    metadata: dict[str, str]
    log: str | None
    created_at: str
    version: int
    writer: WriterInfo | None
    degraded: NotRequired[bool]
    may_lack_entries: NotRequired[bool]
    lost_entries: NotRequired[list[dict[str, int]]]
    transaction: NotRequired[str | None]
    partition: NotRequired[int | None]
    attempt: NotRequired[int | None]


class LeaseInfo(TypedDict):
    """A consumer's lease and its holder. The lease may have expired."""

    holder: str
    fencing_token: int
    lease_ms: int


class LagInfo(TypedDict):
    """A consumer's lag in records, bytes and time. A value is None if it can't be determined now."""

    records: int
    bytes: int | None
    ms: int | None


class ConsumerInfo(TypedDict):
    """The current state of a consumer. `offset` is the first record that is not processed yet."""

    log: str
    consumer: str
    offset: int
    version: int
    log_created_at: str
    committed_at: str | None
    lease: LeaseInfo | None
    state: Literal["ok", "log-replaced", "offset-truncated"]
    lag: LagInfo | None


class QueueInfo(TypedDict):
    """The current state of a work queue. Records below `floor` are done; `depth` records are not."""

    log: str
    queue: str
    state: Literal["ok", "log-replaced"]
    log_created_at: str
    version: int
    lease_ms: int
    max_attempts: int | None
    dead_letter_log: str | None
    order: Literal["none", "key"]
    max_in_flight: int
    floor: int
    next: int
    depth: int
    in_flight: int
    unsettled: int
    redelivered: int
    dead: int
    dying: int
    dead_letter_error: str | None
    lost: int


class BookieInfo(TypedDict):
    """A registered bookie."""

    id: str
    state: Literal["writable", "read-only", "draining", "lost"]
    url: str
    zone: str
    free_bytes: int


class ClusterInfo(TypedDict):
    """Every service with its state, and the ledgers that lack copies."""

    cluster_id: str
    bookies: list[BookieInfo]
    services: list[dict[str, Any]]
    writer: WriterInfo
    degraded_ledgers: list[int]
    quarantined: list[str]
    missing_witnesses: list[dict[str, Any]]
    kept_count: int
    kept_ledgers: list[dict[str, Any]]
    under_replicated_count: int
    under_replicated: list[dict[str, Any]]
