"""Bodies of the metadata service's API about logs, as strict pydantic models.

A log is one row that changes by compare-and-swap, as a ledger is (`bodies.py`). The remembered answers
of producers travel as plain lists: there may be thousands.
"""

from typing import Annotated, Final, Literal, Self, cast

from pydantic import Field, StringConstraints, model_validator

from quorumlog.protocol.batch import STREAM_SEQ_BYTES_MAX
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import (
    LIMITS,
    LOG_LEDGERS_MAX,
    PRODUCERS_MAX,
    Answer,
    Expiry,
    LogItem,
    LogMetadata,
    LogSettings,
    LogState,
    Producer,
)
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.quorum import QUORUM_MAX, Quorum
from quorumlog.wire.bodies import (
    HEADS_MAX,
    QUORUM_SIZES,
    Attempt,
    Body,
    LedgerId,
    LogName,
    OnceBody,
    Text,
    Version,
    WriterBody,
    fields_of,
)

BatchCompression = Literal["none", "zstd"]
Number = Annotated[int, Field(ge=0, le=ID_MAX)]
AnswerRow = tuple[Number, Number, Annotated[int, Field(ge=-1, le=ID_MAX)], LedgerId, Number, Text]
"""seq, first offset, last offset (one below the first where a request without records ended the log), ledger, entry,
content."""

_SAME: Final = (
    "name", "version", "attempt", "state", "first_offset", "next_offset", "writer_token", "opened_by",
    "forgotten_end", "appended_ms", "archived_through", "deletion_protection", "stream_seq", "created_at",
    "forked_at",
)  # fmt: skip
"""Fields of settings and of rows that the protocol's values have too, under the same names."""


class ProducerBody(Body):
    """A log's record of one producer (rule 26)."""

    id: Text
    epoch: Number
    seen_ms: Annotated[int, Field(ge=-(2**63), le=ID_MAX)]
    answers: tuple[AnswerRow, ...]

    def to_core(self) -> Producer:
        """The protocol's value."""
        return Producer(
            self.id, self.epoch, self.seen_ms, tuple(Answer(*answer) for answer in self.answers)
        )

    @classmethod
    def from_core(cls, core: Producer) -> "ProducerBody":
        """The body that carries a protocol value."""
        answers = tuple(
            (a.seq, a.first_offset, a.last_offset, a.ledger_id, a.entry_id, a.content)
            for a in core.answers
        )
        return cls(id=core.id, epoch=core.epoch, seen_ms=core.seen_ms, answers=answers)


class LogItemBody(Body):
    """One ledger of a log."""

    ledger_id: LedgerId
    first_offset: Number | None
    last_offset: Annotated[int, Field(ge=-1, le=ID_MAX)] | None = None
    producers: tuple[ProducerBody, ...] = Field(default=(), max_length=PRODUCERS_MAX)
    bytes: Number = 0
    sealed_ms: Number = 0
    published_ms: Number = 0

    def to_core(self) -> LogItem:
        """The protocol's value."""
        producers = tuple(producer.to_core() for producer in self.producers)
        return LogItem(**dict(self) | {"producers": producers})

    @classmethod
    def from_core(cls, core: LogItem) -> "LogItemBody":
        """The body that carries a protocol value."""
        producers = tuple(map(ProducerBody.from_core, core.producers))
        return cls(**fields_of(core, cls.model_fields) | {"producers": producers})


class LogSettingsBody(Body):
    """The settings of a log: zero switches a limit off."""

    ensemble_size: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 3
    write_quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 3
    ack_quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 2
    digest: DigestKind = DigestKind.CRC32C
    roll_bytes: Number = 256 * 1024 * 1024
    roll_entries: Number = 0
    roll_seconds: Number = 0
    retention_bytes: Number = 0
    retention_seconds: Number = 0
    batch_compression: BatchCompression = "none"
    metadata: dict[Text, Text] = Field(default_factory=dict)

    def to_core(self) -> LogSettings:
        """The protocol's value. Raises ValueError unless E >= Qw >= Qa."""
        return LogSettings(
            quorum=Quorum(self.ensemble_size, self.write_quorum, self.ack_quorum),
            digest=self.digest.value,
            custom=tuple(sorted(self.metadata.items())),
            **fields_of(self, LIMITS),
            batch_compression=self.batch_compression,
        )

    @classmethod
    def from_core(cls, core: LogSettings) -> "LogSettingsBody":
        """The body that carries a protocol value."""
        return cls(
            digest=DigestKind(core.digest),
            metadata=dict(core.custom),
            **fields_of(core.quorum, QUORUM_SIZES),
            **fields_of(core, LIMITS),
            batch_compression=cast("BatchCompression", core.batch_compression),
        )


class ExpiryBody(Body):
    """A log that expires without use, and the process that remembers the last use (ADR 40)."""

    idle_s: Number
    keeper: WriterBody
    term: Text

    def to_core(self) -> Expiry:
        """The protocol's value."""
        return Expiry(self.idle_s, self.keeper.to_core(), self.term)

    @classmethod
    def from_core(cls, core: Expiry) -> "ExpiryBody":
        """The body that carries a protocol value."""
        keeper = WriterBody(**fields_of(core.keeper, WriterBody.model_fields))
        return cls(idle_s=core.idle_s, keeper=keeper, term=core.term)


class LogRow(Body):
    """One log's row as the metadata service keeps it. A row to be created has the version 1; the versions
    of a name that was used before continue where they ended.
    """

    name: LogName
    settings: LogSettingsBody
    items: tuple[LogItemBody, ...] = Field(default=(), max_length=LOG_LEDGERS_MAX)
    version: Version = 1
    attempt: Attempt | Literal[""] = ""
    """The token of the change that made this version; empty for a row from before tokens were kept."""
    state: LogState = LogState.OPEN
    first_offset: Number = 0
    next_offset: Number | None = None
    writer_token: Number = 0
    opened_by: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    forgotten_end: Number = 0
    appended_ms: Number = 0
    archived_through: Number | None = None
    deletion_protection: bool = False
    stream_seq: Annotated[Text, StringConstraints(max_length=STREAM_SEQ_BYTES_MAX)] | None = None
    expiry: ExpiryBody | None = None
    forked_at: Number | None = None
    created_at: Text = ""
    read_ms: Number = 0
    """The database's clock when the row was read; not stored, and 0 in rows that are sent to the service."""

    @model_validator(mode="after")
    def _keeps_the_invariants(self) -> Self:
        self.to_core().check()
        return self

    def to_core(self) -> LogMetadata:
        """The protocol's value."""
        return LogMetadata(
            settings=self.settings.to_core(),
            items=tuple(item.to_core() for item in self.items),
            expiry=None if self.expiry is None else self.expiry.to_core(),
            **fields_of(self, _SAME),
        )

    @classmethod
    def from_core(cls, core: LogMetadata) -> "LogRow":
        """The row that carries a protocol value."""
        return cls(
            settings=LogSettingsBody.from_core(core.settings),
            items=tuple(map(LogItemBody.from_core, core.items)),
            expiry=None if core.expiry is None else ExpiryBody.from_core(core.expiry),
            **fields_of(core, _SAME),
        )


class ForkBody(Body):
    """The log that a fork begins with, and where the fork begins. `created_at` of the log, so that a namesake is not
    forked in its place.
    """

    source: LogName
    created_at: Text
    at: Number


class LogCreateBody(Body):
    """`POST /v1/logs`: 201 with the row; 409 `log-exists` with the existing row as `current`. A repeat of
    an attempt gets the same row. A repeat of the client's request gets `log-exists`, or 404 where the log was deleted.

    With `fork` the log, which is empty in `row`, begins with the records of another one below an offset, which are in CLOSED
    ledgers. 404 `no-such-log` of the source, 422 `invalid` where the source has an open ledger there.
    """

    row: LogRow
    attempt: Attempt
    fork: ForkBody | None = None
    once: OnceBody | None = None


class LogChange(Body):
    """`PUT /v1/logs/{name}`: replace the row if its version still is `row.version`. A ledger that is new in
    the row must exist and be made for this log (rule 22). 409 `already-done`, with the row as `current`, if a change
    for the client's request was made before.
    """

    row: LogRow
    attempt: Attempt
    once: OnceBody | None = None


class Done(Body):
    """`GET /v1/requests/{token}?content=`: whether a client's request was carried out."""

    done: bool


DELETED_WITH_LOG_MAX: Final = 1000
"""Ledgers deleted in one transaction with their log, so that it ends within the statement's
deadline. Gateways delete the older ledgers of a longer log afterwards (taste)."""


class LogDelete(Body):
    """`DELETE /v1/logs/{name}`: the name is free again if the row still is the one of this version."""

    version: Version
    row_attempt: Attempt | Literal[""] = ""
    """That of the row, as for a ledger."""
    attempt: Attempt


class LogListBody(Body):
    """`GET /v1/logs?limit=&after=`; `next` is the `after` of the next page, null at the end."""

    logs: tuple[LogRow, ...]
    next: LogName | None


class LogHeadsAsk(Body):
    """`POST /v1/log-heads`: the logs whose heads are wanted. Changes nothing."""

    logs: tuple[LogName, ...] = Field(max_length=HEADS_MAX)


class LogHeadBody(Body):
    """A log's state and last ledger, from the primary; `state` null where the log is deleted."""

    name: LogName
    version: Version
    state: LogState | None
    writer_token: Number
    last_ledger: LedgerId | None

    def to_core(self) -> LogHead:
        """The protocol's value."""
        return LogHead(**dict(self))


class LogHeads(Body):
    """The answer: a head for each log that exists or existed, by name. A log that is left out was never
    created, or is lost: its absence is no verdict (rule 18).
    """

    logs: tuple[LogHeadBody, ...]


class SharedAsk(Body):
    """`POST /v1/shared-ledgers`: which of these ledgers forks name. Changes nothing. Of a ledger that its own log names no
    more "no" is for ever: only a log that names a ledger is forked (rule 27a).
    """

    ledgers: tuple[LedgerId, ...] = Field(max_length=LOG_LEDGERS_MAX)


class LedgerIds(Body):
    """`GET /v1/orphans?older_than_s=&log=&limit=`: ledgers made for a log that no log names.

    `DELETE /v1/orphans/{ledger_id}` deletes one, if in that very transaction no log names it
    (rule 22): 204, 409 `owned-by-log` when one does, 404 when there is no such ledger.
    """

    ledgers: tuple[LedgerId, ...]
