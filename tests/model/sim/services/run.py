"""One seed of whole services: a storm under clients, then a healed phase in which all must end.

What runs is what ships, on a virtual event loop: the driver of the machines, the gateway's engine
with its caches and its forwarding, the clients of the metadata service, the auditor, the workers of
the repair queue and the bookies' collectors.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from quorumlog.errors import (
    NOT_DONE,
    LedgerClosed,
    LedgerFenced,
    NoSuchEntry,
    NoSuchLedger,
    QuorumLogError,
    RecoveryBlocked,
    WriterLost,
)
from quorumlog.net import metadata_requests
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol.ids import ASSIGNED_ID_END, member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.writer import LedgerWriter
from services.gateway.interface import EntriesAppended, LedgerOptions
from services.metadata import inquiry
from tests.model.sim.bookie import SimBookie
from tests.model.sim.plan import SECOND
from tests.model.sim.services import registration
from tests.model.sim.services.cluster import Cluster
from tests.model.sim.services.judge import Judge
from tests.model.sim.services.metadata import ASKING, outcome_of
from tests.model.sim.services.net import Net, Process, Session
from tests.model.sim.services.node import held_ids
from tests.model.sim.services.plan import ServicePlan, draw
from tests.model.sim.shrink import shrunk
from tests.model.sim.world import Violation, judged
from tests.support import invariants
from tests.support.history import check
from tests.support.once import once
from tests.support.virtual import VirtualLoop

CALM_S = 400.0
"""Virtual time that a healed cluster gets: repairs that failed in the storm wait for minutes."""
DICE = 2
"""Runs that a smaller plan gets before it is taken for a whole one; a run takes some 100 ms."""
SETTLED_S, SETTLE_S = 6.0, 120.0
"""For how long nobody tells of a change that the database lacks; and how long that may take."""
_OP_S = 90.0
_OVER = (LedgerClosed, LedgerFenced, NoSuchLedger, WriterLost)
"""Refusals after which a client makes another ledger."""
_MACHINES = (LedgerWriter, Recovery, FragmentRepair, RangeReader)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seed ended."""

    plan: ServicePlan
    trace_hash: str
    messages: int
    virtual_us: int
    violation: str | None
    story: tuple[str, ...]
    ledgers: int
    acknowledged: int
    drops: int
    losses: int = 0
    """How often the database went back, and lacked changes then."""
    waits: str | None = None
    """What an operator has to decide at the end (rule 18d)."""

    @property
    def ended(self) -> str:
        """For the campaign's last lines."""
        if self.waits is not None:
            return "waited for an operator"
        garbage = "garbage dropped" if self.drops else "nothing dropped"
        return f"changes lost, {garbage}" if self.losses else garbage


class _Errors(logging.Handler):
    """What the services log as their own defects."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class Run:
    """A cluster, its clients and its judge."""

    def __init__(self, plan: ServicePlan, loop: VirtualLoop, *, is_reported: bool) -> None:
        self.plan = plan
        self.loop = loop
        self.net = Net(loop, plan, is_reported=is_reported)
        self.rng = self.net.rng
        self.judge = Judge(plan)
        self.cluster = Cluster(self.net, self.judge)
        self.judge.may_be_had = self._may_be_had
        self.judge.was_had = partial(self._may_be_had, even_if_dropped=True)
        self.ledgers: list[int] = []
        self.refused: set[int] = set()
        """Ledgers of which a client was told that nothing more is taken."""
        self.payloads = self.keys = 0
        self.acknowledged = 0

    # --- clients ---------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        """One client: a ledger of its own, and a look at those of others."""
        mine: int | None = None
        things: tuple[Callable[[int], Awaitable[object]], ...] = (
            self._append,
            self._append,
            self._append,
            self._append_much,
            self._read,
            self._follow,
            self._close,
            self._recover,
            self._delete,
            self._give_up,
        )
        is_stubborn = self.plan.is_stubborn
        for _ in range(self.plan.work):
            await self.net.pause(self.rng.choice(self.plan.pauses))
            if mine is None or (not is_stubborn and self.judge.is_deleted(mine)):
                mine = await self._create()
                continue
            thing = self.rng.choice(things)
            is_mine = thing in (self._append, self._append_much) or self.rng.random() < 0.5
            ledger_id = mine if is_mine else self.rng.choice(self.ledgers)
            self.net.note("client", number, thing.__name__, ledger_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OP_S):
                    await thing(ledger_id)
            row = self.judge.rows.get(mine)
            if is_stubborn:
                mine = None if mine in self.refused else mine
            elif row is not None and row.state is State.CLOSED:
                mine = None

    def _engine(self) -> Any:
        return self.rng.choice(self.cluster.gateways).engine

    async def _create(self) -> int | None:
        size, write, ack = self.plan.quorum
        self.keys += 1
        options = LedgerOptions(
            Quorum(size, write, ack),
            allow_degraded=self.rng.random() < 0.3,
            once=once(f"key-{self.keys}") if self.rng.random() < 0.5 else None,
        )
        if self.plan.is_stubborn and self.rng.random() < 0.3:
            options = replace(options, ledger_id=self._chosen_id(), once=None)
        is_repeated = options.once is not None and self.rng.random() < 0.5
        try:
            row: LedgerMetadata = await self._gone_with(self._engine().create(options))
            if is_repeated:  # the answer got lost, say: the same again, maybe elsewhere
                row = await self._gone_with(self._engine().create(options))
        except QuorumLogError as error:
            self.net.note("client", "create", outcome_of(error))
            return None
        if self.judge.is_deleted(row.ledger_id):
            raise Violation(f"rule 17: {row.ledger_id} was deleted, and is made again")
        if row.ledger_id not in self.ledgers:
            self.ledgers.append(row.ledger_id)
        return row.ledger_id

    def _chosen_id(self) -> int:
        """An id that a client chooses: a new one, or one of a deleted ledger (rule 17)."""
        deleted = sorted(i for i in self.judge.ended if i >= ASSIGNED_ID_END)
        if deleted and self.rng.random() < 0.5:
            return self.rng.choice(deleted)
        return ASSIGNED_ID_END + self.keys

    async def _gone_with(self, call: Awaitable[Any]) -> Any:
        """A client's call; where its gateway dies it hears nothing."""
        return await asyncio.wait_for(call, _OP_S)

    async def _append(self, ledger_id: int) -> None:
        count = self.rng.choice((1, 1, 2, 5))
        payloads = [b"p%d" % (self.payloads + n) for n in range(count)]
        self.payloads += count
        op = self.judge.history.append(ledger_id, *payloads)
        gateway = self.rng.choice(self.cluster.gateways)
        was_deleted = self.judge.is_deleted(ledger_id)
        try:
            done: EntriesAppended = await self._gone_with(
                gateway.engine.appends.append(ledger_id, payloads)
            )
        except QuorumLogError as error:
            self.net.note("client", "append", ledger_id, outcome_of(error))
            if error.outcome == NOT_DONE:
                self.judge.history.failed(op)
            if isinstance(error, _OVER):
                self.refused.add(ledger_id)
            return
        except TimeoutError:
            return
        if not gateway.is_alive:
            return  # nobody hears what a dead process says
        self.acknowledged += count
        self.net.note("client", "appended", ledger_id, done.first, done.last)
        self.judge.acknowledged(ledger_id, done.first, done.last, was_deleted=was_deleted)
        self.judge.history.acked(op, done.first)

    async def _append_much(self, ledger_id: int) -> None:
        await asyncio.gather(*[self._append(ledger_id) for _ in range(self.rng.choice((3, 8)))])

    async def _read(self, ledger_id: int) -> None:
        first = self.rng.randint(0, 6)
        op = self.judge.history.read(ledger_id)
        try:
            found = await self._engine().reads.read(ledger_id, first)
            self.judge.history.lac(ledger_id, found.last_add_confirmed)
            for run in found.runs:
                entries = [(entry.entry_id, entry.payload) for entry in run.entries()]
                self.judge.history.found(op, *entries)
            if not found.runs:
                await self._engine().reads.entry(ledger_id, first)
        except NoSuchEntry as error:
            self.judge.history.absent(op, first if error.entry_id is None else error.entry_id)
        except QuorumLogError as error:
            self.net.note("client", "read", ledger_id, outcome_of(error))

    async def _follow(self, ledger_id: int) -> None:
        with contextlib.suppress(QuorumLogError):
            known = await self._engine().reads.last_add_confirmed(ledger_id, after=1, wait_s=5.0)
            self.judge.history.lac(ledger_id, known.last_add_confirmed)

    async def _close(self, ledger_id: int) -> None:
        await self._ended(ledger_id, self._engine().close(ledger_id))

    async def _recover(self, ledger_id: int) -> None:
        await self._ended(ledger_id, self._engine().recover(ledger_id))

    async def _ended(self, ledger_id: int, call: Awaitable[LedgerMetadata]) -> None:
        try:
            row = await self._reported(call)
        except QuorumLogError as error:
            self.net.note("client", "end", ledger_id, outcome_of(error))
            return
        assert row.last_entry is not None, "told as closed"
        self.judge.history.closed(ledger_id, row.last_entry)

    async def _reported(self, call: Awaitable[LedgerMetadata]) -> Any:
        """A row as a client hears of it after a change that no append follows: its members keep it then, if
        nothing is in the way of what they are sent, and they answer in time.
        """
        net = self.net
        was_healed, began, away, unlisted = net.is_healed, net.now, self._away(), self._unlisted()
        gateways = list(self.cluster.gateways)
        before = {key: row.all_members for key, row in self.judge.rows.items() if row is not None}
        row: LedgerMetadata = await self._gone_with(call)
        is_late = net.now - began >= MachineTimes().add_s * SECOND
        # Nobody hears what a dead process says.
        is_heard = was_healed and gateways == self.cluster.gateways
        if is_heard and not is_late and not self.judge.is_deleted(row.ledger_id):
            away |= self._away()
            # A member that a repair added since has copies from the repair (seed 202445).
            members = before.get(row.ledger_id, row.all_members)
            judged(
                invariants.end_is_kept(
                    row,
                    lambda member: self._keeps_end(row, member),
                    lambda member: (
                        member_name(member) in away
                        or self._is_lost(member)
                        or member not in members
                    ),
                    self._others(row, away | unlisted | self._unlisted()),
                )
            )
        return row

    def _away(self) -> set[str]:
        """Bookies that are dead, or that some gateway takes for dead."""
        gateways = self.cluster.gateways
        return {
            node.name
            for node in self.cluster.nodes.values()
            if not node.is_serving or any(g.engine.directory.is_down(node.me) for g in gateways)
        }

    def _unlisted(self) -> set[str]:
        """Bookies that some gateway can't choose: they fill up or drain, or it has not heard of them yet (seed 201819)."""
        lists = [gateway.engine.directory.bookies for gateway in self.cluster.gateways]
        writable = [
            {bookie.id for bookie in found if bookie.state == "writable"} for found in lists
        ]
        nodes = self.cluster.nodes.values()
        return {node.name for node in nodes if any(node.me not in found for found in writable)}

    def _others(self, row: LedgerMetadata, away: Collection[str]) -> Collection[str]:
        """The bookies that are no members, if all of them live: one that is away may be asked in another one's place."""
        named = set(map(member_name, row.all_members))
        others = [node for node in self.cluster.nodes.values() if node.name not in named]
        return [] if any(node.name in away for node in others) else [node.me for node in others]

    def _has_copy(self, row: LedgerMetadata, member: str) -> bool:
        ledger = self.cluster.nodes[member_name(member)].ledgers.get(row.ledger_id)
        return ledger is not None and ledger.has_copy(row.version)

    def _keeps_end(self, row: LedgerMetadata, member: str) -> bool:
        """Whether a bookie has a copy with the end and the losses of a row. The answer to a client may show a later row
        than the gateway sent copies of: a repair has changed who holds the ledger since.
        """
        ledger = self.cluster.nodes[member_name(member)].ledgers.get(row.ledger_id)
        if ledger is None:
            return False
        copies = (self.judge.restores.row_of(row.ledger_id, name) for name in ledger.copies_on_disk)
        return ledger.has_copy(row.version) or any(_is_same_end(copy, row) for copy in copies)

    async def _delete(self, ledger_id: int) -> None:
        if self.rng.random() < 0.5:
            with contextlib.suppress(QuorumLogError):
                await self._gone_with(self._engine().delete(ledger_id))

    async def _give_up(self, ledger_id: int) -> None:
        """An operator gives an entry up, right or wrong: only what nobody can serve may go."""
        row = self.judge.rows.get(ledger_id)
        if row is None or row.last_entry is None or row.last_entry < 0:
            return
        entry_id = self.rng.randint(0, row.last_entry)
        if not self._may_be_had(row, entry_id):
            self.judge.unheld.add((ledger_id, entry_id))
        gone = [m for m in row.all_members if member_name(m) in self._gone()]
        try:
            await self._reported(
                self._engine().accept_loss(ledger_id, entry_id, entry_id, declare_lost=gone)
            )
        except QuorumLogError as error:
            self.net.note("operator", "gives up", ledger_id, entry_id, outcome_of(error))

    def _may_be_had(
        self, row: LedgerMetadata, entry_id: int, *, even_if_dropped: bool = False
    ) -> bool:
        """Whether a member that may come back has an entry: a member of the entry's write set, the target of a
        repair of its fragment, or a member that keeps its entries after such a repair (rule 20b). Nothing reads
        what a member keeps from an earlier place. `even_if_dropped`: count a member whose disk had the entry once.
        """
        fragment = row.fragment_of(entry_id).first_entry
        members = {member_name(member) for _, member in row.members_of(entry_id)}
        members |= {member_name(r.target) for r in row.repairs if r.first_entry == fragment}
        members |= {member_name(r.leaving) for r in row.placed_repairs if r.first_entry == fragment}
        nodes = [self.cluster.nodes[name] for name in members]
        if even_if_dropped:
            return any(node.has_disk_of(row.ledger_id, entry_id) for node in nodes)
        return any(node.may_have(row.ledger_id, entry_id) for node in nodes)

    # --- phases ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """The storm, and the calm after it."""
        plan, net, loop = self.plan, self.net, self.loop
        operators = Process("clients", net)
        for gateway in self.cluster.gateways:
            with contextlib.suppress(QuorumLogError):
                await gateway.engine.directory.refresh()
        for fault in plan.faults:
            net.after(
                fault.at, self.cluster.strike, fault.kind, fault.lasts, fault.target, fault.other
            )
        if plan.dead:
            net.after(plan.heal_at // 2, self._die_for_good)
        if plan.has_restores:
            _ = Process("operator", net).spawn(self.cluster.operator.watch())
        clients = [operators.spawn(self._client(number)) for number in range(plan.clients)]
        await self._until(lambda: loop.time() * SECOND >= plan.heal_at)
        self.cluster.heal()
        end = loop.time() + 4 * _OP_S
        await self._until(lambda: all(c.done() for c in clients) or loop.time() > end)
        operators.kill()
        await self._settle()
        if not self.cluster.operator.waiting:
            await self._calm()
        self._judge_the_end()

    async def _until(self, is_done: Callable[[], bool], *, every_s: float = 0.25) -> None:
        while not is_done():
            self._raise_failures()
            await self.net.pause(every_s)
        self._raise_failures()

    def _raise_failures(self) -> None:
        if self.loop.failures:
            raise Violation(f"check: {self.loop.failures[0]}")

    def _die_for_good(self) -> None:
        for name in sorted(self.cluster.nodes)[: self.plan.dead]:
            node = self.cluster.nodes[name]
            node.is_dead_for_good = True
            node.fall("kill")

    def _is_lost(self, member: str) -> bool:
        """Whether a member never comes back: its bookie, or its disk, is gone."""
        node = self.cluster.nodes[member_name(member)]
        return node.is_dead_for_good or node.me != member

    def _gone(self) -> set[str]:
        return {node.name for node in self.cluster.nodes.values() if node.is_dead_for_good}

    async def _settle(self) -> None:
        """Everybody has told what the database lacks, and the operator has decided, or waits."""
        operator = self.cluster.operator
        end, last = self.loop.time() + SETTLED_S, self.loop.time() + SETTLE_S
        while self.loop.time() < min(end, last):
            await self._until(lambda: True)
            await self.net.pause(1.0)
            if operator.missing and not operator.waiting:
                end = self.loop.time() + SETTLED_S
        if operator.waiting:
            return
        if operator.missing:
            raise Violation("rule 18a: changes are missing, and no rebuild ends that")
        self.judge.settle(self.cluster.database.tables.cores())
        self.ledgers = [i for i in self.ledgers if i in self.judge.rows]

    async def _calm(self) -> None:
        """Everything comes to rest: ledgers end (L1), copies are made again (L4), garbage goes."""
        for ledger_id in self.ledgers:
            await self._close_for_good(ledger_id)
        tables = self.cluster.database.tables
        end = self.loop.time() + CALM_S
        # All copies are looked at each time, which takes as long as seconds of the cluster's life.
        await self._until(lambda: self._is_at_rest() or self.loop.time() > end, every_s=1.0)
        left = [f"{key} {item.ranges} {item.detail}" for key, item in tables.repairs.items()]
        lacking = [left, *self._wrong_copies()[:3]]
        judged(invariants.copies_come_back([] if self._is_at_rest() else lacking))

    async def _close_for_good(self, ledger_id: int) -> None:
        """L1: some recovery ends the ledger; where members are gone, with an operator's word."""
        blocked: QuorumLogError | None = None
        for _ in range(10):
            if self.judge.rows[ledger_id] is None:
                return
            engine = self._engine()
            try:
                row = await self._reported(engine.recover(ledger_id))
            except RecoveryBlocked as error:
                blocked = error
                row = self.judge.rows[ledger_id]
                if row is None:
                    return
                # Of earlier fragments too: the last confirmed entry tells the length.
                lost = sorted(filter(self._is_lost, row.all_members))
                if lost:
                    self.net.note("operator", "declares lost", ledger_id, lost)
                    self.judge.declared_lost.add(ledger_id)
                    with contextlib.suppress(QuorumLogError):
                        await self._gone_with(engine.recover(ledger_id, declare_lost=lost))
            except NoSuchLedger:
                return
            except QuorumLogError as error:
                blocked = error
            else:
                judged(invariants.ledger_ends(ledger_id, row.state))
                self.judge.history.closed(ledger_id, row.last_entry)
                return
            await self.net.pause(2.0)
        self._raise_failures()
        row = self.judge.rows[ledger_id]
        if row is not None:
            judged(invariants.ledger_ends(ledger_id, row.state, repr(blocked)))

    def _is_at_rest(self) -> bool:
        return not self._wrong_copies() and all(
            self._is_hopeless(ledger_id) for ledger_id, _ in self.cluster.database.tables.repairs
        )

    def _is_hopeless(self, ledger_id: int) -> bool:
        """Whether copies of a ledger may be gone with bookies that went for good."""
        row = self.judge.rows[ledger_id]
        if row is None or not self._gone():
            return False
        return (
            row.may_lack_entries
            or len(self.cluster.nodes) - len(self._gone()) < (row.quorum.ensemble_size)
            or any(not self._copies(row, entry_id) for entry_id in range((row.last_entry or 0) + 1))
        )

    def _copies(self, row: LedgerMetadata, entry_id: int) -> int:
        """Whole copies of an entry at its members that live."""
        found = 0
        for _, member in row.members_of(entry_id):
            node = self.cluster.nodes[member_name(member)]
            ledger = node.ledgers.get(row.ledger_id)
            if node.is_alive and ledger is not None and ledger.peek(entry_id) is not None:
                found += 1
        return found

    def _wrong_copies(self) -> list[str]:
        """What is not where it should be, or is where it should not be."""
        wrong = []
        for ledger_id, row in self.judge.rows.items():
            for node in self.cluster.nodes.values():
                ledger = node.ledgers.get(ledger_id)
                if ledger is None or not node.is_alive or self._is_kept(ledger):
                    continue
                if row is None:
                    wrong.append(f"{node.me} still knows the deleted {ledger_id}")
                elif held_ids(ledger) and node.name not in map(member_name, row.all_members):
                    wrong.append(f"{node.me} holds {ledger_id} and is no member")
            if row is None or self._is_hopeless(ledger_id):
                continue
            wrong += [f"{ledger_id} still keeps {r.leaving}" for r in row.placed_repairs]
            if ledger_id in self.judge.marked:
                continue
            wrong += [
                f"{member} lacks {ledger_id}:{entry_id}"
                for entry_id in range((row.last_entry or 0) + 1)
                if row.last_entry is not None and entry_id <= row.last_entry
                for _, member in row.members_of(entry_id)
                if not self.judge.has_held(ledger_id, member, entry_id)
            ]
            placed = {member for fragment in row.fragments for member in fragment.bookies}
            wrong += [
                f"{member} has no copy of the row of {ledger_id}"
                for member in row.all_members
                if row.state is State.CLOSED
                and self.cluster.nodes[member_name(member)].is_serving
                # The target of an abandoned repair may have lost its disk since (seed 204267).
                and (member in placed or not self._is_lost(member))
                and not self._has_copy(row, member)
            ]
        return wrong

    def _is_kept(self, ledger: SimBookie) -> bool:
        """Whether a bookie keeps a ledger for a change whose loss was accepted (rule 18c)."""
        return not self.cluster.database.tables.contains(
            name.token for name in ledger.row_names if name.token
        )

    def _judge_the_end(self) -> None:
        """I3, and the clients' histories against what is there."""
        history = self.judge.history
        for ledger_id, row in self.judge.rows.items():
            if row is None or row.last_entry is None or ledger_id in self.cluster.operator.waiting:
                continue
            entries: list[tuple[int, bytes]] = []
            for entry_id in range(row.last_entry + 1):
                if row.lost_at(entry_id) is not None:
                    continue  # judged when it was given up (rule 31)
                found = {
                    payload
                    for _, member in row.members_of(entry_id)
                    for ledger in [self.cluster.nodes[member_name(member)].ledgers.get(ledger_id)]
                    if ledger is not None
                    for payload in [ledger.peek(entry_id)]
                    if payload is not None
                }
                if not found and row.lost_at(entry_id) is not None:
                    continue  # an operator gave it up, and it was gone then (rule 31)
                wrong = invariants.one_payload(entry_id, found)
                if wrong is not None:
                    raise Violation(f"{wrong}: ledger {ledger_id}")
                entries.extend((entry_id, payload) for payload in found)
            if not row.may_lack_entries:
                history.content(ledger_id, *entries)
        self._learn_deleted()
        rows = map(self.judge.final, self.judge.rows)
        flagged = {row.ledger_id for row in rows if row.may_lack_entries}
        said = [v for v in check(history) if v.ledger not in flagged]
        if said:
            raise Violation("; ".join(map(str, said[:3])))

    def _learn_deleted(self) -> None:
        """What deleted ledgers held, by what bookies had on disk."""
        judge = self.judge
        for ledger_id, row in judge.ended.items():
            assert row.last_entry is not None, "only CLOSED ones are deleted"
            judge.history.closed(ledger_id, row.last_entry)
            if not row.may_lack_entries:
                ids = range(row.last_entry + 1)
                stored = {
                    e: judge.bytes_of[ledger_id, e] for e in ids if (ledger_id, e) in judge.bytes_of
                }
                judge.history.content(
                    ledger_id, *((e, found.payload) for e, found in stored.items())
                )


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Each machine's own `check` after each step."""
    with contextlib.ExitStack() as stack:
        for machine in _MACHINES:
            stack.enter_context(patch.object(machine, "step", _checking(machine.step)))
        yield


def _checking(step: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, event: Any) -> Any:
        effects = step(self, event)
        if hasattr(self, "check"):
            self.check()
        return effects

    return checked


def _is_same_end(one: LedgerMetadata, other: LedgerMetadata) -> bool:
    ends = [
        (row.state, row.last_entry, row.lost_entries, row.may_lack_entries) for row in (one, other)
    ]
    return ends[0] == ends[1]


def run_plan(plan: ServicePlan, *, is_reported: bool = False) -> Outcome:
    """A plan's verdict."""
    loop = VirtualLoop()
    jitter = random.Random(f"jitter-{plan.seed}")
    listener = _Errors(loop.failures)
    root = logging.getLogger()
    violation: str | None = None
    run: Run | None = None
    root.addHandler(listener)
    try:
        with (
            _checked(),
            patch.object(metadata_requests, "_jitter", jitter),
            patch.object(inquiry, "service_session", lambda *_how: Session(ASKING.get())),
            registration.simulated(),
        ):

            async def main() -> None:
                nonlocal run
                run = Run(plan, loop, is_reported=is_reported)
                await run.run()

            loop.run_until_complete(main())
    except AssertionError as broken:
        violation = str(broken) or repr(broken)
    except TimeoutError:
        violation = f"L1: a call has no answer within {_OP_S:.0f} s"
    finally:
        root.removeHandler(listener)
        _end(loop, run)
    assert run is not None
    return Outcome(
        plan,
        run.net.trace_hash,
        run.net.messages,
        round(loop.time() * SECOND),
        violation,
        tuple(run.net.story),
        len(run.ledgers),
        run.acknowledged,
        run.judge.drops,
        run.judge.restores.count,
        None if violation else next(iter(run.cluster.operator.waiting.values()), None),
    )


def _end(loop: VirtualLoop, run: Run | None) -> None:
    """Cancel all that still runs, and close the loop."""
    if run is not None:
        for gateway in run.cluster.gateways:
            gateway.kill()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def run_seed(seed: int) -> Outcome:
    """A seed's verdict."""
    return run_plan(draw(seed))


def shrink(outcome: Outcome) -> Outcome:
    """A smaller plan that breaks the same rule, told as a story."""
    kind = (outcome.violation or "").partition(":")[0]
    plan = shrunk(
        outcome.plan,
        lambda smaller: (run_plan(smaller).violation or "").partition(":")[0] == kind,
        lists=("faults",),
        quiet=(
            {"loss": 0.0},
            {"straggler": 0.0},
            {"answer_loss": 0.0},
            {"clients": 1},
            {"dead": 0},
        ),
        dice=DICE,
    )
    return run_plan(plan, is_reported=True)
