"""Bodies of the metadata service's API, as strict pydantic models, and how values become JSON and come back.

Values of the protocol (`protocol/values.py`) are bodies and fields of bodies as they are. JSON lists become tuples, while
`1.0` and `"1"` are no integers, and unknown fields are refused. The gateway's public bodies are elsewhere.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import member_of
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.values import (
    Attempt,
    AttemptOrNone,
    BookieName,
    IdOrNone,
    LedgerId,
    Member,
    Number,
    Text,
    Version,
)

HEADS_MAX = 1000
"""Heads in one request: an answer of 100 KiB (taste)."""

_SHOWN = r"(logs|ledgers)/([A-Za-z0-9._-]{1,200}\*?|\*)"
SHOWN = rf"({_SHOWN}(,{_SHOWN}){{0,31}})?"
"""The names that a list may contain, by the grants of the caller's token: `logs/NAME` for a log and its ledgers, `ledgers/NAMESPACE` for ledgers without a
log. A `*` at the end stands for any further characters. Empty: nothing."""


class Body(BaseModel):
    """A value on the wire: frozen, strict, and without unknown fields unless `received` reads it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


T = TypeVar("T")


codec: Final[Callable[[Any], TypeAdapter[Any]]] = cache(TypeAdapter)
"""What reads and writes the JSON of a class of bodies or values."""


def json_of(value: object, without: Collection[str] = ()) -> bytes:
    """The JSON of a body or a value, `without` some of its fields."""
    return codec(type(value)).dump_json(value, exclude=set(without) or None)


def document_of(value: object) -> Any:
    """The JSON of a body or a value as Python's dicts and lists."""
    return codec(type(value)).dump_python(value, mode="json")


def received(cls: type[T], data: bytes | str) -> T:
    """The body or value that another process wrote, or this one before it was replaced: fields that a later release has
    added are left out. Bodies of requests are read strictly instead: what they ask for must not be left out.
    """
    value: T = codec(cls).validate_json(data, extra="ignore")
    return value


class LedgerCreateBody(Body):
    """`POST /v1/ledgers`. A repeat of an attempt, or of the client's request, gets the same row."""

    row: LedgerMetadata
    attempt: Attempt
    once: Once | None = None


class LedgerChange(Body):
    """`PUT /v1/ledgers/{id}`: replace the row if its version still is `row.version`. 409 `already-done` if a change for
    the client's request was made before.
    """

    row: LedgerMetadata
    attempt: Attempt
    missed: tuple[MissedRange, ...] = Field(default=(), max_length=100_000)
    once: Once | None = None


class RowDelete(Body):
    """`DELETE /v1/ledgers/{id}`: replace the row by a tombstone if it still is the one of this version and attempt.
    `DELETE /v1/logs/{name}` does so with a log, whose name is free again then.
    """

    version: Version
    row_attempt: AttemptOrNone = ""
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

WITNESSES_MAX: Final = 100
"""Witnesses in one header: a process remembers those of its concurrent changes (taste)."""

WITNESS: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9a-f]{8}"
"""A witness of the metadata's database (rule 18a), as it travels and as bookies store it: the attempt token of an answered
change, with a checksum that binds it to the cluster. The database must contain the token of every witness: a database that
lacks one went back. The metadata service makes witnesses; all other processes pass them on unchanged.
"""

Witness = Annotated[str, StringConstraints(pattern=rf"^{WITNESS}$")]


def witness_of(cluster_id: str, token: str) -> str:
    """The witness of a change of this cluster."""
    checksum = google_crc32c.value(f"{cluster_id} {token}".encode())
    return f"{token}.{checksum:08x}"


def token_of(cluster_id: str, witness: str) -> str | None:
    """The token; None for a damaged witness or one of another cluster, which proves nothing."""
    token, _, _ = witness.partition(".")
    return token if witness_of(cluster_id, token) == witness else None


def witnesses_to_header(witnesses: Iterable[str]) -> str:
    """The header's value."""
    return ",".join(witnesses)


def witnesses_from_header(value: str) -> tuple[str, ...]:
    """The witnesses in a header, in order; none where the header is no list of witnesses."""
    found = tuple(item.strip() for item in value.split(","))
    is_sound = len(found) <= WITNESSES_MAX and all(re.fullmatch(WITNESS, item) for item in found)
    return found if is_sound else ()


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
    """`POST /v1/ledger-proofs`: the ledgers whose metadata a bookie needs before it deletes them or ends their limbo."""

    holder: BookieName
    ledgers: tuple[HeldBody, ...] = Field(min_length=1, max_length=PROOFS_MAX)


class LedgerProof(Body):
    """A ledger's row, from the primary (rules 18 and 18c)."""

    ledger_id: LedgerId
    row: LedgerMetadata | None
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
    highest_ledger: IdOrNone | None
    """The highest id below `ASSIGNED_ID_END` of a ledger that it holds or held; -1: of none; null while
    it still reads its log.
    """


class LedgerListBody(Body):
    """One page; `next` is the `after` of the next one, null at the end."""

    ledgers: tuple[LedgerMetadata, ...]
    next: LedgerId | None


class LedgerHeadsAsk(Body):
    """`POST /v1/ledger-heads`: the ledgers whose heads are wanted. Changes nothing."""

    ledgers: tuple[LedgerId, ...] = Field(max_length=HEADS_MAX)


class LedgerHeads(Body):
    """The answer: a head for each ledger that exists or existed, by id. A ledger that is left out was
    never created, or is lost: its absence is no verdict (rule 18).
    """

    ledgers: tuple[LedgerHead, ...]


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
    boots: Number = 0
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
    log_end: Number = 0
    """How far the log of this instance was on disk, by the last report of its process; a directory
    whose log ends earlier went back (a snapshot)."""


class LogEnd(Body):
    """`PUT /v1/bookies/{name}/log-end`: the registered process reports how far its log is on disk."""

    process: Text
    log_end: Number


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
    free_bytes: Number = 0
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
