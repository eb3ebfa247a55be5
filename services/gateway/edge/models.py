"""The public bodies of ledgers as pydantic models, of which the OpenAPI description is made.

The models parse requests about ledgers as a whole. Appends and reads never pass through them; tests hold the
hand-made JSON of appends and reads to these models. The names of the classes are those of the description's
schemas, which clients see.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from quorumlog.protocol.ids import ASSIGNED_ID_END, ID_MAX, NO_ENTRY
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import QUORUM_MAX, Quorum
from quorumlog.protocol.transaction import TRANSACTION_ID
from quorumlog.protocol.values import Member
from quorumlog.wire.log_bodies import ATTEMPT_TAG, PARTITION_TAG, TRANSACTION_TAG
from services.gateway.edge.http import limits
from services.gateway.interface import DEGRADED, LedgerOptions

DATE_TIME: Final = {"type": "string", "format": "date-time"}
BASE64: Final = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=|[A-Za-z0-9+/][AQgw]==)?$",
}
"""Canonical base64 (RFC 4648, 4)."""

_INT64: Final = {"format": "int64"}
Id = Annotated[int, Field(ge=0, le=ID_MAX, json_schema_extra=_INT64)]
ChosenId = Annotated[int, Field(ge=ASSIGNED_ID_END, le=ID_MAX, json_schema_extra=_INT64)]
IdOrNone = Annotated[int, Field(ge=NO_ENTRY, le=ID_MAX, json_schema_extra=_INT64)]
"""An entry id, or -1 for "none"."""
Size = Annotated[int, Field(ge=1, le=QUORUM_MAX)]


def _storable(text: str) -> str:
    """Postgres keeps every character but this one."""
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


Text = Annotated[
    str, AfterValidator(_storable), Field(json_schema_extra={"pattern": "^[^\\x00]*$"})
]


class Model(BaseModel):
    """A public body: frozen, strict, and without unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


def members_of(model: type[Model], *values: object, **given: object) -> dict[str, Any]:
    """The required members of a public body: `given` ones, else the fields of these names of the last
    value that has them.
    """
    names = [name for name, field in model.model_fields.items() if field.is_required()]
    found = {name: getattr(one, name) for one in values for name in names if hasattr(one, name)}
    return {name: given[name] if name in given else found[name] for name in names}


def _within_limits(custom: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in custom.items())
    if size > limits.CUSTOM_BYTES_MAX:
        raise ValueError(f"has {size} bytes; the limit is {limits.CUSTOM_BYTES_MAX}")
    return custom


def _few(custom: Any) -> Any:
    """Before any of them is looked at, and each is a fault of its own."""
    if isinstance(custom, dict) and len(custom) > limits.CUSTOM_KEYS_MAX:
        raise ValueError(f"must have at most {limits.CUSTOM_KEYS_MAX} members")
    return custom


Custom = Annotated[
    dict[Text, Text],
    Field(
        max_length=limits.CUSTOM_KEYS_MAX,
        description=f"For the caller's use: {limits.CUSTOM_BYTES_MAX} bytes at most, keys included.",
    ),
    AfterValidator(_within_limits),
    BeforeValidator(_few),
]


Members = Annotated[
    list[Member],
    FailFast(),
    Field(
        max_length=QUORUM_MAX,
        description="Members that will never come back: an operator's word, kept with the ledger.",
    ),
]


class LedgerCreate(Model):
    """A ledger to create. Everything is optional."""

    ensemble_size: Size | None = None
    """E, bookies that store the ledger: 3, or Qw where that is larger."""
    write_quorum: Size | None = None
    """Qw, bookies that store each entry: 3, or E where that is smaller."""
    ack_quorum: Size | None = None
    """Qa, bookies that must have it on disk: Qw // 2 + 1."""
    digest: Literal["crc32c", "hmac-sha256", "none"] = "crc32c"
    """How readers verify entries; the MAC needs a password."""
    password: (
        Annotated[str, StringConstraints(min_length=1, max_length=limits.PASSWORD_CHARS_MAX)] | None
    ) = None
    """The value that `Ledger-Password` must have from then on."""
    metadata: Custom = Field(default_factory=dict)
    ledger_id: ChosenId | None = Field(
        default=None,
        description=f"An id that the caller chooses, from {ASSIGNED_ID_END} on; the service assigns the lower ids.",
    )
    allow_degraded: bool = False
    """Name absent bookies too, while each write set reaches Qa."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.quorum()
        if self.digest == "hmac-sha256" and self.password is None:
            raise ValueError("the digest hmac-sha256 needs a password")
        return self

    def quorum(self) -> Quorum:
        """The sizes, omitted ones filled in. Raises: ValueError unless E >= Qw >= Qa."""
        return Quorum.of(self.ensemble_size, self.write_quorum, self.ack_quorum)

    def options(self, once: Once | None) -> LedgerOptions:
        """The options for the engine."""
        return LedgerOptions(
            quorum=self.quorum(),
            digest=DigestKind(self.digest),
            password=self.password,
            custom=tuple(sorted(self.metadata.items())),
            ledger_id=self.ledger_id,
            allow_degraded=self.allow_degraded,
            once=once,
        )


class TransactionLedgerCreate(Model):
    """A ledger to create in a transaction: in all else like the ledgers of its log."""

    transaction: Annotated[str, Field(pattern=f"^{TRANSACTION_ID}$", description="Its id.")]
    partition: Id | None = None
    """The part of the work for which it is created."""
    attempt: Id | None = None
    """The number of the try at that part."""
    metadata: Custom = Field(default_factory=dict)


class FragmentModel(Model):
    """The entries from `first_entry` to the next fragment live on these bookies."""

    first_entry: Id
    bookies: list[str]


class LostRange(Model):
    """Entries `first` to `last`."""

    first: Id
    last: Id


class WriterModel(Model):
    """The process that created the ledger, its only writer ever."""

    id: str
    url: str
    internal_url: str
    """Where the cluster's own processes reach it."""


class Ledger(Model):
    """A ledger as it is now."""

    ledger_id: Id
    state: Literal["OPEN", "IN_RECOVERY", "CLOSED"]
    ensemble_size: Size
    write_quorum: Size
    ack_quorum: Size
    digest: Literal["crc32c", "hmac-sha256", "none"]
    last_entry: IdOrNone | None
    """null until it is closed; -1: it is empty."""
    length: Id | None
    """Payload bytes; null until it is closed."""
    fragments: list[FragmentModel]
    metadata: dict[str, str]
    log: str | None
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    version: Annotated[int, Field(ge=1)]
    writer: WriterModel | None
    degraded: bool = False
    """Created with absent members."""
    may_lack_entries: bool = False
    """An operator declared members lost at its recovery, or gave entries up."""
    lost_entries: list[LostRange] = Field(default_factory=list)
    """Entries that no bookie can serve any more, as an operator has accepted: 410 `entry-lost`."""
    transaction: str | None = None
    """The transaction in which it was written."""
    partition: Id | None = None
    attempt: Id | None = None


def ledger_json(metadata: LedgerMetadata) -> dict[str, Any]:
    """A ledger's row as the public API shows it, without its keys; orjson writes dataclasses as objects."""
    shown = members_of(Ledger, metadata, metadata.quorum, metadata=dict(metadata.custom))
    tags = dict(metadata.extra)
    if tags.get(DEGRADED) == "true":
        shown["degraded"] = True
    if TRANSACTION_TAG in tags:
        shown["transaction"] = tags[TRANSACTION_TAG]
        shown |= {tag: int(tags[tag]) for tag in (PARTITION_TAG, ATTEMPT_TAG) if tag in tags}
    if metadata.may_lack_entries:
        shown["may_lack_entries"] = True
    if metadata.lost_entries:
        shown["lost_entries"] = [
            {"first": low, "last": high} for low, high in metadata.lost_entries
        ]
    return shown


class LedgerList(Model):
    """One page of ledgers; `next` is the next `after`, null at the end."""

    ledgers: list[Ledger]
    next: Id | None


class EntryData(Model):
    """An entry as base64."""

    data: Annotated[str, WithJsonSchema(BASE64)]


class EntryText(Model):
    """An entry that is text, stored as UTF-8."""

    text: str


class EntryJson(Model):
    """An entry that is JSON, stored compact."""

    value: Any = Field(alias="json")


class Batch(Model):
    """Several entries; they get contiguous ids."""

    entries: list[EntryData | EntryText | EntryJson] = Field(
        min_length=1, max_length=limits.BATCH_ENTRIES_MAX
    )


class AppendedEntry(Model):
    """One entry is durable on Qa bookies."""

    ledger_id: Id
    entry_id: Id
    last_add_confirmed: Id


class AppendedBatch(Model):
    """All entries of a batch are durable on Qa bookies."""

    ledger_id: Id
    first_entry: Id
    last_entry: Id
    last_add_confirmed: Id


class PayloadOut(Model):
    """A payload in one of four forms: `data`; with `encoding=text` or `json` that, or `data_base64` where the
    payload is not readable so.
    """

    data: Annotated[str, WithJsonSchema(BASE64)] | None = None
    text: str | None = None
    value: Any = Field(default=None, alias="json")
    data_base64: Annotated[str, WithJsonSchema(BASE64)] | None = None


class EntryOut(PayloadOut):
    """An entry with its id."""

    entry_id: Id


class Entries(Model):
    """Confirmed entries, in order; go on at `next`."""

    ledger_id: Id
    entries: list[EntryOut]
    next: Id
    last_add_confirmed: IdOrNone
    closed: bool
    lac_source: Literal["writer", "bookies", "metadata"]


class OneEntry(EntryOut):
    """One confirmed entry."""

    ledger_id: Id


class LastAddConfirmed(Model):
    """How far a ledger is confirmed."""

    ledger_id: Id
    last_add_confirmed: IdOrNone
    closed: bool


class Recover(Model):
    """How to recover a ledger."""

    declare_lost: Members = Field(default_factory=list)


class PasswordChange(Model):
    """A ledger's next password."""

    password: Annotated[str, StringConstraints(min_length=1, max_length=limits.PASSWORD_CHARS_MAX)]
    """The value that `Ledger-Password` must have from then on."""


class AcceptLoss(Model):
    """Which entries are given up."""

    first: Id
    last: Id
    declare_lost: Members = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.first > self.last:
            raise ValueError("first is above last")
        return self


class Bookie(Model):
    """A registered bookie."""

    id: str
    state: Literal["writable", "read-only", "draining", "lost"]
    url: str
    zone: str
    free_bytes: Annotated[int, Field(ge=0)]


class BookieListModel(Model):
    """Every registered bookie; `stale` where liveness can't be learned now."""

    bookies: list[Bookie]
    stale: bool = False
