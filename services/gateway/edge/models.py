"""Pydantic models of the request and response bodies of ledgers, for parsing and for OpenAPI.

The models parse requests about whole ledgers. Appends and reads bypass the models for speed; tests
check their JSON against the models. The class names are the OpenAPI schema names that clients see.
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
"""JSON schema of canonical base64 (RFC 4648, 4)."""

_INT64: Final = {"format": "int64"}
Id = Annotated[int, Field(ge=0, le=ID_MAX, json_schema_extra=_INT64)]
ChosenId = Annotated[int, Field(ge=ASSIGNED_ID_END, le=ID_MAX, json_schema_extra=_INT64)]
IdOrNone = Annotated[int, Field(ge=NO_ENTRY, le=ID_MAX, json_schema_extra=_INT64)]
"""An entry id, or -1 for "none"."""
Size = Annotated[int, Field(ge=1, le=QUORUM_MAX)]


def _storable(text: str) -> str:
    """Reject NUL, the only character that Postgres can't store."""
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


Text = Annotated[
    str, AfterValidator(_storable), Field(json_schema_extra={"pattern": "^[^\\x00]*$"})
]


class Model(BaseModel):
    """Base class of public bodies: frozen, strict, and without unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


def members_of(model: type[Model], *values: object, **given: object) -> dict[str, Any]:
    """Collect the required members of a public body by name: from `given`, otherwise from the last
    of `values` that has an attribute with the name.
    """
    names = [name for name, field in model.model_fields.items() if field.is_required()]
    found = {name: getattr(one, name) for one in values for name in names if hasattr(one, name)}
    return {name: given[name] if name in given else found[name] for name in names}


def _within_limits(custom: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in custom.items())
    if size > limits.CUSTOM_BYTES_MAX:
        raise ValueError(f"must have at most {limits.CUSTOM_BYTES_MAX} bytes (got {size})")
    return custom


def _few(custom: Any) -> Any:
    """Reject too many members before pydantic validates and reports each member."""
    if isinstance(custom, dict) and len(custom) > limits.CUSTOM_KEYS_MAX:
        raise ValueError(f"must have at most {limits.CUSTOM_KEYS_MAX} members")
    return custom


Custom = Annotated[
    dict[Text, Text],
    Field(
        max_length=limits.CUSTOM_KEYS_MAX,
        description=f"For the caller's use: at most {limits.CUSTOM_BYTES_MAX} bytes with keys.",
    ),
    AfterValidator(_within_limits),
    BeforeValidator(_few),
]


Members = Annotated[
    list[Member],
    FailFast(),
    Field(
        max_length=QUORUM_MAX,
        description="Members that an operator declares lost for ever; stored with the ledger.",
    ),
]


class LedgerCreate(Model):
    """A ledger to create. All members are optional."""

    ensemble_size: Size | None = None
    """E, the number of bookies that store the ledger. Default: 3, or Qw if Qw is larger."""
    write_quorum: Size | None = None
    """Qw, the number of bookies that store each entry. Default: 3, or E if E is smaller."""
    ack_quorum: Size | None = None
    """Qa, the number of bookies that must have an entry on disk. Default: Qw // 2 + 1."""
    digest: Literal["crc32c", "hmac-sha256", "none"] = "crc32c"
    """How readers verify entries. `hmac-sha256` needs a password."""
    password: (
        Annotated[str, StringConstraints(min_length=1, max_length=limits.PASSWORD_CHARS_MAX)] | None
    ) = None
    """Password that later requests must send in the header `Ledger-Password`."""
    metadata: Custom = Field(default_factory=dict)
    ledger_id: ChosenId | None = Field(
        default=None,
        description=f"An id chosen by the caller, from {ASSIGNED_ID_END} on. Default: a lower id.",
    )
    allow_degraded: bool = False
    """Whether the ensemble may include absent bookies. Each write set needs Qa live bookies."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.quorum()
        if self.digest == "hmac-sha256" and self.password is None:
            raise ValueError("the digest hmac-sha256 needs a password: send `password`")
        return self

    def quorum(self) -> Quorum:
        """The quorum sizes with defaults filled in. Raises: ValueError unless E >= Qw >= Qa."""
        return Quorum.of(self.ensemble_size, self.write_quorum, self.ack_quorum)

    def options(self, once: Once | None) -> LedgerOptions:
        """Convert to the engine's options."""
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
    """A ledger to create in a transaction, with the settings of the transaction's log."""

    transaction: Annotated[
        str, Field(pattern=f"^{TRANSACTION_ID}$", description="The transaction's id.")
    ]
    partition: Id | None = None
    """The partition of the client's job that writes the ledger."""
    attempt: Id | None = None
    """The attempt number of the partition's task."""
    metadata: Custom = Field(default_factory=dict)


class FragmentModel(Model):
    """A fragment, with the bookies that store the entries from `first_entry` on."""

    first_entry: Id
    bookies: list[str]


class LostRange(Model):
    """A range of lost entries, from `first` to `last`, inclusive."""

    first: Id
    last: Id


class WriterModel(Model):
    """The gateway process that writes a ledger or log."""

    id: str
    url: str
    internal_url: str
    """The URL at which the cluster's own processes reach the gateway."""


WRITER_EXAMPLE: Final = {
    "id": "b1946ac9",
    "url": "http://127.0.0.1:8080",
    "internal_url": "http://127.0.0.1:34567",
}


class Ledger(Model):
    """The current state of a ledger."""

    ledger_id: Id
    state: Literal["OPEN", "IN_RECOVERY", "CLOSED"]
    ensemble_size: Size
    write_quorum: Size
    ack_quorum: Size
    digest: Literal["crc32c", "hmac-sha256", "none"]
    last_entry: IdOrNone | None
    """The last entry's id, or -1 if the ledger is empty; null until the ledger is closed."""
    length: Id | None
    """Total payload bytes; null until the ledger is closed."""
    fragments: list[FragmentModel]
    metadata: dict[str, str]
    log: str | None
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    version: Annotated[int, Field(ge=1)]
    writer: WriterModel | None
    degraded: bool = False
    """Whether the ledger was created with absent bookies in its ensemble."""
    may_lack_entries: bool = False
    """Whether an operator declared members lost during a recovery, or accepted lost entries."""
    lost_entries: list[LostRange] = Field(default_factory=list)
    """Entries whose loss an operator has accepted. Reads of these entries get 410 `entry-lost`."""
    transaction: str | None = None
    """The transaction in which the ledger was written."""
    partition: Id | None = None
    attempt: Id | None = None


def ledger_json(metadata: LedgerMetadata) -> dict[str, Any]:
    """Build a ledger's public JSON object, without cryptographic keys. May contain dataclasses."""
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
    """A page of ledgers. `next` is the `after` of the next page, or null at the end."""

    ledgers: list[Ledger]
    next: Id | None


class EntryData(Model):
    """An entry to append, as base64."""

    data: Annotated[str, WithJsonSchema(BASE64)]


class EntryText(Model):
    """An entry to append as text, which is stored as UTF-8."""

    text: str


class EntryJson(Model):
    """An entry to append as JSON, which is stored without whitespace."""

    value: Any = Field(alias="json")


class Batch(Model):
    """A batch of entries to append, which get contiguous ids."""

    entries: list[EntryData | EntryText | EntryJson] = Field(
        min_length=1, max_length=limits.BATCH_ENTRIES_MAX
    )


class AppendedEntry(Model):
    """Response to an append of one entry, which is durable on Qa bookies."""

    ledger_id: Id
    entry_id: Id
    last_add_confirmed: Id


class AppendedBatch(Model):
    """Response to an append of a batch: all entries are durable on Qa bookies."""

    ledger_id: Id
    first_entry: Id
    last_entry: Id
    last_add_confirmed: Id


class PayloadOut(Model):
    """A payload, in `data` by default, or in `text` or `json` with this `encoding`. `data_base64`
    has a payload that isn't valid text or JSON.
    """

    data: Annotated[str, WithJsonSchema(BASE64)] | None = None
    text: str | None = None
    value: Any = Field(default=None, alias="json")
    data_base64: Annotated[str, WithJsonSchema(BASE64)] | None = None


class EntryOut(PayloadOut):
    """An entry with its id."""

    entry_id: Id


class Entries(Model):
    """A page of confirmed entries in order. The next page begins at the entry id `next`."""

    ledger_id: Id
    entries: list[EntryOut]
    next: Id
    last_add_confirmed: IdOrNone
    closed: bool
    lac_source: Literal["writer", "bookies", "metadata"]


class OneEntry(EntryOut):
    """One confirmed entry with its ledger."""

    ledger_id: Id


class LastAddConfirmed(Model):
    """The last-add-confirmed (LAC) of a ledger, and whether the ledger is closed."""

    ledger_id: Id
    last_add_confirmed: IdOrNone
    closed: bool


class Recover(Model):
    """Parameters of a ledger's recovery."""

    declare_lost: Members = Field(default_factory=list)


class PasswordChange(Model):
    """Request to change a ledger's password."""

    password: Annotated[str, StringConstraints(min_length=1, max_length=limits.PASSWORD_CHARS_MAX)]
    """New password, which later requests must send in the header `Ledger-Password`."""


class AcceptLoss(Model):
    """Request to accept the loss of the entries `first` to `last`, inclusive."""

    first: Id
    last: Id
    declare_lost: Members = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.first > self.last:
            raise ValueError("`first` must not be above `last`")
        return self


class Bookie(Model):
    """A registered bookie."""

    id: str
    state: Literal["writable", "read-only", "draining", "lost"]
    url: str
    zone: str
    free_bytes: Annotated[int, Field(ge=0)]


class BookieListModel(Model):
    """All registered bookies. If `stale` is true, the bookies' liveness is currently unknown."""

    bookies: list[Bookie]
    stale: bool = False
