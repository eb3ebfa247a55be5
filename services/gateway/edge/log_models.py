"""The public bodies of logs as pydantic models."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from quorumlog.protocol.log import LIMITS, LogSettings
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.quorum import Quorum
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.models import (
    BASE64,
    DATE_TIME,
    Custom,
    Id,
    IdOrNone,
    Model,
    PayloadOut,
    Size,
    Text,
    WriterModel,
    members_of,
)
from services.gateway.logs.views import LogView

Digest = Literal["crc32c", "none"]
"""A log's ledgers have no password, so there is no key for a MAC."""
BatchCompression = Literal["none", "zstd"]


class LogCreate(Model):
    """A log to create. Everything is optional, and 0 switches a limit off."""

    ensemble_size: Size | None = None
    """E of each of its ledgers: 3, or Qw where that is larger."""
    write_quorum: Size | None = None
    """Qw: 3, or E where smaller."""
    ack_quorum: Size | None = None
    """Qa: Qw // 2 + 1."""
    digest: Digest = "crc32c"
    """How readers verify entries."""
    metadata: Custom = Field(default_factory=dict)
    allow_degraded: Literal[True] = True
    """Always: a takeover must work while a bookie is away."""
    roll_bytes: Id = 256 << 20
    """Bytes after which a ledger is closed."""
    roll_entries: Id = 0
    """Append requests after which a ledger is closed."""
    roll_seconds: Id = 0
    """Age at which a ledger is closed."""
    retention_bytes: Id = 0
    """Bytes that are kept at least; older ledgers beyond are dropped."""
    retention_seconds: Id = 0
    """For how long a closed ledger is kept."""
    batch_compression: BatchCompression = "none"
    """`zstd`: record batches are stored compressed where they shrink; readers get them as before."""

    deletion_protection: bool | None = Field(
        default=None,
        description="true: the log can't be deleted, truncated or overwritten until `PATCH` says false; its retention"
        " goes on. Of a log that exists: null takes what it has.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.settings()
        return self

    def settings(self) -> LogSettings:
        """The protocol's value. Raises: ValueError unless E >= Qw >= Qa."""
        return LogSettings(
            quorum=Quorum.of(self.ensemble_size, self.write_quorum, self.ack_quorum),
            digest=DigestKind(self.digest),
            **{name: getattr(self, name) for name in LIMITS},
            batch_compression=self.batch_compression,
            custom=tuple(sorted(self.metadata.items())),
        )


class LogPatch(Model):
    """What of a log is to be changed; what is null or left out stays. 0 switches a limit off."""

    roll_bytes: Id | None = None
    roll_entries: Id | None = None
    roll_seconds: Id | None = None
    retention_bytes: Id | None = None
    retention_seconds: Id | None = None
    deletion_protection: bool | None = None
    """false: the log may be deleted, truncated and overwritten again."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.limits and self.deletion_protection is None:
            raise ValueError("names nothing to change")
        return self

    @property
    def limits(self) -> dict[str, int]:
        """The limits to change, by name."""
        given = ((name, getattr(self, name)) for name in LIMITS)
        return {name: value for name, value in given if value is not None}


class LogSettingsModel(Model):
    """The settings of a log."""

    ensemble_size: Size
    write_quorum: Size
    ack_quorum: Size
    digest: Digest
    metadata: dict[str, str]
    roll_bytes: Id
    roll_entries: Id
    roll_seconds: Id
    retention_bytes: Id
    retention_seconds: Id
    batch_compression: BatchCompression


class LogLedger(Model):
    """One ledger of a log."""

    ledger_id: Id
    first_offset: Id | None
    """null while a roll waits for the end before it."""
    last_offset: IdOrNone | None
    """null while the ledger may grow."""
    state: Literal["OPEN", "IN_RECOVERY", "CLOSED"]


class Log(Model):
    """A log as it is now."""

    name: str
    settings: LogSettingsModel
    state: Literal["OPEN", "CLOSED"]
    first_offset: Id
    next_offset: Id
    """The next record's offset; all records before it are durable."""
    archived_through: Id | None
    """Records below it are kept elsewhere too; null if the log is not archived."""
    deletion_protection: bool
    """The log can't be deleted, truncated or overwritten."""
    ledgers: list[LogLedger]
    owner: WriterModel | None
    """The gateway that writes the log; null while none does."""
    version: Annotated[int, Field(ge=1)]
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]


def log_json(view: LogView) -> dict[str, Any]:
    """A log as the API shows it."""
    ledgers = [
        {
            "ledger_id": item.ledger_id,
            "first_offset": item.first_offset,
            "last_offset": item.last_offset,
            "state": view.states.get(item.ledger_id, "CLOSED"),
        }
        for item in view.log.items
    ]
    return members_of(Log, view.log, view, settings=view.log.settings.fields, ledgers=ledgers)


class LogList(Model):
    """One page of logs by name; `next` is the next `after`, null at the end."""

    logs: list[Log]
    next: str | None


class _RecordIn(Model):
    headers: dict[str, str] | None = None
    timestamp: Annotated[str, WithJsonSchema(DATE_TIME)] | None = None
    """The record's own time; by default the time of its append."""


class RecordData(_RecordIn):
    """A record as base64."""

    data: Annotated[str, WithJsonSchema(BASE64)]
    key: Annotated[str, WithJsonSchema(BASE64)] | None = None


class RecordText(_RecordIn):
    """A record that is text."""

    text: str
    key: str | None = None


class RecordJson(_RecordIn):
    """A record that is JSON, stored compact."""

    value: Any = Field(alias="json")
    key: str | None = None


class RecordBatch(Model):
    """Several records; all of them are appended, or none."""

    records: list[RecordData | RecordText | RecordJson] = Field(
        min_length=1, max_length=BATCH_ENTRIES_MAX
    )


class LogAppendedModel(Model):
    """All records of the request are durable, in one entry."""

    log: str
    first_offset: Id
    last_offset: Id
    ledger_id: Id
    entry_id: Id


class RecordOut(PayloadOut):
    """A record with its place. `key` is base64 beside `data`, else text, or `key_base64` if the key is no text."""

    offset: Id
    timestamp: Annotated[str, WithJsonSchema(DATE_TIME)]
    ledger_id: Id
    entry_id: Id
    key: str | None
    key_base64: Annotated[str, WithJsonSchema(BASE64)] | None = None
    headers: dict[str, str]


class LogRecords(Model):
    """Records, in order; go on at `next`."""

    log: str
    records: list[RecordOut]
    next: Id
    first_offset: Id
    closed: bool
    """The log is closed, and `next` is its end."""
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]


class LogOpen(Model):
    """The only writer that the log should have."""

    owner: Annotated[Text, Field(min_length=1, max_length=1024)]


class LogOpened(Model):
    """Appends need `Writer-Token: writer_token` from now on."""

    writer_token: Id
    next_offset: Id


class LogArchived(Model):
    """Records below `through` are kept elsewhere too, durably and checked."""

    through: Id
    expect: Id | None = None
    """`archived_through` as it was when the archiving began; else 412."""


class LogTruncate(Model):
    """Ledgers that end below `before` are dropped."""

    before: Id
