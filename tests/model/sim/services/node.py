"""A bookie with all its ledgers: one process, one disk, and the collector that ships.

Each ledger is a `SimBookie` (tests/model/sim/bookie.py): its log forgets what was not synced. A crash
hits all of them at once.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson

from quorumlog.errors import EntryUnavailable, NoSuchLedger, QuorumLogError, RouteNotFound
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import AddDone, LacDone, ReadDone
from quorumlog.protocol.ids import member_name, member_of
from quorumlog.protocol.messages import (
    AddAnswered,
    Event,
    FenceAnswered,
    ReadAnswered,
    SendAdd,
    SendFence,
    SendRead,
    Status,
)
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, contains
from quorumlog.protocol.rebuild import Held
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import LacAsked, LacReported, RowReported
from quorumlog.protocol.row_copy import RowCopy, RowName, name_of
from quorumlog.wire import row_copies
from quorumlog.wire.bodies import (
    COPIES_PRESENTED_MAX,
    BookieInfo,
    BookieState,
    BookieWitnesses,
    Cookie,
)
from services.bookie.collect import Collector, MetadataRows
from services.bookie.cookie import CookieRefused
from services.bookie.store import Store
from services.bookie.witnesses import FreshCopies, witnesses_of
from tests.model.sim.bookie import SimBookie, Watcher, stored_in
from tests.model.sim.plan import SECOND
from tests.model.sim.services.metadata import CLUSTER_ID, urls_of
from tests.model.sim.services.net import Answer, Net, Process, Request, Session
from tests.model.sim.services.registration import Directory
from tests.model.sim.services.tables import highest_assigned
from tests.model.sim.world import Violation

if TYPE_CHECKING:
    from tests.model.sim.services.judge import Judge


CALM_S = 3.0
"""Between two looks of a collector, at least, once the faults are over."""

CONFIRM_S = 1.0
"""Between two exchanges of witnesses: the bookie's `heartbeat_s`."""


@dataclass(frozen=True, slots=True)
class IndexedLedger:
    """What the collector reads of a ledger's row in the index."""

    highest: int
    copy_count: int


class _Surroundings:
    """The world as one ledger of a node sees it."""

    def __init__(self, node: "Node", ledger_id: int) -> None:
        self._node = node
        self._ledger_id = ledger_id
        self.rng: random.Random = node.net.rng

    @property
    def is_healed(self) -> bool:
        return self._node.net.is_healed

    @property
    def now(self) -> int:
        return self._node.net.now

    @property
    def sync(self) -> tuple[int, int]:
        return self._node.net.plan.sync

    @property
    def watcher(self) -> Watcher:
        return self._node.judge.watcher_of(self._ledger_id)

    def after(self, delay: int, action: Callable[..., object], *args: Any) -> None:
        self._node.net.after(delay, action, *args)

    def note(self, *parts: object) -> None:
        self._node.net.note("ledger", self._ledger_id, *parts)

    def may_lose_a_copy(self) -> bool:
        return self._node.judge.may_damage_a_copy()


class Node(Process):
    """One bookie. A killed one keeps its disk; a wiped one comes back as a later incarnation. It serves once it is
    registered; what a start or a rebuild of the metadata service asks, it answers before that too.
    """

    def __init__(self, name: str, net: Net, judge: "Judge") -> None:
        super().__init__(name, net)
        self.judge = judge
        self.directory = Directory(name, CLUSTER_ID)
        self.incarnation = 1
        """After the loss of the disk one that it may not be, until it is registered."""
        self.is_serving = False
        self.is_dead_for_good = False
        self.is_draining = False
        self.full_until = self.slow_until = 0
        self.ledgers: dict[int, SimBookie] = {}
        self.deleted: dict[int, SimBookie] = {}
        """Ledgers that were given up on a tombstone: their ids stay (rule 16a)."""
        self.leaving: set[int] = set()
        self._fresh = FreshCopies()
        self._noted: set[RowName] = set()
        self._open()
        net.listeners[self.directory.url] = self, self.handle

    @property
    def me(self) -> str:
        """The member that it is now."""
        return member_of(self.name, self.incarnation)

    def info(self, cookie: Cookie) -> BookieInfo:
        """Itself, as liveness that tells the truth has it: heartbeats of another process than the cookie's don't count."""
        state: BookieState = "writable"
        mine = self.directory.cookie
        if not self.is_serving or mine is None or mine.cookie.process != cookie.process:
            state = "lost"
        elif self.is_draining:
            state = "draining"
        elif self.full_until > self.net.now:
            state = "read-only"
        return BookieInfo(
            id=member_of(self.name, cookie.incarnation), state=state, url=self.directory.url
        )

    def ledger(self, ledger_id: int) -> SimBookie:
        """A ledger here, known or not."""
        found = self.ledgers.get(ledger_id) or self.deleted.get(ledger_id)
        if found is None:
            found = self.ledgers[ledger_id] = SimBookie(self.name, _Surroundings(self, ledger_id))
            found.be(self.incarnation)
        found.full_until, found.slow_until = self.full_until, self.slow_until
        return found

    async def handle(self, request: Request) -> Answer:
        """The routes of a bookie that are asked here: what it holds of a ledger, or of ranges, and what it
        knows of the metadata's database.
        """
        if request.path == "/v1/witnesses":
            return Answer(200, self._witnesses().model_dump_json().encode())
        found = re.fullmatch(r"/v1/ledgers/(\d+)(/digests)?", request.path)
        if found is None or (request.method == "POST") != bool(found[2]):
            raise RouteNotFound(request.path)
        ledger_id = int(found[1])
        if ledger_id in self.leaving:
            raise EntryUnavailable(ledger_id=ledger_id)
        ledger = self.ledgers.get(ledger_id)
        reported: dict[str, Any] = {"bookie": self.me, "ledger_id": ledger_id}
        if found[2]:
            asked = orjson.loads(request.body)
            while ledger is not None and asked.get("from_disk") and ledger.synced < len(ledger.log):
                await self.net.pause(0.001)
            reported["limbo"] = ledger is not None and ledger.replica.is_limbo
            reported["digests"] = [_digest(ledger, asked, *span) for span in asked["ranges"]]
        elif ledger is None:
            raise NoSuchLedger(ledger_id=ledger_id)
        else:
            reported["ranges"] = ledger.replica.holdings.present(0, ledger.highest)
        return Answer(200, orjson.dumps(reported))

    def _witnesses(self) -> BookieWitnesses:
        fresh = self._fresh.newest(COPIES_PRESENTED_MAX)
        return BookieWitnesses(
            bookie=self.name,
            cluster_id=CLUSTER_ID,
            witnesses=(*self.client.witnesses, *witnesses_of(CLUSTER_ID, fresh)),
            highest_ledger=highest_assigned([*self.ledgers, *self.deleted]),
        )

    def held(self, ledger_id: int) -> Held | None:
        """What it tells a rebuild of a ledger: copies of rows that are on its disk, and whether it is deleted."""
        ledger = self.ledgers.get(ledger_id) or self.deleted.get(ledger_id)
        if ledger is None:
            return None
        rows = [self.judge.restores.row_of(ledger_id, name) for name in ledger.row_names]
        copies = [row_copies.decode(row_copies.encode(row)) for row in rows]
        replica = ledger.replica
        return Held(self.me, replica.ledger_key or b"", replica.is_deleted, tuple(copies))

    def may_have(self, ledger_id: int, entry_id: int) -> bool:
        """Whether an entry is on this bookie's disk, and that may come back."""
        is_collected = entry_id in self.judge.collected.get((ledger_id, self.name), ())
        has_disk = self.has_disk_of(ledger_id, entry_id)
        return has_disk and ledger_id in self.ledgers and not is_collected

    def has_disk_of(self, ledger_id: int, entry_id: int) -> bool:
        """Whether this bookie may come back with the disk on which it acknowledged an entry."""
        key = ledger_id, self.name
        # A wiped bookie may come back as the same incarnation, if the database was lost too (seed 511159).
        is_destroyed = entry_id in self.judge.destroyed.get(key, ())
        held = self.judge.held.get(key, {}).get(entry_id)
        return not (self.is_dead_for_good or is_destroyed) and held == self.incarnation

    # --- faults --------------------------------------------------------------------------------

    def fall(self, kind: str) -> None:
        """Die: killed, without power, or with the loss of the disk."""
        if kind == "wipe" and not self.judge.may_lose_a_copy():
            kind = "power-cut"
        if not self.is_alive and kind != "wipe":
            return
        self.kill()
        self.is_serving = False
        self.leaving.clear()
        self.net.note(self.me, "falls", kind)
        if kind == "wipe":
            for (ledger_id, name), entries in self.judge.held.items():
                if name == self.name:
                    self.judge.destroyed.setdefault((ledger_id, name), set()).update(entries)
        for ledger_id in sorted(self.ledgers | self.deleted):
            self.ledger(ledger_id).fall(kind)
        if kind == "wipe":
            self.ledgers.clear()
            self.deleted.clear()
            self.directory.empty()
            self.incarnation += 1

    def rise(self) -> None:
        """Start again with what the disk holds."""
        if self.is_alive or self.is_dead_for_good:
            return
        self.is_alive, self.born_at = True, self.net.now
        for ledger_id in sorted(self.ledgers | self.deleted):
            ledger = self.ledger(ledger_id)
            ledger.restart()
            if ledger_id in self.deleted and not ledger.replica.is_deleted:
                # That it was deleted did not come to the disk: it is here as it was.
                self.ledgers[ledger_id] = self.deleted.pop(ledger_id)
        self._open()
        _ = self.spawn(self._start())

    def _open(self) -> None:
        """A client and fresh copies of its own for each life of the process."""
        client = self.client = MetadataClient(urls_of(self.net.plan), cast("Any", Session(self)))
        client.witnesses = self.directory.witnesses
        self._fresh, self._noted = FreshCopies(), set()

    async def _start(self) -> None:
        """Register, as often as it takes, and serve."""
        directory = self.directory
        while not self.is_serving:
            has_data = bool(self.ledgers or self.deleted)
            try:
                incarnation = await directory.register(self.client, has_data=has_data)
            except CookieRefused as refused:
                self.net.note(self.name, "refuses to start:", refused)
                await self.net.pause(1.0)
            else:
                self.serve(incarnation)

    def serve(self, incarnation: int) -> None:
        """It is registered as this incarnation."""
        if incarnation != self.incarnation and (self.ledgers or self.deleted):
            raise Violation(f"rule 15: {self.me} has its disk, and is now {incarnation}")
        self.incarnation, self.is_serving = incarnation, True
        self.net.note(self.me, "serves")
        self._collect()

    # --- garbage: what services/bookie/collect.py asks of the store ------------------------------

    def _collect(self) -> None:
        rows = MetadataRows(self.client, partial(setattr, self.directory, "witnesses"))
        rows.present(self._fresh, self.name, CLUSTER_ID)
        if self.net.plan.has_restores:
            _ = self.spawn(self._remember(rows))
        every_s, grace_s = self.net.plan.collect
        collector = _Collector(cast("Store", _Held(self)), rows, CLUSTER_ID, grace_s=grace_s)
        _ = self.spawn(self._run(collector, every_s))

    async def _remember(self, rows: MetadataRows) -> None:
        """As the bookie's runtime does: it keeps what the database is known to have answered."""
        while True:
            self._note_copies()
            with contextlib.suppress(QuorumLogError):
                await rows.confirm()
            await self.net.pause(CONFIRM_S)

    def _note_copies(self) -> None:
        """Copies that came since; after a start all, as where an index is made anew."""
        for ledger in self.ledgers.values():
            for name in set(ledger.row_names) - self._noted:
                self._noted.add(name)
                self._fresh.note(RowCopy(name, b""))

    async def _run(self, collector: Collector, every_s: float) -> None:
        while True:
            # What happens between two looks counts in the storm only.
            await self.net.pause(max(every_s, CALM_S) if self.net.is_healed else every_s)
            try:
                await collector.round()
            except QuorumLogError as error:
                self.net.note(self.name, "collects nothing:", error.code)

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Give a ledger's entries up."""
        self.judge.dropped(self, ledger_id, keep_stub=keep_stub)
        entries = self.judge.held.get((ledger_id, self.name), {})
        self.judge.collected.setdefault((ledger_id, self.name), set()).update(entries)
        ledger = self.ledgers[ledger_id]
        if keep_stub:
            ledger.keep_stub()
        else:
            ledger.delete()
            self.deleted[ledger_id] = self.ledgers.pop(ledger_id)


def _digest(
    ledger: SimBookie | None, asked: dict[str, Any], first: int, last: int
) -> dict[str, object]:
    """What a bookie says of a range; nobody compares the digests here."""
    present: Ranges = ()
    damaged: list[int] = []
    modulus, residue = asked.get("modulus", 1), asked.get("residue", 0)
    if ledger is not None:
        present = ledger.replica.holdings.present(first, last)
        damaged = [e for e in sorted(ledger.damaged) if contains(present, e)]
    ids = [e for low, high in present for e in range(low, high + 1) if e % modulus == residue]
    return {
        "first": first,
        "last": last,
        "entries": len(set(ids) - set(damaged)),
        "present": present,
        "damaged": [(e, e) for e in damaged if e % modulus == residue],
        "digest": "",
    }


class _Held:
    """A node's ledgers, as `services.bookie.store.Store` shows them to the collector."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def me(self) -> str:
        return self._node.me

    def ledgers(self) -> Iterator[tuple[int, IndexedLedger]]:
        for ledger_id in sorted(self._node.ledgers):
            ledger = self._node.ledgers[ledger_id]
            yield ledger_id, IndexedLedger(ledger.highest, len(ledger.row_names))

    @property
    def holdings(self) -> "_Held":
        return self

    def row_names(self, ledger_id: int) -> tuple[RowName, ...]:
        return self._node.ledgers[ledger_id].row_names

    @property
    def withheld(self) -> set[int]:
        return self._node.leaving

    def forget_copies(self, ledger_id: int) -> None:
        self._node.ledgers[ledger_id].replica.forget_copies()

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        self._node.drop(ledger_id, keep_stub=keep_stub)


class _Collector(Collector):
    """Segments are not simulated: tests/unit/bookie has them."""

    async def _free_if_due(self) -> None:
        return


class Bookies:
    """The bookies as one process reaches them. Implements `BookiesPort` and `LacPort`: each
    request is answered once, in time or as UNKNOWN.
    """

    def __init__(self, process: Process, nodes: dict[str, Node]) -> None:
        self._process = process
        self._nodes = nodes

    def channels(self) -> dict[str, bool]:
        return {}

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        row: LedgerMetadata | None = None,
    ) -> None:
        asked = SendAdd(0, member, 0, run, ledger_key, recovery, row)

        def hear(event: Event | None) -> None:
            done(event.status if isinstance(event, AddAnswered) else Status.UNKNOWN)

        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            node.ledger(run.ledger_id).receive(asked, answer)

        self._ask(member, run.ledger_id, judge, hear)

    def fence(self, member: str, ledger_id: int, ledger_key: bytes, done: LacDone) -> None:
        asked = SendFence(0, member, ledger_id, ledger_key)

        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            node.ledger(ledger_id).receive(asked, answer)

        self._ask(member, ledger_id, judge, partial(_lac, done))

    def read_lac(self, member: str, ledger_id: int, done: LacDone) -> None:
        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            verdict = node.ledger(ledger_id).replica.step(LacAsked(member))
            answer(FenceAnswered(0, member, verdict.status, verdict.last_add_confirmed))

        self._ask(member, ledger_id, judge, partial(_lac, done))

    def write_lac(self, member: str, ledger_id: int, lac: int, ledger_key: bytes) -> None:
        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            node.ledger(ledger_id).keep(LacReported(member, lac, ledger_key), answer)

        self._ask(member, ledger_id, judge, lambda _event: None)

    def keep_row(self, member: str, ledger_key: bytes, row: LedgerMetadata, done: AddDone) -> None:
        reported = RowReported(member, RowCopy(name_of(row), b""), ledger_key)

        def hear(event: Event | None) -> None:
            done(event.status if isinstance(event, FenceAnswered) else Status.UNKNOWN)

        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            node.judge.restores.made(row)
            node.ledger(row.ledger_id).keep(reported, answer)

        self._ask(member, row.ledger_id, judge, hear)

    def read(
        self,
        member: str,
        ledger_id: int,
        first: int,
        last: int,
        done: ReadDone,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        from_disk: bool = False,
    ) -> None:
        del bytes_max  # answers are cut at random
        is_fence = fence_key is not None
        asked = SendRead(0, member, ledger_id, first, last, is_fence, fence_key or b"", from_disk)

        def hear(event: Event | None) -> None:
            if isinstance(event, ReadAnswered):
                done(event.status, event.run, event.absent)
            else:
                done(Status.UNKNOWN, None, ())

        def judge(node: Node, answer: Callable[[Event], None]) -> None:
            node.ledger(ledger_id).receive(asked, answer)

        self._ask(member, ledger_id, judge, hear)

    def _ask(
        self,
        member: str,
        ledger_id: int,
        judge: Callable[[Node, Callable[[Event], None]], None],
        hear: Callable[[Event | None], None],
    ) -> None:
        process, node = self._process, self._nodes[member_name(member)]
        net = process.net
        is_answered = [False]

        def answered(event: Event | None) -> None:
            if not is_answered[0]:
                is_answered[0] = True
                if process.is_alive:
                    hear(event)

        def answer(event: Event) -> None:
            net.send(node, process, answered, event)

        def arrive() -> None:
            if not node.is_serving:
                net.send(node, process, answered, None)
            elif ledger_id not in node.leaving:
                judge(node, answer)

        net.send(process, node, arrive)
        limit = 2 * SECOND if net.is_healed else net.plan.request_timeout
        net.after(limit, answered, None)


def _lac(done: LacDone, event: Event | None) -> None:
    if isinstance(event, FenceAnswered):
        done(event.status, event.last_add_confirmed)
    else:
        done(Status.UNKNOWN, -1)


def held_ids(ledger: SimBookie) -> set[int]:
    """The entries that were written to a ledger's log here and not given up since."""
    return stored_in(ledger.log)
