"""The state of an explored log: two gateways, ledgers, one row, and what is in flight.

A ledger here is what the ledger's own machines promise, which other scopes search: ids in order, an
acknowledged entry stays, a recovery keeps all that was acknowledged and any prefix of what was in
flight.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log.messages import Append, LedgerEnd, RecordsAppended
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum

QUORUM: Final = Quorum(1, 1, 1)
GATEWAYS: Final = 2
PUBLISHED: Final = 1
"""The transaction's ledger, which holds one record, "t". Ledgers that gateways create come after it."""

Life = tuple[int, int]
"""A process: its gateway, and how many processes of that gateway died before."""


class Ledger(NamedTuple):
    """A ledger as its machines promise it. `owner` is the process that writes it."""

    owner: Life
    is_closed: bool = False
    entries: tuple[bytes, ...] = ()
    in_flight: tuple[bytes, ...] = ()


class Stored(NamedTuple):
    """A record in a closed ledger that the row no longer names."""

    generation: int
    offset: int
    name: str
    ledger_id: int
    entry_id: int


class Hand(NamedTuple):
    """One gateway: its machine by number, and how often it was made to take the log over."""

    machine: int
    life: int = 0
    forces: int = 0


class World(NamedTuple):
    """A state of the search. Machines, ledgers, rows and messages are numbers of interned values."""

    hands: tuple[Hand, ...]
    ledgers: tuple[int, ...]
    """By id, from 1 on; -1: deleted."""
    row: int
    is_committed: bool = False
    flight: frozenset[int] = frozenset()
    """Messages (process, Ask or event): asked, or answered and not heard yet."""
    forwards: frozenset[tuple[Life, int, Life]] = frozenset()
    """Requests that one process forwarded to another: who asked, under which number, and whom."""
    sent: tuple[tuple[str, int], ...] = ()
    """How often each request was sent, and how often each bounded event happened."""
    acked: frozenset[tuple[str, RecordsAppended]] = frozenset()
    refused: frozenset[str] = frozenset()
    """Records without a producer that certainly were not appended."""
    kills: int = 0
    is_deleted: bool = False
    """Whether no log of the name exists. `row` is then the last one."""
    absent: frozenset[str] = frozenset()
    """Requests that a client sent before a deletion of the log, or while no log of the name existed."""
    generation: int = 0
    """How often the log was created again under its name."""
    stored: frozenset[Stored] = frozenset()
    """Records in ledgers that no row names any more."""
    room: int | None = None
    """How many more entries ledgers take before they refuse one; None: any number."""
    since: tuple[tuple[str, int], ...] = ()
    """By producer: the log's end before its first request (rule 26a)."""
    more: Any = None
    """The additional state of a world that explores rewrites."""

    def count(self, name: str) -> int:
        """How often a request was sent, or an event happened."""
        return dict(self.sent).get(name, 0)

    def counted(self, name: str) -> "World":
        """The world after one more of these."""
        counts = dict(self.sent)
        counts[name] = counts.get(name, 0) + 1
        return self._replace(sent=tuple(sorted(counts.items())))

    def without(self, message: int) -> "World":
        """The world without a message in flight."""
        return self._replace(flight=self.flight - {message})

    def with_hand(self, index: int, hand: Hand) -> "World":
        """The world with one gateway changed."""
        return self._replace(hands=(*self.hands[:index], hand, *self.hands[index + 1 :]))

    def lives(self, life: Life) -> bool:
        """Whether a process has not died."""
        return self.hands[life[0]].life == life[1]


def call_of(name: str, since: int = 0) -> Append:
    """A client's request by its name: `p0` is the first record of the producer p, `a` a plain record."""
    record = (Record(name.encode()),)
    if len(name) > 1:
        return Append.of(record, ProducerSeq(name[0], 0, int(name[1:])), since=since)
    return Append.of(record)


def writer_of(life: Life) -> Writer:
    """A process as rows name it."""
    return Writer(f"{life[0]}.{life[1]}", "")


def life_of(writer: Writer) -> Life:
    """The process that a row names."""
    index, number = writer.id.split(".")
    return int(index), int(number)


def ledger_row(ledger_id: int, ledger: Ledger) -> LedgerMetadata:
    """A ledger's row."""
    row = LedgerMetadata(
        ledger_id,
        QUORUM,
        DigestKind.CRC32C,
        (Fragment(0, ("b1@1",)),),
        writer=writer_of(ledger.owner),
        log="log",
    )
    if not ledger.is_closed:
        return row
    return replace(row, state=State.CLOSED, last_entry=len(ledger.entries) - 1, length=1)


def end_of(ledger: Ledger) -> LedgerEnd:
    """Where a closed ledger ends."""
    if not ledger.entries:
        return LedgerEnd(0, 0, -1, has_producers=False)
    head = batch.decode_head(ledger.entries[-1])
    has_producers = head.producer is not None or head.after_producer
    return LedgerEnd(head.records_after, 1, len(ledger.entries) - 1, has_producers)
