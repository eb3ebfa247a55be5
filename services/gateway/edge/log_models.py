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
"""Digests that a log may use. A MAC needs a password, which a log's ledgers don't have."""
BatchCompression = Literal["none", "zstd"]
CleanupPolicy = Literal["delete", "compact", "compact,delete"]
Percent = Annotated[int, Field(strict=True, ge=0, le=100)]


class LogCreate(models.Model):
    """A log to create. All settings are optional. 0 disables a limit."""

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
    """Must be true, because a takeover must succeed while a bookie is unavailable."""
    roll_bytes: models.Id = 256 << 20
    """Size in bytes at which the log closes its open ledger and starts the next one."""
    roll_entries: models.Id = 0
    """Number of append requests after which the log closes its open ledger and starts the next."""
    roll_seconds: models.Id = 0
    """Age in seconds at which the log closes its open ledger and starts the next one."""
    retention_bytes: models.Id = 0
    """Minimum number of newest bytes that the log keeps. Older ledgers are dropped."""
    retention_seconds: models.Id = 0
    """Seconds for which the log keeps a closed ledger."""
    merge_below_bytes: models.Id = 64 << 20
    """Size in bytes below which closed ledgers are merged into larger ledgers. 0: no merging."""
    cleanup_policy: CleanupPolicy = "delete"
    """`delete`: retention drops the oldest records. `compact`: each record needs a key, and the
    newest record of each key is kept. `compact,delete`: both."""
    min_compaction_lag_s: models.Id = 0
    """Seconds for which compaction does not change a closed ledger."""
    delete_retention_s: models.Id = 86_400
    """Seconds for which compaction keeps tombstones, which are records with the value null."""
    max_dirty_percent: Percent = 50
    """Share of uncompacted bytes in closed ledgers at which compaction begins."""
    batch_compression: BatchCompression = "none"
    """With `zstd`, record batches are stored compressed if that saves space. Reads are unchanged."""

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
    """Changes of a log's settings. Null or missing settings stay unchanged. 0 disables a limit."""

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
    """Whether the log is protected from deletion, truncation and overwriting."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.limits and self.deletion_protection is None:
            raise ValueError("must have at least one limit, or deletion_protection")
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
    """The next record's offset. All earlier records are durable."""
    archived_through: models.Id | None
    """Records below this offset are also archived elsewhere. Null if the log is not archived."""
    deletion_protection: bool
    """Whether the log is protected from deletion, truncation and overwriting."""
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
    """Time of the record. Default: the time of the append."""
    ttl_s: Annotated[int, Field(strict=True, ge=1, le=TTL_S_MAX)] | None = None
    """Seconds from the append until the record expires. Not allowed for compacted logs."""


class RecordData(_RecordIn):
    """A record with value and key in base64. A record with a key and a null value is a tombstone."""

    data: Annotated[str, WithJsonSchema(models.BASE64)] | None
    key: Annotated[str, WithJsonSchema(models.BASE64)] | None = None


class RecordText(_RecordIn):
    """A record with value and key as text. A record with a key and a null value is a tombstone."""

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
    """Response to an append. All records of the request are durable, in one entry."""

    log: str
    first_offset: models.Id
    last_offset: models.Id
    ledger_id: models.Id
    entry_id: models.Id


class RecordOut(models.PayloadOut):
    """A record with its offset and entry. With `encoding=base64`, `key` is base64. With other
    encodings, `key` is text, and `key_base64` replaces `key` if the key isn't UTF-8.
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
    """A key, and the offset of its last record in the page. The key is encoded as in a record."""

    offset: models.Id
    key: str | None
    key_base64: Annotated[str, WithJsonSchema(models.BASE64)] | None = None


class LogKeys(models.Model):
    """A page of keys, sorted by offset. The next page begins at the offset `next`."""

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
    """Report that the records below the offset `through` are durably archived and verified."""

    through: models.Id
    expect: models.Id | None = None
    """Value of `archived_through` when archiving began. If it has changed, the response is 412."""


class LogTruncate(models.Model):
    """Request to drop the ledgers of a log that end below the offset `before`."""

    before: models.Id
