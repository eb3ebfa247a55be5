"""What bookies tell of their copies, as bodies of the internal routes: digests, by which replicas are compared, and the
rows of which a lost database is rebuilt (rule 18d); and what the rebuild tells.

`GET /v1/rows` of a bookie gives copies of rows, ledger keys and deleted ids. Ledger keys go to the metadata service
only, which keeps them anyway.
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
"""What no bookie holds, so that no rebuild makes it again. docs/guides/rebuild.md says what follows of each."""


class HeldRows(Body):
    """What a bookie holds of one ledger's row."""

    ledger_id: LedgerId
    deleted: bool = False
    """The id is one of a deleted ledger (rule 16a)."""
    ledger_key: Key = b""
    highest_entry: IdOrNone = -1
    limbo: bool = False
    """An older incarnation of the bookie was a member, and what it held may be lost (rule 15)."""
    copies: tuple[str, ...] = ()
    """The copies as they were made (`wire/row_copies.py`)."""


class RowsPage(Body):
    """A page of `GET /v1/rows` by ledger id; `next` is the `after` of the next one."""

    bookie: Text
    """The bookie's present incarnation, as `name@incarnation`."""
    cookie: Cookie | None = None
    """Of the directory; null where it was never registered."""
    log_end: int = 0
    may_lack: bool = False
    """What the bookie acknowledged may be missing: it was not stopped cleanly while it deferred syncs, or its log was
    salvaged."""
    witnesses: tuple[Text, ...] = ()
    """Of the first page: what the bookie knows of the lost database (rule 18a)."""
    ledgers: tuple[HeldRows, ...] = ()
    next: LedgerId | None = None


class RebuildState(Body):
    """`GET /v1/rebuild` of the metadata service."""

    is_empty: bool
    """The database never had a ledger, a log or a bookie."""
    was_rebuilt: bool


class RebuildAsk(Body):
    """`POST /v1/rebuild`: write what bookies prove."""

    dry_run: bool = False
    """Tell what would be written."""
    take_over: bool = False
    """The lost database is gone for ever: the witnesses that bookies keep of it are accepted as lost, and an empty
    database becomes that of the cluster which the bookies are of."""
    bookies: tuple[Text, ...] = Field(default=(), max_length=10_000)
    """URLs of bookies beside those that are registered or wait."""
    without: tuple[BookieName, ...] = Field(default=(), max_length=10_000)
    """Bookies that are gone for ever, by an operator's word: nothing waits for what they may hold."""
    after: LedgerId | None = None
    """Continue: write only ledgers with ids above this one."""


class AskedBookie(Body):
    """A bookie that answers."""

    bookie: Text
    url: Text
    may_lack: bool


class RebuildFinding(Body):
    """A ledger or a log about which people should know something."""

    ledger_id: LedgerId | None = None
    log: Text | None = None
    action: Action
    why: Text


class RebuildReport(Body):
    """What a rebuild found and did."""

    cluster_id: Text
    dry_run: bool
    bookies: tuple[AskedBookie, ...]
    silent: tuple[Text, ...]
    """Bookies that rows or cookies name and that do not answer."""
    ledgers: dict[Action, int]
    """How many ledgers were found, by what is done about their rows."""
    logs: dict[Action, int]
    open_ledgers: int
    """Of those written: not CLOSED, so a recovery finds their ends."""
    may_be_deleted: int = 0
    """Of those written: CLOSED, and so many bookies are silent (or lost their data) that these alone may know of a
    deletion."""
    sealed_passwords: int
    """Of those written: with a password, whose keys only the password gives again."""
    holes: int
    """Ledgers in the middle or at the end of logs that have no rows: reads of their records fail."""
    cookies: tuple[Text, ...]
    """Bookies whose cookies were written."""
    next_ledger_id: int
    """New ledgers get ids from this one on."""
    findings: tuple[RebuildFinding, ...]
    not_rebuilt: tuple[Text, ...]
    """What of the rows and logs that were lost no bookie holds."""
    findings_left_out: int = 0


class RebuildLine(Body):
    """A line of the answer of a rebuild, or of an acceptance, which judges the same ledgers: progress, and at last a
    report, a state or an error.
    """

    phase: Literal["survey", "ledgers", "logs"] | None = None
    done: int = 0
    """Ledgers done in this phase."""
    of: int | None = None
    """All ledgers, once they are counted."""
    through: LedgerId | None = None
    """Ledgers up to this id are written: `after` of a rebuild that goes on."""
    report: RebuildReport | None = None
    state: WitnessState | None = None
    """Of an acceptance."""
    error: Text | None = None
    code: Text | None = None
    """The error's code, where it has one."""


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
    """`POST /v1/ledgers/{id}/digests` of a bookie: ranges to digest, so that replicas are compared without sending their
    entries. Autorecovery's checks ask, and the gateway before it accepts a loss.
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

    LACs and authentication codes are left out: a recovery writes an entry again with its own.
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
