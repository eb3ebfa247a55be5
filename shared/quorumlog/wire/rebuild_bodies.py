"""Bodies of internal routes: bookies' digests for comparing replicas, their copies of metadata for
rebuilding a lost database (rule 18d), and a rebuild's reports.

`GET /v1/rows` of a bookie returns copies of metadata, ledger keys and deleted ids. Only the
metadata service gets ledger keys; it stores them anyway.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, WithJsonSchema

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.quorum import QUORUM_MAX
from quorumlog.protocol.rebuild import Action
from quorumlog.protocol.values import BookieName, EntryId, IdOrNone, Key, LedgerId, Text
from quorumlog.wire.bodies import Body, Cookie, WitnessState

NOT_REBUILT: Final = (
    "keys of passwords",
    "logs without records",
    "settings and states of logs",
    "writer tokens of logs",
    "producers of logs",
    "sources of forks",
    "times to live of streams",
    "open transactions",
    "versions of apps",
    "deletions that no answering bookie heard of",
    "the repair queue and its settings",
    "idempotency keys",
    "access tokens",
    "the audit log",
    "tokens of other changes",
)
"""Data that no bookie holds and no rebuild restores (the consequences: docs/guides/rebuild.md)."""


class HeldRows(Body):
    """A bookie's copies of one ledger's metadata."""

    ledger_id: LedgerId
    deleted: bool = False
    """Whether this ledger was deleted (rule 16a)."""
    ledger_key: Key = b""
    highest_entry: IdOrNone = -1
    limbo: bool = False
    """Whether an older incarnation was a member, so that entries may be lost here (rule 15)."""
    copies: tuple[str, ...] = ()
    """The encoded copies of the metadata (`wire/row_copies.py`)."""


class RowsPage(Body):
    """A page of `GET /v1/rows` by ledger id; `next` is the `after` of the next page."""

    bookie: Text
    """The bookie's present incarnation, as `name@incarnation`."""
    cookie: Cookie | None = None
    """The cookie of the directory; null if the directory was never registered."""
    log_end: int = 0
    may_lack: bool = False
    """Whether acknowledged entries may be missing: the bookie deferred syncs and was not stopped
    cleanly, or its log was salvaged."""
    witnesses: tuple[Text, ...] = ()
    """On the first page: the bookie's witnesses of the lost database (rule 18a)."""
    ledgers: tuple[HeldRows, ...] = ()
    next: LedgerId | None = None


class RebuildState(Body):
    """`GET /v1/rebuild` of the metadata service: the state of its database."""

    is_empty: bool
    """Whether the database never had a ledger, a log or a bookie."""
    was_rebuilt: bool


class RebuildAsk(Body):
    """`POST /v1/rebuild`: write the metadata that bookies' copies prove."""

    dry_run: bool = False
    """Only report what would be written."""
    take_over: bool = False
    """The lost database is gone for ever: the witnesses that bookies keep of it are accepted as
    lost, and an empty database becomes that of the bookies' cluster."""
    bookies: tuple[Text, ...] = Field(default=(), max_length=10_000)
    """URLs of further bookies, which are neither registered nor waiting to be."""
    without: tuple[BookieName, ...] = Field(default=(), max_length=10_000)
    """Bookies that an operator declares gone for ever: the rebuild does not wait for their data."""
    after: LedgerId | None = None
    """Continue: write only ledgers with ids above this one."""


class AskedBookie(Body):
    """A bookie that answered the rebuild."""

    bookie: Text
    url: Text
    may_lack: bool


class RebuildFinding(Body):
    """A ledger or a log that an operator should check, and why."""

    ledger_id: LedgerId | None = None
    log: Text | None = None
    action: Action
    why: Text


class RebuildReport(Body):
    """The results of a rebuild."""

    cluster_id: Text
    dry_run: bool
    bookies: tuple[AskedBookie, ...]
    silent: tuple[Text, ...]
    """Bookies that metadata or cookies name, but that did not answer."""
    ledgers: dict[Action, int]
    """How many ledgers were found, by what the rebuild does with their metadata."""
    logs: dict[Action, int]
    open_ledgers: int
    """How many written ledgers are not CLOSED: a recovery finds their ends."""
    may_be_deleted: int = 0
    """How many written CLOSED ledgers may have been deleted: so many bookies are silent, or lost
    their data, that only these may know."""
    sealed_passwords: int
    """How many written ledgers have a password: only the password restores their keys."""
    holes: int
    """How many ledgers in the middle or at the end of logs have no metadata: reads there fail."""
    cookies: tuple[Text, ...]
    """Bookies whose cookies were written."""
    next_ledger_id: int
    """New ledgers get ids from this one on."""
    findings: tuple[RebuildFinding, ...]
    not_rebuilt: tuple[Text, ...]
    """The parts of the lost metadata that no bookie holds (`NOT_REBUILT`)."""
    findings_left_out: int = 0


class RebuildLine(Body):
    """A line in the answer to a rebuild, or to an acceptance, which judges the same ledgers. Lines
    show progress; the last line has a report, a state or an error.
    """

    phase: Literal["survey", "ledgers", "logs"] | None = None
    done: int = 0
    """How many ledgers are done in this phase."""
    of: int | None = None
    """The number of all ledgers, once it is known."""
    through: LedgerId | None = None
    """Ledgers up to this id are written: the `after` with which to continue the rebuild."""
    report: RebuildReport | None = None
    state: WitnessState | None = None
    """The result of an acceptance."""
    error: Text | None = None
    code: Text | None = None
    """The error's code, if it has one."""


Range = Annotated[
    tuple[EntryId, EntryId],
    # Equivalent to `prefixItems`, which some OpenAPI readers do not know.
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": ID_MAX},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


class DigestsAsked(Body):
    """`POST /v1/ledgers/{id}/digests` of a bookie: ranges to digest, so that replicas are compared
    without sending entries. Callers are autorecovery's checks, and gateways that accept a loss.
    """

    ranges: Annotated[tuple[Range, ...], Field(max_length=1000)]
    modulus: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 1
    residue: Annotated[int, Field(ge=0, lt=QUORUM_MAX)] = 0
    """Digest only entries whose id is `residue` modulo `modulus`: one write set of a striped
    ledger."""
    from_disk: bool = False
    """Wait for pending writes, and read every copy from the disk."""


class RangeDigest(Body):
    """SHA-256 over ledger, entry id, length and payload of the stored entries of a range.

    LACs and authentication codes are left out: a recovery writes an entry again with its own ones.
    """

    first: int
    last: int
    entries: int
    """How many entries of the requested residue are stored and readable."""
    present: tuple[Range, ...]
    """Ranges in the index, of any residue; at most 1,000."""
    digest: str
    damaged: tuple[Range, ...]
    """Entries of the requested residue that are in the index and unreadable."""


class DigestsBody(Body):
    """Digests of ranges. In limbo, an entry that is not present is unknown."""

    bookie: str
    ledger_id: int
    limbo: bool
    digests: tuple[RangeDigest, ...]
