"""Bodies of the metadata service's API, as strict pydantic models.

Bodies are parsed with `model_validate_json` only: then JSON lists become tuples, while `1.0` and `"1"`
are no integers, and unknown fields are refused. The gateway's public bodies are elsewhere.
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY, member_of
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import (
    DigestKind,
    Fragment,
    LedgerMetadata,
    Lineage,
    Repair,
    State,
    Writer,
)
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import QUORUM_MAX, Quorum
from quorumlog.wire.witnesses import WITNESS

LOST_RANGES_MAX = 1000
"""Ranges of entries that may be given up in one ledger, so that a row stays small (taste)."""

HEADS_MAX = 1000
"""Heads in one request: an answer of 100 KiB (taste)."""

BOOKIE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A bookie's name; it is part of a member, of URLs and of file names."""

MEMBER = rf"{BOOKIE_NAME}@(0|[1-9][0-9]{{0,17}})"
MEMBER_OR_NAME = rf"{BOOKIE_NAME}(@(0|[1-9][0-9]{{0,17}}))?"

LOG_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""A log's name (docs/guides/http.md, Bounds)."""
_SHOWN = r"(logs|ledgers)/([A-Za-z0-9._-]{1,200}\*?|\*)"
SHOWN = rf"({_SHOWN}(,{_SHOWN}){{0,31}})?"
"""The names that a list may contain, by the grants of the caller's token: `logs/NAME` for a log and its ledgers, `ledgers/NAMESPACE` for ledgers without a
log. A `*` at the end stands for any further characters. Empty: nothing."""


def _bytes_of(value: object) -> object:
    """The bytes of canonical base64; pydantic refuses anything else."""
    if not isinstance(value, str):
        return value
    try:
        decoded = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is not base64") from error
    if base64.b64encode(decoded).decode() != value:
        raise ValueError("is not canonical base64")
    return decoded


def _base64_of(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _without_nul(value: str) -> str:
    """Refuse NUL, the one character that Postgres can't store."""
    if "\0" in value:
        raise ValueError("must not contain NUL")
    return value


LedgerId = Annotated[int, Field(ge=0, le=ID_MAX)]
EntryId = Annotated[int, Field(ge=0, le=ID_MAX)]
EntryIdOrNone = Annotated[int, Field(ge=NO_ENTRY, le=ID_MAX)]
"""An entry id, or -1 for "none yet"."""
Version = Annotated[int, Field(ge=1, le=ID_MAX)]
Text = Annotated[str, StringConstraints(max_length=65_536), AfterValidator(_without_nul)]
Key = Annotated[
    bytes,
    BeforeValidator(_bytes_of),
    PlainSerializer(_base64_of, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
Member = Annotated[str, StringConstraints(pattern=rf"^{MEMBER}$", max_length=128)]
BookieName = Annotated[str, StringConstraints(pattern=rf"^{BOOKIE_NAME}$")]
LogName = Annotated[str, StringConstraints(pattern=rf"^{LOG_NAME}$")]
ATTEMPT = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
Attempt = Annotated[str, StringConstraints(pattern=rf"^{ATTEMPT}$")]
"""A random token of one change, sent with each try of it (rule 6)."""


class Body(BaseModel):
    """A value on the wire: frozen, strict, and without unknown fields unless `received` reads it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


B = TypeVar("B", bound=Body)


def body_of(cls: type[B], core: object) -> B:
    """The body with the fields of a protocol value, or of a mapping with protocol values in it."""
    return cls.model_validate(core, from_attributes=True)


def received(cls: type[B], data: bytes | str) -> B:
    """The body that another process wrote, or this one before it was replaced: fields that a later release has added are
    left out. Bodies of requests are read strictly instead: what they ask for must not be left out.
    """
    return cls.model_validate_json(data, extra="ignore")


def fields_of(value: object, names: Iterable[str]) -> dict[str, Any]:
    """Some attributes of a value by name."""
    return {name: getattr(value, name) for name in names}


class FragmentBody(Body):
    """The entries from `first_entry` to the next fragment live on `bookies`."""

    first_entry: EntryId
    bookies: tuple[Member, ...] = Field(min_length=1, max_length=QUORUM_MAX)


class RepairBody(Body):
    """A repair under way: `target` will replace `leaving` in one fragment, or just has (rule 20b)."""

    first_entry: EntryId
    leaving: Member
    target: Member


class WriterBody(Body):
    """The process that created the ledger."""

    id: Text
    url: Text
    internal_url: Text = ""
    """The URL of the internal listener; empty if `url` is the only listener."""

    def to_core(self) -> Writer:
        """The protocol's value."""
        return Writer(self.id, self.url, self.internal_url)


class LineageBody(Body):
    """The log that a ledger was placed in, and the ledgers before it: each id and first offset."""

    log_created_at: Text
    before: tuple[tuple[LedgerId, EntryId], ...] = ()
    published_ms: Annotated[int, Field(ge=0, le=ID_MAX)] = 0
    stream_seq: Text | None = None
    placed_by: Attempt | Literal[""] = ""
    forked_at: EntryId | None = None
    shared: tuple[tuple[LedgerId, EntryId], ...] = ()
    writer_token: Annotated[int, Field(ge=0, le=ID_MAX)] = 0

    def to_core(self) -> Lineage:
        """The protocol's value."""
        return Lineage(**dict(self))


class LedgerDraft(Body):
    """A ledger to create; with `ledger_id` null the service assigns the id."""

    ledger_id: LedgerId | None = None
    state: State = State.OPEN
    ensemble_size: Annotated[int, Field(ge=1, le=QUORUM_MAX)]
    write_quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)]
    ack_quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)]
    digest: DigestKind
    fragments: tuple[FragmentBody, ...] = Field(min_length=1)
    last_entry: EntryIdOrNone | None = None
    length: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    writer: WriterBody | None = None
    ledger_key: Key = b""
    mac_key: Key = b""
    access_key: Key = b""
    wrapped_mac_key: Key = b""
    """Empty until the password is changed."""
    metadata: dict[Text, Text] = Field(default_factory=dict)
    log: LogName | None = None
    declared_lost: tuple[Member, ...] = ()
    may_lack_entries: bool = False
    lost_entries: tuple[tuple[EntryId, EntryId], ...] = Field(
        default=(), max_length=LOST_RANGES_MAX
    )
    repairs: tuple[RepairBody, ...] = ()
    extra: dict[Text, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _keeps_the_invariants(self) -> Self:
        # Quorum raises ValueError, check() AssertionError: pydantic turns both into a 422.
        self.core(ledger_id=0, version=1, created_at="").check()
        return self

    def core(self, *, ledger_id: int, version: int, created_at: str) -> LedgerMetadata:
        """The protocol's value of this ledger with an id and a version."""
        return LedgerMetadata(
            ledger_id=ledger_id,
            quorum=Quorum(self.ensemble_size, self.write_quorum, self.ack_quorum),
            fragments=tuple(Fragment(f.first_entry, f.bookies) for f in self.fragments),
            version=version,
            writer=None if self.writer is None else self.writer.to_core(),
            custom=tuple(sorted(self.metadata.items())),
            created_at=created_at,
            repairs=tuple(Repair(r.first_entry, r.leaving, r.target) for r in self.repairs),
            extra=tuple(sorted(self.extra.items())),
            **fields_of(self, _SAME),
        )

    @classmethod
    def draft_of(cls, core: LedgerMetadata) -> "LedgerDraft":
        """The draft of a ledger to create; a negative `ledger_id` asks for the next free id."""
        ledger_id = None if core.ledger_id < 0 else core.ledger_id
        return body_of(LedgerDraft, _draft_fields(core) | {"ledger_id": ledger_id})


class LedgerRow(LedgerDraft):
    """One ledger's row as the metadata service keeps it."""

    ledger_id: LedgerId
    version: Version
    attempt: Attempt | Literal[""] = ""
    """The token of the change that made this version; empty for a row from before tokens were kept."""
    first_offset: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    """Where the ledger begins in its log. A change of the log's row sets it, never a change of this row."""
    lineage: LineageBody | None = None
    created_at: Text = ""

    def to_core(self) -> LedgerMetadata:
        """The protocol's value."""
        core = self.core(ledger_id=self.ledger_id, version=self.version, created_at=self.created_at)
        lineage = None if self.lineage is None else self.lineage.to_core()
        return replace(core, attempt=self.attempt, first_offset=self.first_offset, lineage=lineage)

    @classmethod
    def from_core(cls, core: LedgerMetadata) -> "LedgerRow":
        """The row that carries a protocol value."""
        return body_of(cls, _draft_fields(core) | fields_of(core, ROW_FIELDS))


ROW_FIELDS: Final = ("ledger_id", "version", "attempt", "first_offset", "lineage", "created_at")
"""The fields of a row that the store sets, whatever a change says."""
QUORUM_SIZES: Final = ("ensemble_size", "write_quorum", "ack_quorum")
_SAME: Final = (
    "state", "digest", "last_entry", "length", "ledger_key", "mac_key", "access_key",
    "wrapped_mac_key", "log",
    "declared_lost", "may_lack_entries", "lost_entries",
)  # fmt: skip
"""Fields of a draft that the protocol's value has too, under the same names."""


def _draft_fields(core: LedgerMetadata) -> dict[str, Any]:
    """The fields of a draft by name, without the id."""
    return {
        **fields_of(core, _SAME),
        **fields_of(core.quorum, QUORUM_SIZES),
        **fields_of(core, ("fragments", "writer", "repairs")),
        "metadata": dict(core.custom),
        "extra": dict(core.extra),
    }


class MissedBody(Body):
    """Entries that a member should hold and may lack (rule 8)."""

    member: Member
    first: EntryId
    last: Annotated[int, Field(ge=0, lt=ID_MAX)]

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.first > self.last:
            raise ValueError("first is above last")
        return self

    @classmethod
    def from_core(cls, missed: MissedRange) -> "MissedBody":
        """The body that carries a protocol value."""
        return body_of(cls, missed)


class OnceBody(Body):
    """The name of a client's request, which is carried out once (rule 6a)."""

    token: Attempt
    content: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]


def once_body(once: Once | None) -> OnceBody | None:
    """The body that carries the name of a request, if it has one."""
    return None if once is None else body_of(OnceBody, once)


class LedgerCreateBody(Body):
    """`POST /v1/ledgers`. A repeat of an attempt, or of the client's request, gets the same row."""

    row: LedgerDraft
    attempt: Attempt
    once: OnceBody | None = None


class LedgerChange(Body):
    """`PUT /v1/ledgers/{id}`: replace the row if its version still is `row.version`. 409 `already-done` if a change for
    the client's request was made before.
    """

    row: LedgerRow
    attempt: Attempt
    missed: tuple[MissedBody, ...] = Field(default=(), max_length=100_000)
    once: OnceBody | None = None


class LedgerDelete(Body):
    """`DELETE /v1/ledgers/{id}`: replace the row by a tombstone if it still is the one of this version."""

    version: Version
    row_attempt: Attempt | Literal[""] = ""
    """That of the row, as in a compare-and-swap: a row of another line of history may have the version too."""
    attempt: Attempt


class Resealed(Body):
    """How many rows were sealed anew; `next` is the next `after`, null at the end."""

    resealed: int
    next: LedgerId | None


COPIES_PRESENTED_MAX = 1000
"""Witnesses of copies in one request of a bookie (taste)."""

HELD_MAX = 100
"""Attempts of held copies in one read of a row: the URL has 4 KB then (taste)."""

PROOFS_MAX = 100
"""Ledgers of one question of a collector: 400 KB with all their copies at most (taste)."""

Witness = Annotated[str, StringConstraints(pattern=rf"^{WITNESS}$")]


class MissingWitness(Body):
    """A witness that the database should contain and does not, and who presented it."""

    witness: Witness
    holder: Text


class WitnessState(Body):
    """The state of a metadata service's database (rule 18a)."""

    held: tuple[Witness, ...]
    missing: tuple[MissingWitness, ...]


class CopyWitnesses(Body):
    """`POST /v1/witnesses/copies`: witnesses that a bookie made of its copies of ledgers' rows (rule 18c)."""

    witnesses: tuple[Witness, ...] = Field(min_length=1, max_length=COPIES_PRESENTED_MAX)
    holder: BookieName


class HeldBody(Body):
    """A ledger, and the attempts of copies of its rows that a bookie holds."""

    ledger_id: LedgerId
    attempts: tuple[Attempt, ...] = Field(max_length=HELD_MAX)


class LedgerProofsAsk(Body):
    """`POST /v1/ledger-proofs`: the ledgers of which a bookie wants the rows that a deletion may rest on."""

    holder: BookieName
    ledgers: tuple[HeldBody, ...] = Field(min_length=1, max_length=PROOFS_MAX)


class LedgerProof(Body):
    """A ledger's row, from the primary (rules 18 and 18c)."""

    ledger_id: LedgerId
    row: LedgerRow | None
    """None where there is none, and where `lost` names changes."""
    deleted: bool
    """Whether there is a tombstone."""
    lost: tuple[Attempt, ...]
    """Attempts of the held copies that the database lacks: the rest says nothing then."""


class LedgerProofs(Body):
    """The answer: a proof for each ledger, in the order of the question, all of one snapshot."""

    ledgers: tuple[LedgerProof, ...]


class KeptLedger(Body):
    """A ledger that its holders keep, since the database lacks these changes of its row."""

    ledger_id: LedgerId
    holders: tuple[Text, ...]
    attempts: tuple[Attempt, ...]


class KeptLedgers(Body):
    """Ledgers that bookies keep, by id: how many, and the first ones (rule 18c)."""

    count: Annotated[int, Field(ge=0)]
    ledgers: tuple[KeptLedger, ...]


class WitnessAccept(Body):
    """`POST /v1/witnesses/accept`: continue without these changes."""

    witnesses: tuple[Witness, ...] = Field(default=(), max_length=1000)
    lost: tuple[BookieName, ...] = Field(default=(), max_length=1000)
    """Bookies that need not answer, because they never return."""
    ledgers: tuple[LedgerId, ...] = Field(default=(), max_length=1000)
    """Ledgers to be ended by the database's rows, though bookies hold copies of others: entries may be lost."""


class BookieWitnesses(Body):
    """`GET /v1/witnesses` of a bookie: what it knows of the metadata's database (rule 18a)."""

    bookie: BookieName
    cluster_id: Text
    """The cluster of its directory; empty while the directory is new."""
    witnesses: tuple[Witness, ...]
    highest_ledger: EntryIdOrNone | None
    """The highest id below `ASSIGNED_ID_END` of a ledger that it holds or held; -1: of none; null while
    it still reads its log.
    """


class LedgerListBody(Body):
    """One page; `next` is the `after` of the next one, null at the end."""

    ledgers: tuple[LedgerRow, ...]
    next: LedgerId | None


class LedgerHeadsAsk(Body):
    """`POST /v1/ledger-heads`: the ledgers whose heads are wanted. Changes nothing."""

    ledgers: tuple[LedgerId, ...] = Field(max_length=HEADS_MAX)


class LedgerHeadBody(Body):
    """A ledger's state and writer, from the primary; `state` null is a tombstone."""

    ledger_id: LedgerId
    version: Version
    state: State | None
    writer_id: Text | None

    def to_core(self) -> LedgerHead:
        """The protocol's value."""
        return LedgerHead(**dict(self))


class LedgerHeads(Body):
    """The answer: a head for each ledger that exists or existed, by id. A ledger that is left out was
    never created, or is lost: its absence is no verdict (rule 18).
    """

    ledgers: tuple[LedgerHeadBody, ...]


class Change(Body):
    """One line of `GET /v1/changes`.

    `hello`: no change is missed from here on. `gap`: changes may have been missed; read again what
    matters. `heartbeat`: the stream is alive. `change`: a row, by its key.
    """

    kind: Literal["hello", "gap", "heartbeat", "change"]
    ledger_id: LedgerId | None = None
    version: Version | None = None
    state: State | None = None
    deleted: bool = False


class Cookie(Body):
    """The data that a bookie's name stands for (rule 15, I28)."""

    incarnation: Annotated[int, Field(ge=0, lt=10**18)]
    cluster_id: Text
    instance: Text
    """Drawn when the directory was created: another directory is another instance."""
    directories: tuple[Text, ...] = ()
    boots: Annotated[int, Field(ge=0, le=ID_MAX)] = 0
    """Starts so far; a directory with fewer than the cookie says is an old copy."""
    may_fix: bool = False
    """An operator's permission for one start: continue as a new incarnation where data is lost."""
    url: Text = ""
    """The URL of the registered process."""
    process: Text = ""
    """Drawn by each process when it starts (rule 15a)."""


STAND_IN: Final = ""
"""The instance of a cookie that a rebuild wrote for a bookie that did not answer: no directory is it (rule 15b)."""


class CookiePut(Body):
    """`PUT /v1/bookies/{name}/cookie`: `version` null creates, else compare-and-swap."""

    cookie: Cookie
    version: Version | None = None
    attempt: Attempt


class CookieRow(Body):
    """A registered cookie."""

    name: BookieName
    version: Version
    cookie: Cookie
    log_end: Annotated[int, Field(ge=0, le=ID_MAX)] = 0
    """How far the log of this instance was on disk, by the last report of its process; a directory
    whose log ends earlier went back (a snapshot)."""


class LogEnd(Body):
    """`PUT /v1/bookies/{name}/log-end`: the registered process reports how far its log is on disk."""

    process: Text
    log_end: Annotated[int, Field(ge=0, le=ID_MAX)]


BookieMode = Literal["writable", "read-only", "draining"]
BookieState = Literal["writable", "read-only", "draining", "lost"]


class LedgerUse(Body):
    """A ledger that names a bookie; `detail` says why the last try to repair that failed."""

    ledger_id: LedgerId
    member: Member
    state: State
    has_place: bool = True
    """Whether it is in an ensemble. Else it is the target of a repair, or is kept until its successor has a copy of
    the row (rule 20b).
    """
    leaves: bool = False
    """Whether a repair gives its place to another member, or just has."""
    failures: int = 0
    detail: Text = ""


class BookieUses(Body):
    """`GET /v1/bookies/{name}/uses`: how many ledgers and repairs name a bookie, in any incarnation,
    also as a repair's target; `first` are the first of these ledgers by id.
    """

    bookie: BookieName
    ledgers: int
    repairs: int
    """Items of the repair queue."""
    first: tuple[LedgerUse, ...] = ()


class BookieStatePut(Body):
    """`PUT /v1/state` of a bookie: the mode that an operator sets."""

    state: BookieMode


class BookieHeartbeat(Body):
    """`PUT /v1/bookies/{name}/heartbeat`: this incarnation counts as live for another `ttl_s`."""

    incarnation: Annotated[int, Field(ge=0, lt=10**18)]
    url: Text
    zone: Text = ""
    state: BookieMode = "writable"
    free_bytes: Annotated[int, Field(ge=0, le=ID_MAX)] = 0
    ttl_s: Annotated[float, Field(gt=0, le=3600, strict=False)] = 5.0
    process: Text = ""
    """The cookie's instance: heartbeats of a process that is not registered do not count."""


class BookieInfo(Body):
    """A registered bookie and its liveness; `lost`: no heartbeat came in time."""

    id: Member
    state: BookieState
    url: Text
    zone: Text = ""
    free_bytes: int = 0

    @classmethod
    def lost(cls, name: str, incarnation: int, url: str = "") -> "BookieInfo":
        """A bookie without a heartbeat in time."""
        return cls(id=member_of(name, incarnation), state="lost", url=url)


class BookieList(Body):
    """`GET /v1/bookies`. Liveness is advice (I31); `stale`: Redis did not answer, or refused a write."""

    bookies: tuple[BookieInfo, ...]
    stale: bool = False
    liveness_age_s: float | None = None
    """For how long liveness has been recorded without a break; None while that is unknown."""

    def shows_absence(self, grace_s: float) -> bool:
        """Whether liveness has been recorded for a grace period: else a missing bookie proves nothing (rule 21)."""
        return not self.stale and self.liveness_age_s is not None and self.liveness_age_s >= grace_s


class ServiceHeartbeat(Body):
    """`PUT /v1/services/{kind}/{id}/heartbeat`."""

    url: Text
    internal_url: Text = ""
    """The URL of the internal listener; empty if `url` is the only listener."""
    state: Text = "ready"
    ttl_s: Annotated[float, Field(gt=0, le=3600, strict=False)] = 5.0


class ServiceInfo(Body):
    """A live service."""

    kind: Text
    id: Text
    url: Text
    internal_url: Text = ""
    """The URL of the internal listener; empty if `url` is the only listener."""
    state: Text


class ServiceList(Body):
    """`GET /v1/services`."""

    services: tuple[ServiceInfo, ...]
    stale: bool = False


class HeartbeatTaken(Body):
    """The answer to a heartbeat; `recorded` false: Redis is down, which is not the sender's fault."""

    recorded: bool


class ClusterId(Body):
    """`GET /v1/cluster-id`: drawn once, when the database was created."""

    cluster_id: Text
