"""Bodies of the metadata service's API as strict pydantic models, and conversion from and to JSON.

Values of the protocol (`protocol/values.py`) serve as bodies, and as fields of bodies, without
conversion. JSON lists become tuples; `1.0` and `"1"` are not accepted as integers; unknown fields
are rejected. The gateway's public API has other bodies.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from quorumlog.protocol import values
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import member_of
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once

HEADS_MAX = 1000
"""Maximum number of ledger heads in one request, for an answer of 100 KiB (chosen by judgement)."""

_SHOWN = r"(logs|ledgers)/([A-Za-z0-9._-]{1,200}\*?|\*)"
SHOWN = rf"({_SHOWN}(,{_SHOWN}){{0,31}})?"
"""The names that a list may contain, according to the caller's token: `logs/NAME` for a log and its
ledgers, `ledgers/NAMESPACE` for ledgers without a log. A `*` at the end stands for any further
characters. If empty, no name is allowed."""


class Body(BaseModel):
    """A value on the wire, immutable and strict. Only `received` accepts unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


T = TypeVar("T")


codec: Final[Callable[[Any], TypeAdapter[Any]]] = cache(TypeAdapter)
"""The cached adapter that reads and writes the JSON of a class of bodies or values."""


def json_of(value: object, without: Collection[str] = ()) -> bytes:
    """The JSON of a body or a value, `without` some of its fields."""
    return codec(type(value)).dump_json(value, exclude=set(without) or None)


def document_of(value: object) -> Any:
    """A body or a value as JSON in the form of Python dicts and lists."""
    return codec(type(value)).dump_python(value, mode="json")


def received(cls: type[T], data: bytes | str) -> T:
    """Parse a body or value that another process, or an earlier process of this service, wrote.
    Fields of a later release are ignored. (Bodies of requests are parsed strictly instead.)
    """
    value: T = codec(cls).validate_json(data, extra="ignore")
    return value


class LedgerCreateBody(Body):
    """`POST /v1/ledgers`. Copies of the attempt or the client's request get the same ledger."""

    row: LedgerMetadata
    attempt: values.Attempt
    once: Once | None = None


class LedgerChange(Body):
    """`PUT /v1/ledgers/{id}`: replace the metadata if the stored version is `row.version`. 409
    `already-done` if the client's request was already carried out.
    """

    row: LedgerMetadata
    attempt: values.Attempt
    missed: tuple[MissedRange, ...] = Field(default=(), max_length=100_000)
    once: Once | None = None


class RowDelete(Body):
    """`DELETE /v1/ledgers/{id}`: replace the metadata by a tombstone if the metadata has this
    version and attempt. `DELETE /v1/logs/{name}` does the same for a log, and frees the log's name.
    """

    version: values.Version
    row_attempt: values.AttemptOrNone = ""
    """The attempt that wrote the metadata: a database that went back may reuse the version."""
    attempt: values.Attempt


class Resealed(Body):
    """The number of ledgers whose keys were re-encrypted; `next` is the next `after` or null."""

    resealed: int
    next: values.LedgerId | None


COPIES_PRESENTED_MAX = 1000
"""Maximum number of witnesses of copies in a bookie's request (chosen by judgement)."""

HELD_MAX = 100
"""Maximum number of attempts of copies per ledger in a request: 4 KB (chosen by judgement)."""

PROOFS_MAX = 100
"""Maximum number of ledgers in a bookie's request for proofs: 400 KB (chosen by judgement)."""

WITNESSES_MAX: Final = 100
"""Maximum number of witnesses in one header and of changes in flight (chosen by judgement)."""

WITNESS: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9a-f]{8}"
"""The format of a witness (rule 18a) on the wire and on bookies' disks: the attempt token of an
acknowledged change, with a checksum that binds it to the cluster. If the database lacks the token
of a witness, the database went back. The metadata service creates witnesses, and bookies create
witnesses of their copies of metadata.
"""

Witness = Annotated[str, StringConstraints(pattern=rf"^{WITNESS}$")]


def witness_of(cluster_id: str, token: str) -> str:
    """The witness of the change with the attempt `token` in a cluster."""
    checksum = google_crc32c.value(f"{cluster_id} {token}".encode())
    return f"{token}.{checksum:08x}"


def token_of(cluster_id: str, witness: str) -> str | None:
    """A witness's token; None if the witness is damaged or another cluster's, so it is no proof."""
    token, _, _ = witness.partition(".")
    return token if witness_of(cluster_id, token) == witness else None


def witnesses_to_header(witnesses: Iterable[str]) -> str:
    """The header value for these witnesses."""
    return ",".join(witnesses)


def witnesses_from_header(value: str) -> tuple[str, ...]:
    """The witnesses in a header, in order; none if the value is not a list of witnesses."""
    found = tuple(item.strip() for item in value.split(","))
    is_sound = len(found) <= WITNESSES_MAX and all(re.fullmatch(WITNESS, item) for item in found)
    return found if is_sound else ()


class MissingWitness(Body):
    """A witness that the database lacks, and the process that presented it."""

    witness: Witness
    holder: values.Text


class WitnessState(Body):
    """The state of a metadata service's database (rule 18a)."""

    held: tuple[Witness, ...]
    missing: tuple[MissingWitness, ...]


class CopyWitnesses(Body):
    """`POST /v1/witnesses/copies`: witnesses of a bookie's copies of metadata (rule 18c)."""

    witnesses: tuple[Witness, ...] = Field(min_length=1, max_length=COPIES_PRESENTED_MAX)
    holder: values.BookieName


class HeldBody(Body):
    """A ledger, and the attempts of a bookie's copies of its metadata."""

    ledger_id: values.LedgerId
    attempts: tuple[values.Attempt, ...] = Field(max_length=HELD_MAX)


class LedgerProofsAsk(Body):
    """`POST /v1/ledger-proofs`: the ledgers that a bookie wants to delete or take out of limbo."""

    holder: values.BookieName
    ledgers: tuple[HeldBody, ...] = Field(min_length=1, max_length=PROOFS_MAX)


class LedgerProof(Body):
    """A ledger's metadata, from the primary (rules 18 and 18c)."""

    ledger_id: values.LedgerId
    row: LedgerMetadata | None
    """None if there is no metadata, or if `lost` names changes."""
    deleted: bool
    """Whether the ledger has a tombstone."""
    lost: tuple[values.Attempt, ...]
    """Attempts of copies that the database lacks. If there are any, the other fields prove nothing."""


class LedgerProofs(Body):
    """The response: a proof for each ledger, in the order of the request, from one snapshot."""

    ledgers: tuple[LedgerProof, ...]


class KeptLedger(Body):
    """A ledger that bookies keep because the database lacks these changes of its metadata."""

    ledger_id: values.LedgerId
    holders: tuple[values.Text, ...]
    attempts: tuple[values.Attempt, ...]


class KeptLedgers(Body):
    """The number of ledgers that bookies keep, and the first of these ledgers by id (rule 18c)."""

    count: Annotated[int, Field(ge=0)]
    ledgers: tuple[KeptLedger, ...]


class WitnessAccept(Body):
    """`POST /v1/witnesses/accept`: continue without these changes, which are lost."""

    witnesses: tuple[Witness, ...] = Field(default=(), max_length=1000)
    lost: tuple[values.BookieName, ...] = Field(default=(), max_length=1000)
    """Bookies that need not answer, because they will never return."""
    ledgers: tuple[values.LedgerId, ...] = Field(default=(), max_length=1000)
    """Ledgers that keep the database's metadata, although bookies have copies of changes that the
    database lacks. Entries may be lost."""


class BookieWitnesses(Body):
    """`GET /v1/witnesses` of a bookie: its witnesses of the metadata database (rule 18a)."""

    bookie: values.BookieName
    cluster_id: values.Text
    """The cluster of the bookie's directory; empty while the directory is new."""
    witnesses: tuple[Witness, ...]
    highest_ledger: values.IdOrNone | None
    """The highest id below `ASSIGNED_ID_END` of a ledger that is or was stored on the bookie; -1 if
    there is none, null while the bookie reads its log."""


class LedgerListBody(Body):
    """One page of ledgers; `next` is the `after` of the next page, null at the end."""

    ledgers: tuple[LedgerMetadata, ...]
    next: values.LedgerId | None


class LedgerHeadsAsk(Body):
    """`POST /v1/ledger-heads`: the ledgers whose heads are requested. Changes nothing."""

    ledgers: tuple[values.LedgerId, ...] = Field(max_length=HEADS_MAX)


class LedgerHeads(Body):
    """The response, with a head for each ledger that exists or existed, by id. A missing ledger was
    never created or is lost, so its absence is no proof (rule 18).
    """

    ledgers: tuple[LedgerHead, ...]


class Change(Body):
    """One line of `GET /v1/changes`.

    `hello`: from now on, no change is missed. `gap`: changes may have been missed, so clients read
    the metadata again. `heartbeat`: the stream is alive. `change`: the metadata of a ledger, or of
    the log `log`, has changed.
    """

    kind: Literal["hello", "gap", "heartbeat", "change"]
    ledger_id: values.LedgerId | None = None
    version: values.Version | None = None
    state: State | None = None
    deleted: bool = False
    log: values.LogName | None = None


class Cookie(Body):
    """The identity of the data that belongs to a bookie's name (rule 15, I28)."""

    incarnation: Annotated[int, Field(ge=0, lt=10**18)]
    cluster_id: values.Text
    instance: values.Text
    """A random id that is created with the directory, so that each directory has a different id."""
    directories: tuple[values.Text, ...] = ()
    boots: values.Number = 0
    """The number of starts. A directory with a lower number than its cookie is an old copy."""
    may_fix: bool = False
    """An operator's permission for one start to continue as a new incarnation if data is lost."""
    url: values.Text = ""
    """The URL of the registered process."""
    process: values.Text = ""
    """A random id that each process creates when it starts (rule 15a)."""


STAND_IN: Final = ""
"""The instance that a rebuild writes to a silent bookie's cookie. No directory has it (rule 15b)."""


class CookiePut(Body):
    """`PUT /v1/bookies/{name}/cookie`: a compare-and-swap, or a creation if `version` is null."""

    cookie: Cookie
    version: values.Version | None = None
    attempt: values.Attempt


class CookieRow(Body):
    """A registered cookie."""

    name: values.BookieName
    version: values.Version
    cookie: Cookie
    log_end: values.Number = 0
    """The last reported end of this instance's log on disk. A directory whose log ends earlier went
    back to a snapshot."""


class LogEnd(Body):
    """`PUT /v1/bookies/{name}/log-end`: how far the registered process's log is on disk."""

    process: values.Text
    log_end: values.Number


BookieMode = Literal["writable", "read-only", "draining"]
BookieState = Literal["writable", "read-only", "draining", "lost"]


class LedgerUse(Body):
    """A ledger that names a bookie. `detail`: why the last attempt of a repair failed."""

    ledger_id: values.LedgerId
    member: values.Member
    state: State
    has_place: bool = True
    """Whether the member is in an ensemble. A member outside of all ensembles is the target of a
    repair, or is kept until its successor has a copy of the metadata (rule 20b)."""
    leaves: bool = False
    """Whether a repair is replacing the member, or has just replaced it."""
    failures: int = 0
    detail: values.Text = ""


class BookieUses(Body):
    """`GET /v1/bookies/{name}/uses`: the numbers of ledgers and repairs that name a bookie in any
    incarnation, and the `first` of these ledgers by id. Includes the ledgers that are being
    repaired to the bookie.
    """

    bookie: values.BookieName
    ledgers: int
    repairs: int
    """The number of items of the repair queue that name the bookie."""
    first: tuple[LedgerUse, ...] = ()


class BookieStatePut(Body):
    """`PUT /v1/state` of a bookie: the mode that an operator sets."""

    state: BookieMode


class BookieHeartbeat(Body):
    """`PUT /v1/bookies/{name}/heartbeat`: this incarnation counts as live for another `ttl_s`."""

    incarnation: Annotated[int, Field(ge=0, lt=10**18)]
    url: values.Text
    zone: values.Text = ""
    state: BookieMode = "writable"
    free_bytes: values.Number = 0
    ttl_s: Annotated[float, Field(gt=0, le=3600, strict=False)] = 5.0
    process: values.Text = ""
    """The `process` of the cookie, since only heartbeats of the registered process count."""


class BookieInfo(Body):
    """A registered bookie and its liveness; `lost` means that no heartbeat arrived in time."""

    id: values.Member
    state: BookieState
    url: values.Text
    zone: values.Text = ""
    free_bytes: int = 0

    @classmethod
    def lost(cls, name: str, incarnation: int, url: str = "") -> "BookieInfo":
        """A bookie whose heartbeat did not arrive in time."""
        return cls(id=member_of(name, incarnation), state="lost", url=url)


class BookieList(Body):
    """`GET /v1/bookies`. Liveness is advice (I31); `stale` means that Redis failed."""

    bookies: tuple[BookieInfo, ...]
    stale: bool = False
    liveness_age_s: float | None = None
    """Time in seconds for which liveness was recorded without a gap; None if unknown."""

    def shows_absence(self, grace_s: float) -> bool:
        """Whether liveness has been recorded for `grace_s`. If not, a missing heartbeat does not
        prove that a process is dead (rule 21).
        """
        return not self.stale and self.liveness_age_s is not None and self.liveness_age_s >= grace_s


class ServiceHeartbeat(Body):
    """`PUT /v1/services/{kind}/{id}/heartbeat`: the process is live for another `ttl_s`."""

    url: values.Text
    internal_url: values.Text = ""
    """The URL of the internal listener; empty if `url` is the only listener."""
    state: values.Text = "ready"
    ttl_s: Annotated[float, Field(gt=0, le=3600, strict=False)] = 5.0


class ServiceInfo(Body):
    """A live service."""

    kind: values.Text
    id: values.Text
    url: values.Text
    internal_url: values.Text = ""
    """The URL of the internal listener; empty if `url` is the only listener."""
    state: values.Text


class ServiceList(Body):
    """`GET /v1/services`: the live services, according to Redis."""

    services: tuple[ServiceInfo, ...]
    stale: bool = False


class HeartbeatTaken(Body):
    """The answer to a heartbeat; if Redis is down, `recorded` is false."""

    recorded: bool


class ClusterId(Body):
    """`GET /v1/cluster-id`: a random id that was created with the database."""

    cluster_id: values.Text
