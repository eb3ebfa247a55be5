"""Bodies of internal routes: bookies' digests for comparing replicas, their copies of metadata for
rebuilding a lost database (rule 18d), and a rebuild's reports.

`GET /v1/rows` of a bookie returns copies of metadata, ledger keys and deleted ids. Only the
metadata service receives ledger keys, which its database stores anyway.
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
"""Data that no bookie stores and no rebuild restores (docs/guides/rebuild.md explains the effects)."""


class HeldRows(Body):
    """A bookie's copies of one ledger's metadata."""

    ledger_id: LedgerId
    deleted: bool = False
    """Whether this ledger was deleted (rule 16a)."""
    ledger_key: Key = b""
    highest_entry: IdOrNone = -1
    limbo: bool = False
    """Whether an older incarnation was a member, so that entries may be missing (rule 15)."""
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
    """Whether acknowledged entries may be missing, because the bookie deferred syncs and was not
    stopped cleanly, or because its log was salvaged."""
    witnesses: tuple[Text, ...] = ()
    """The bookie's witnesses of the lost database (rule 18a), on the first page only."""
    ledgers: tuple[HeldRows, ...] = ()
    next: LedgerId | None = None


class RebuildState(Body):
    """`GET /v1/rebuild` of the metadata service: the state of its database."""

    is_empty: bool
    """Whether the database never had a ledger, a log or a bookie."""
    was_rebuilt: bool


class RebuildAsk(Body):
    """`POST /v1/rebuild`: write the metadata that is proven by bookies' copies."""

    dry_run: bool = False
    """Whether the rebuild only reports the metadata that it would write."""
    take_over: bool = False
    """Whether the lost database is gone for ever. Its changes that bookies have witnesses of are
    then accepted as lost. An empty database then belongs to the bookies' cluster."""
    bookies: tuple[Text, ...] = Field(default=(), max_length=10_000)
    """URLs of further bookies, which are neither registered nor waiting for the rebuild."""
    without: tuple[BookieName, ...] = Field(default=(), max_length=10_000)
    """Bookies that an operator declares gone for ever, for which the rebuild does not wait."""
    after: LedgerId | None = None
    """The id after which to continue: only ledgers with higher ids are written."""


class AskedBookie(Body):
    """A bookie that answered the rebuild."""

    bookie: Text
    url: Text
    may_lack: bool


class RebuildFinding(Body):
    """A ledger or a log that an operator should check, with the reason."""

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
    """Bookies that are in metadata or cookies, but did not answer."""
    ledgers: dict[Action, int]
    """Numbers of found ledgers, by the action of the rebuild on their metadata."""
    logs: dict[Action, int]
    open_ledgers: int
    """Number of written ledgers that are not CLOSED, so that a recovery must find their ends."""
    may_be_deleted: int = 0
    """Number of written CLOSED ledgers that may have been deleted, because all bookies with the
    deletion may be silent or have lost data."""
    sealed_passwords: int
    """Number of written ledgers with a password, whose keys only the password restores."""
    holes: int
    """Number of ledgers without metadata in the middle or at the end of a log: reads of them fail."""
    cookies: tuple[Text, ...]
    """Bookies whose cookies were written."""
    next_ledger_id: int
    """The id of the next new ledger."""
    findings: tuple[RebuildFinding, ...]
    not_rebuilt: tuple[Text, ...]
    """The parts of the lost metadata that no bookie stores (`NOT_REBUILT`)."""
    findings_left_out: int = 0


class RebuildLine(Body):
    """A line of the answer to a rebuild, or to the acceptance of a loss (which checks the same
    ledgers). Lines show progress; the last line has a report, a state or an error.
    """

    phase: Literal["survey", "ledgers", "logs"] | None = None
    done: int = 0
    """Number of ledgers done in this phase."""
    of: int | None = None
    """Number of all ledgers, once it is known."""
    through: LedgerId | None = None
    """The id up to which ledgers are written: pass it as `after` to continue the rebuild."""
    report: RebuildReport | None = None
    state: WitnessState | None = None
    """The result of the acceptance of a loss."""
    error: Text | None = None
    code: Text | None = None
    """The error's code, if it has one."""


Range = Annotated[
    tuple[EntryId, EntryId],
    # Equivalent to `prefixItems`, which some OpenAPI tools do not support.
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
    """`POST /v1/ledgers/{id}/digests` of a bookie: ranges to digest, so that callers can compare
    replicas without reading entries. Callers: autorecovery, and gateways that accept a loss.
    """

    ranges: Annotated[tuple[Range, ...], Field(max_length=1000)]
    modulus: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = 1
    residue: Annotated[int, Field(ge=0, lt=QUORUM_MAX)] = 0
    """Digest only entries whose id is `residue` modulo `modulus`, as in one write set of a striped
    ledger."""
    from_disk: bool = False
    """Whether to wait for pending writes, and read every copy from the disk."""


class RangeDigest(Body):
    """SHA-256 over ledger, entry id, length and payload of the stored entries of a range.

    LACs and authentication codes are left out, because a recovery rewrites entries with new LACs and codes.
    """

    first: int
    last: int
    entries: int
    """Number of stored and readable entries of the requested residue."""
    present: tuple[Range, ...]
    """Ranges in the index, of any residue; at most 1,000."""
    digest: str
    damaged: tuple[Range, ...]
    """Indexed but unreadable entries of the requested residue."""


class DigestsBody(Body):
    """Digests of ranges. If the ledger is in limbo, an entry that is not present is unknown."""

    bookie: str
    ledger_id: int
    limbo: bool
    digests: tuple[RangeDigest, ...]
