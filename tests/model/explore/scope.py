"""What may happen in a search, and how often."""

from dataclasses import dataclass
from typing import Any

from quorumlog.protocol.log import PRODUCERS_MAX


@dataclass(frozen=True, slots=True)
class Scope:
    """A small world. Whatever is not bounded here happens in every order."""

    name: str
    shape: tuple[int, int, int] = (3, 3, 2)
    entries: int = 1
    window: int = 1
    """How many entries may be pending at once."""
    recoverers: int = 1
    spares: int = 0
    timeouts: int = 0
    """How many requests may be answered UNKNOWN while they are still under way."""
    timers: int = 0
    """How many timers may fire."""
    crashes: int = 0
    """How many bookies may lose all that they have."""
    closes: bool = False
    deletes: bool = False
    """Whether the ledger may be deleted once it is CLOSED, and dropped by each bookie at any time."""
    states_max: int = 3_000_000

    @property
    def is_striped(self) -> bool:
        """Whether entries go to different bookies: then no two bookies are alike."""
        return self.shape[0] != self.shape[1]


@dataclass(frozen=True, slots=True)
class LogScope:
    """A small world of a log. Whatever is not bounded here happens in every order."""

    name: str
    requests: tuple[str, ...] = ("p0",)
    """What clients send, each to any gateway: `p0` is the first record of the producer p, `p1` the next
    one, sent once `p0` is acknowledged; a single letter is a record without a producer."""
    repeats: int = 0
    """How often a request of the producer p may be sent again."""
    forces: int = 1
    """How often a gateway may be made to take the log over, as `open` does. A gateway that finds no
    owner takes the log over by itself."""
    ledgers: int = 3
    """How many ledgers may be created: gateways that duel create one each time."""
    rolls: int = 0
    publishes: int = 0
    overwrites: bool = False
    """Whether a publication drops what was on the log before."""
    truncations: int = 0
    """How often a client may drop all closed ledgers but the last, which are then deleted."""
    deletions: int = 0
    """How often the log may be deleted, and created again under its name."""
    losses: int = 0
    """How often the database may go back, so that the log no longer names its last ledger, which has no entry yet."""
    heads: int = 0
    """How often a gateway may reread the row's head (rule 16a), which may arrive late."""
    remembers: int = PRODUCERS_MAX
    """How many producers the log remembers."""
    kills: int = 0
    """How many gateways may die."""
    refusals: int = 0
    """How often a gateway may have too little room for what its owner submits."""
    states_max: int = 2_000_000


@dataclass(frozen=True, slots=True)
class RewriteScope(LogScope):
    """A small world of a log whose sealed ledgers are rewritten (rules 27c to 27f)."""

    requests: tuple[str, ...] = ()
    forces: int = 0
    ledgers: int = 9
    sealed: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """The sealed ledgers at the beginning: the names of the records (`record_of`) of their batches."""
    appended: tuple[str, ...] = ()
    """Records in the open ledger at the beginning."""
    published: int = 0
    """The sealed ledger that a transaction published, by its id, from 2 on; 0: none."""
    work: tuple[tuple[Any, ...], ...] = (("merge", 9),)
    """What rewriters do, once each, from any moment on: ("merge", how many ledgers), ("pass",) or ("index",). The first
    one runs at the owner's gateway, which hears of its changes."""
    sweeps: int = 0
    """How often the sweep takes a ledger while others are at work."""
    fork_at: int = 0
    """Where a fork may begin; 0: there is none."""
    compacts: bool = False
    clean: int = 0
    """How many of the sealed ledgers, the first ones, a pass has covered before."""
    ages: bool = False
    """Whether time may pass, so that records expire, and tombstones may go."""
    keys_max: int = 9
    """How many keys a pass remembers."""
    group_bytes: int = 1 << 20
    """How much a pass rewrites to one ledger: a sealed ledger has 10 bytes."""
    lost: int = 0
    """How many requests of rewriters may fail, or be answered by nobody and be done nevertheless."""
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class EndScope:
    """A small world of what others than the writer may say of a ledger (rules 5, 13 and 18b). Each answer comes, fails or
    stays away, in every order.
    """

    name: str
    shape: tuple[int, int, int] = (3, 3, 2)
    others: int = 0
    """Bookies that are no members of the last fragment, and may be asked to keep a copy of the row."""
    earlier: int = 0
    """Members of an earlier fragment only."""
    entries: int = 0
    """Entries that the writer sends while the LAC is asked for. Without any, copies of a row are sent."""
    is_open: bool = False
    states_max: int = 1_000_000


AnyScope = Scope | LogScope | EndScope
