"""Pydantic models of the request and response bodies of logs in the public API."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from quorumlog.protocol.batch import TTL_S_MAX
from quorumlog.protocol.log import LIMITS, LogSettings
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.quorum import Quorum
from services.gateway.edge import models
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.logs.views import LogView

Digest = Literal["crc32c", "none"]
"""Digests that a log may use. No MAC: a log's ledgers have no password to derive a key from."""
BatchCompression = Literal["none", "zstd"]
CleanupPolicy = Literal["delete", "compact", "compact,delete"]
Percent = Annotated[int, Field(strict=True, ge=0, le=100)]


class LogCreate(models.Model):
    """A log to create. Every setting is optional, and 0 switches a limit off."""

    ensemble_size: models.Size | None = None
    """Ensemble size E of each of the log's ledgers. Default: 3, or Qw if Qw is larger."""
    write_quorum: models.Size | None = None
    """Write quorum Qw of each ledger. Default: 3, or E if E is smaller."""
    ack_quorum: models.Size | None = None
    """Ack quorum Qa of each ledger. Default: Qw // 2 + 1."""
    digest: Digest = "crc32c"
    """How readers verify entries."""
    metadata: models.Custom = Field(default_factory=dict)
    allow_degraded: Literal[True] = True
    """Must be true: a takeover must succeed while a bookie is unavailable."""
    roll_bytes: models.Id = 256 << 20
    """Size in bytes at which the log closes its open ledger and starts the next one."""
    roll_entries: models.Id = 0
    """Append requests after which the log closes its open ledger and starts the next one."""
    roll_seconds: models.Id = 0
    """Age in seconds at which the log closes its open ledger and starts the next one."""
    retention_bytes: models.Id = 0
    """The log keeps at least this many of its newest bytes; it drops older ledgers beyond them."""
    retention_seconds: models.Id = 0
    """Seconds for which the log keeps a closed ledger."""
    merge_below_bytes: models.Id = 64 << 20
    """Size in bytes below which closed ledgers are merged into larger ones; 0: they never are."""
    cleanup_policy: CleanupPolicy = "delete"
    """`delete`: the retention drops the oldest records. `compact`: the newest record of each key
    stays, and each record needs a key. `compact,delete`: both."""
    min_compaction_lag_s: models.Id = 0
    """Seconds for which compaction leaves a closed ledger as it is."""
    delete_retention_s: models.Id = 86_400
    """Seconds for which compaction keeps tombstones, which are records with the value null."""
    max_dirty_percent: Percent = 50
    """Compaction begins when at least this share of the bytes in closed ledgers is not compacted.
    """
    batch_compression: BatchCompression = "none"
    """`zstd` stores a record batch compressed if it shrinks. Readers get the same records."""

    deletion_protection: bool | None = Field(
        default=None,
        description="true: the log can't be deleted, truncated or overwritten until `PATCH` sets"
        " false; retention still applies. null accepts the current value of an existing log.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.settings()
        return self

    def settings(self) -> LogSettings:
        """Convert to the protocol's `LogSettings`. Raises: ValueError unless E >= Qw >= Qa."""
        return LogSettings(
            quorum=Quorum.of(self.ensemble_size, self.write_quorum, self.ack_quorum),
            digest=DigestKind(self.digest),
            **{name: getattr(self, name) for name in LIMITS},
            batch_compression=self.batch_compression,
            custom=tuple(sorted(self.metadata.items())),
        )


class LogPatch(models.Model):
    """Settings of a log to change. A null or missing member stays unchanged; 0 disables a limit."""

    roll_bytes: models.Id | None = None
    roll_entries: models.Id | None = None
    roll_seconds: models.Id | None = None
    retention_bytes: models.Id | None = None
    retention_seconds: models.Id | None = None
    merge_below_bytes: models.Id | None = None
    cleanup_policy: CleanupPolicy | None = None
    min_compaction_lag_s: models.Id | None = None
    delete_retention_s: models.Id | None = None
    max_dirty_percent: Percent | None = None
    deletion_protection: bool | None = None
    """true: the log can't be deleted, truncated or overwritten; false: it can."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.limits and self.deletion_protection is None:
            raise ValueError("must name at least one limit, or deletion_protection")
        return self

    @property
    def limits(self) -> dict[str, int | str]:
        """The limits to change, by name."""
        given = ((name, getattr(self, name)) for name in LIMITS)
        return {name: value for name, value in given if value is not None}


class LogSettingsModel(models.Model):
    """The settings of a log."""

    ensemble_size: models.Size
    write_quorum: models.Size
    ack_quorum: models.Size
    digest: Digest
    metadata: dict[str, str]
    roll_bytes: models.Id
    roll_entries: models.Id
    roll_seconds: models.Id
    retention_bytes: models.Id
    retention_seconds: models.Id
    merge_below_bytes: models.Id
    cleanup_policy: CleanupPolicy
    min_compaction_lag_s: models.Id
    delete_retention_s: models.Id
    max_dirty_percent: Percent
    batch_compression: BatchCompression


class LogLedger(models.Model):
    """One ledger of a log."""

    ledger_id: models.Id
    first_offset: models.Id | None
    """Offset of the ledger's first record; null while the end of the previous ledger is unknown."""
    last_offset: models.IdOrNone | None
    """Offset of the ledger's last record; null while the ledger may grow."""
    state: Literal["OPEN", "IN_RECOVERY", "CLOSED"]


class Log(models.Model):
    """A log as it is now."""

    name: str
    settings: LogSettingsModel
    state: Literal["OPEN", "CLOSED"]
    first_offset: models.Id
    next_offset: models.Id
    """The next record's offset; all records before it are durable."""
    archived_through: models.Id | None
    """Records below this offset are archived elsewhere too; null if the log is not archived."""
    deletion_protection: bool
    """Whether the log is protected: it can't be deleted, truncated or overwritten."""
    ledgers: list[LogLedger]
    owner: models.WriterModel | None
    """The gateway that owns the log; null while the log has no owner."""
    version: Annotated[int, Field(ge=1)]
    created_at: Annotated[str, WithJsonSchema(models.DATE_TIME)]


def log_json(view: LogView) -> dict[str, Any]:
    """Build the JSON object of a log."""
    ledgers = [
        {
            "ledger_id": item.ledger_id,
            "first_offset": item.first_offset,
            "last_offset": item.last_offset,
            "state": view.states.get(item.ledger_id, "CLOSED"),
        }
        for item in view.log.items
    ]
    return models.members_of(
        Log, view.log, view, settings=view.log.settings.fields, ledgers=ledgers
    )


class LogList(models.Model):
    """A page of logs, sorted by name. `next`: the next page's `after`, or null at the end."""

    logs: list[Log]
    next: str | None


class _RecordIn(models.Model):
    headers: dict[str, str] | None = None
    timestamp: Annotated[str, WithJsonSchema(models.DATE_TIME)] | None = None
    """Time of the record. Default: the time of its append."""
    ttl_s: Annotated[int, Field(strict=True, ge=1, le=TTL_S_MAX)] | None = None
    """Seconds after its append when the record expires. Not for logs that are compacted."""


class RecordData(_RecordIn):
    """A record whose value and key are base64. The value null, with a key, makes it a tombstone."""

    data: Annotated[str, WithJsonSchema(models.BASE64)] | None
    key: Annotated[str, WithJsonSchema(models.BASE64)] | None = None


class RecordText(_RecordIn):
    """A record whose value and key are text. The value null, with a key, makes it a tombstone."""

    text: str | None
    key: str | None = None


class RecordJson(_RecordIn):
    """A record whose value is JSON, which is stored without whitespace."""

    value: Any = Field(alias="json")
    key: str | None = None


class RecordBatch(models.Model):
    """A batch of records, appended atomically."""

    records: list[RecordData | RecordText | RecordJson] = Field(
        min_length=1, max_length=BATCH_ENTRIES_MAX
    )


class LogAppendedModel(models.Model):
    """Response to an append: all records of the request are durable, in one entry."""

    log: str
    first_offset: models.Id
    last_offset: models.Id
    ledger_id: models.Id
    entry_id: models.Id


class RecordOut(models.PayloadOut):
    """A record with its offset and entry. With `encoding=base64`, `key` is base64. With the other
    encodings, `key` is text, or `key_base64` has the key if it isn't UTF-8.
    """

    offset: models.Id
    timestamp: Annotated[str, WithJsonSchema(models.DATE_TIME)]
    ledger_id: models.Id
    entry_id: models.Id
    key: str | None
    key_base64: Annotated[str, WithJsonSchema(models.BASE64)] | None = None
    headers: dict[str, str]


class LogRecords(models.Model):
    """A page of records in order. The next page begins at the offset `next`."""

    log: str
    records: list[RecordOut]
    next: models.Id
    first_offset: models.Id
    closed: bool
    """Whether the log is closed and `next` is its end."""
    created_at: Annotated[str, WithJsonSchema(models.DATE_TIME)]


class RecordKey(models.Model):
    """A key, and the offset of its last record in a page. `key` and `key_base64`: as in a record."""

    offset: models.Id
    key: str | None
    key_base64: Annotated[str, WithJsonSchema(models.BASE64)] | None = None


class LogKeys(models.Model):
    """A page of keys, in the order of the offsets. The next page begins at the offset `next`."""

    log: str
    keys: list[RecordKey]
    next: models.Id
    first_offset: models.Id
    closed: bool
    """Whether the log is closed and `next` is its end."""
    created_at: Annotated[str, WithJsonSchema(models.DATE_TIME)]


class LogOpen(models.Model):
    """Request to open a log for one writer."""

    owner: Annotated[models.Text, Field(min_length=1, max_length=1024)]


class LogOpened(models.Model):
    """Response to opening a log. Appends now need the header `Writer-Token` with `writer_token`."""

    writer_token: models.Id
    next_offset: models.Id


class LogArchived(models.Model):
    """Report that records below the offset `through` are stored elsewhere, durably and checked."""

    through: models.Id
    expect: models.Id | None = None
    """Value of `archived_through` when archiving began; if it has changed, the error is 412."""


class LogTruncate(models.Model):
    """Request to truncate a log: drop the ledgers that end below the offset `before`."""

    before: models.Id
