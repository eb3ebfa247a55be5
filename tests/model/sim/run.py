"""One seed from its plan to its verdict: a stormy phase, then a healed one in which all must end."""

from dataclasses import dataclass

from quorumlog.protocol.ids import member_name, member_of
from quorumlog.protocol.messages import (
    AppendRequested,
    Begin,
    Closed,
    CloseRequested,
    Effect,
    EntriesRead,
    Failed,
    RecoverRequested,
    RecoveryNeeded,
    ReplaceRequested,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Codec
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRange, FragmentRepair
from quorumlog.protocol.writer import LedgerWriter
from tests.model.sim.checker import Checker
from tests.model.sim.plan import MS, SECOND, Plan, draw
from tests.model.sim.shrink import shrunk
from tests.model.sim.world import LEDGER, MESSAGES_MAX, Client, Violation, World, judged
from tests.support import invariants

SETTLE = 30 * SECOND
"""Virtual time that a healed world gets for each step: three quorum timeouts."""

HUNG_EVERY = 2
"""Of so many seeds one recovers its ledger while a bookie hangs, where its shape allows that."""

DICE = 5
"""Runs that a smaller plan gets before it is taken for a whole one; a run takes some 10 ms."""

LIMBO_ROUNDS = 4
"""Of repairs, until nothing is in limbo: the old places, and what was missed under the new name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a seed ended."""

    plan: Plan
    trace_hash: str
    messages: int
    virtual_us: int
    violation: str | None
    story: tuple[str, ...] = ()
    acked: int = -1
    ended: str = ""
    backs: int = 0
    """How often the metadata store went back."""
    is_waiting: bool = False
    """A rebuild proved nothing, so that an operator decides."""


class Run:
    """A world with one writer, recoverers that come and go, and a checker."""

    def __init__(self, plan: Plan, *, is_reported: bool = False) -> None:
        self.plan = plan
        self.world = World(plan, is_reported=is_reported)
        self.checker = Checker(self.world)
        self.world.watcher = self.checker
        row = self.world.metadata
        self.writer = self.world.add_client(
            "writer", LedgerWriter(row, Codec(row.digest, row.mac_key))
        )
        self.writer.on_output = self._writer_said
        self.recoverers = self.readers = self.repairers = 0
        self.payloads = 0
        self.is_closing = False
        self.world.spread(self.writer, row, lambda: None)

    # --- clients -------------------------------------------------------------------------------

    def _closed(self, client: Client, row: LedgerMetadata) -> None:
        """Who closed a ledger tells so once its members keep the row, and the store has it then (rule 18b)."""

        def notify() -> None:
            store = self.world.store
            if not client.is_alive:
                return
            if store.is_down:
                self.world.after(SECOND, notify)
            elif store.row.last_entry == row.last_entry:
                self.checker.reported(row)
                client.is_alive = client is self.writer

        self.world.spread(client, row, notify)

    def _writer_said(self, client: Client, effect: Effect) -> None:
        if isinstance(effect, Closed):
            self._closed(client, effect.metadata)
        if isinstance(effect, RecoveryNeeded):
            self.world.after(self.world.rng.randint(0, SECOND), self.recover)
        if isinstance(effect, Failed) and self.world.is_healed:
            self.world.note("writer failed", effect.code)

    def append(self, count: int) -> None:
        """The writer is asked to append, as long as its handle lives."""
        if self.writer.failed is not None or self.is_closing or not self.writer.is_alive:
            return
        if self.writer.paused_until > self.world.now:
            self.world.after(self.writer.paused_until - self.world.now, self.append, count)
            return
        payloads = tuple(
            b"p%d" % (self.payloads + number) * (1 + (self.payloads + number) % 3)
            for number in range(count)
        )
        self.payloads += count
        self.world.deliver(self.writer, AppendRequested(payloads))

    def close(self) -> None:
        """The writer is asked to close."""
        if self.writer.failed is None and not self.is_closing and self.writer.is_alive:
            if self.writer.paused_until > self.world.now:
                self.world.after(self.writer.paused_until - self.world.now, self.close)
                return
            self.is_closing = True
            self.world.deliver(self.writer, CloseRequested())

    def replace(self, position: int) -> None:
        """An auditor asks the writer to replace a member (rule 21)."""
        is_awake = self.writer.is_alive and self.writer.paused_until <= self.world.now
        if is_awake and self.writer.failed is None and not self.is_closing:
            bookies = self.world.store.row.last_fragment.bookies
            member = bookies[position % len(bookies)]
            self.world.deliver(self.writer, ReplaceRequested(member))

    def recover(self, patience: int = 3) -> None:
        """Somebody recovers the ledger: a new machine from the row as it is now."""
        world = self.world
        row = world.store.row
        if world.store.is_down:
            world.after(SECOND, self.recover, patience)
            return
        if row.state is State.CLOSED:
            return
        self.recoverers += 1
        client = world.add_client(
            f"recoverer-{self.recoverers}", Recovery(read_entries=self.plan.read_entries)
        )

        def said(_: Client, effect: Effect) -> None:
            if isinstance(effect, Failed) and patience:
                client.is_alive = False
                world.after(world.rng.randint(500 * MS, 3 * SECOND), self.recover, patience - 1)
            elif isinstance(effect, Closed):
                self._closed(client, effect.metadata)

        client.on_output = said
        world.deliver(client, RecoverRequested(row))

    def read(self, *, is_all: bool = False) -> Client | None:
        """Somebody reads what is confirmed, or the whole of a closed ledger."""
        world, row = self.world, self.world.store.row
        last = self.checker.acked if row.last_entry is None else row.last_entry
        if last < 0:
            return None
        first = 0 if is_all else world.rng.randint(0, last)
        self.readers += 1
        client = world.add_client(
            f"reader-{self.readers}",
            RangeReader(row, first=first, last=last, turn=world.rng.randint(0, 5)),
        )
        op = self.checker.history.read(row.ledger_id)

        def said(_: Client, effect: Effect) -> None:
            if isinstance(effect, EntriesRead):
                entries = [(e.entry_id, e.payload) for e in effect.run.entries()]
                self.checker.history.found(op, *entries)
                client.confirmed = entries[-1][0]

        client.on_output = said
        if is_all or row.state is not State.CLOSED:
            world.deliver(client, Begin())
        else:
            self._read_ended(client, row)
        return client

    def _read_ended(self, client: Client, row: LedgerMetadata) -> None:
        """Who reads a CLOSED row goes by its end once that is kept, and the store has it then (rule 18b). Where too few
        bookies can keep it, nothing is judged of what readers see.
        """

        def begin() -> None:
            store = self.world.store
            if store.is_down:
                self.world.after(SECOND, begin)
            elif store.row.last_entry == row.last_entry and self.checker.is_kept(row):
                self.world.deliver(client, Begin())

        self.world.spread(client, row, begin)

    def repair(self) -> None:
        """Somebody gives a closed fragment another member, or fills one up."""
        world, row = self.world, self.world.store.row
        rng = world.rng
        if world.store.behind is not None:
            return
        closed = [n for n in range(len(row.fragments)) if row.is_closed_fragment(n)]
        if row.last_entry == -1 or not closed:
            return
        fragment = row.fragments[rng.choice(closed)]
        leaving = rng.choice(fragment.bookies)
        names = {member_name(member) for member in fragment.bookies} - {member_name(leaving)}
        # Metadata knows a stopped bookie by its cookie. If its directory was lost, it will start as a later incarnation.
        known = world.store.registered
        targets = [
            b.member if b.is_up else member_of(b.name, known[b.name])
            for b in world.bookies.values()
            if b.name not in names and (b.is_up or b.name in known)
        ]
        target = rng.choice([leaving, *targets])
        if row.placed_repairs and rng.random() < 0.5:
            # As a worker goes on where an earlier one ended (rule 20b).
            last = rng.choice(row.placed_repairs)
            fragment, leaving = row.fragment_of(last.first_entry), last.leaving
            target = last.target
        self.repairers += 1
        client = world.add_client(
            f"repairer-{self.repairers}",
            FragmentRepair(
                row,
                fragment=fragment.first_entry,
                leaving=leaving,
                target=target,
                held=self._held_by(target, leaving, row),
                read_entries=self.plan.read_entries,
            ),
        )
        world.deliver(client, Begin())

    def _held_by(self, target: str, leaving: str, row: LedgerMetadata) -> Ranges:
        """What a new member has by its own word, where metadata names it (the shipped worker asks)."""
        bookie = self.world.bookies[member_name(target)]
        if target == leaving or target not in row.all_members or not bookie.is_up:
            return ()
        return bookie.replica.holdings.present(0, bookie.highest)

    # --- phases --------------------------------------------------------------------------------

    def storm(self) -> None:
        """Work and faults."""
        plan, world = self.plan, self.world
        for at, count in plan.appends:
            world.after(at, self.append, count)
        if plan.close_at is not None:
            world.after(plan.close_at, self.close)
        for at in plan.recoveries:
            world.after(at, self.recover)
        for number, at in enumerate(plan.replaces):
            world.after(at, self.replace, number + plan.seed)
        for at in plan.reads:
            world.after(at, self.read)
        for at in plan.repairs:
            world.after(at, self.repair)
            world.after(at, self.end_limbo)
        for fault in plan.faults:
            world.after(fault.at, world.strike, fault)
        world.run_until(plan.heal_at, is_done=lambda: world.messages > MESSAGES_MAX)

    def heal(self) -> None:
        """No more faults: what is under way ends, appends work again, the ledger can be closed."""
        world = self.world
        world.heal()
        world.run_until(world.now + SETTLE)
        restores = world.restores
        if restores.is_gone or (restores.waits and not restores.is_loss_accepted):
            return  # nobody can go on: safety was judged on the way
        if world.is_quorum_lost or restores.is_loss_accepted:
            self.recover(3)
            world.run_until(world.now + SETTLE)
            return  # too much is lost for liveness: safety was judged on the way
        if self._is_writing():
            self.append(1)
            world.run_until(
                world.now + SETTLE, is_done=lambda: self.writer.confirmed == self.payloads - 1
            )
            if self._is_writing():
                judged(invariants.appends_are_acked(self.payloads, self.writer.confirmed + 1))
            if self.writer.failed is not None and world.store.row.state is State.OPEN:
                judged(
                    invariants.appends_are_acked(
                        self.payloads, self.writer.confirmed + 1, self.writer.failed.code
                    )
                )
        if self._is_for_one_hung():
            self._recover_with_one_hung()
        if self._is_writing():
            self.close()
            world.run_until(world.now + SETTLE, is_done=lambda: self.writer.closed is not None)
            if self.writer.closed is None and self.writer.failed is None:
                judged(invariants.ledger_ends(LEDGER, world.store.row.state, "a close did not end"))
        if world.store.row.state is not State.CLOSED:
            self.recover(10)
            world.run_until(world.now + 2 * SETTLE, is_done=self._is_closed)
        judged(invariants.ledger_ends(LEDGER, world.store.row.state))
        world.run_until(world.now + SETTLE)
        self._empty_limbo()
        self._read_all()
        self.checker.missed_is_known()
        self.checker.at_the_end()
        world.run_until(world.now + SETTLE)
        before = world.messages
        world.run_until(world.now + SETTLE)
        # A writer that waits for a spare asks once a second, four messages each (RETRY).
        judged(invariants.comes_to_rest(world.messages - before, 6 * SETTLE // SECOND))

    def _is_for_one_hung(self) -> bool:
        """Whether this seed asks L3, and of a ledger that one bookie less can't hold up: it is not
        closed, no copy of its last members is lost, and each write set has an ack quorum without it.
        """
        world, quorum = self.world, self.plan.quorum
        is_asked = self.plan.seed % HUNG_EVERY == 0
        is_enough = 2 <= quorum.ack_quorum < quorum.write_quorum
        return (
            is_asked
            and is_enough
            and not self._is_closed()
            and all(
                (bookie := world.bookies[member_name(member)]).member == member
                and not (bookie.damaged or bookie.replica.is_limbo)
                for member in world.store.row.last_fragment.bookies
            )
        )

    def _recover_with_one_hung(self) -> None:
        """L3: the writer is gone, and one of the last members never answers."""
        world = self.world
        self.writer.is_alive = False
        hung = member_name(world.rng.choice(world.store.row.last_fragment.bookies))
        world.hung.add(hung)
        world.note("hung", hung)
        self.recover(10)
        world.run_until(world.now + 2 * SETTLE, is_done=self._is_closed)
        judged(invariants.one_hung_blocks_nothing(hung, world.store.row.state))
        world.hung.clear()

    def end_limbo(self) -> None:
        """The bookies look whether what was in limbo is whole again."""
        for bookie in self.world.bookies.values():
            bookie.try_to_end_limbo()

    def _empty_limbo(self) -> None:
        """L5: what a new incarnation may have lost is copied, and limbo ends."""
        world = self.world
        for _ in range(LIMBO_ROUNDS):
            self.end_limbo()
            wanted = [item for bookie in world.bookies.values() for item in bookie.wanted()]
            if not wanted:
                break
            for leaving, target, part in wanted:
                self._mend(leaving, target, part)
        in_limbo = [b.member for b in world.bookies.values() if b.replica.is_limbo]
        judged(invariants.limbo_empties(in_limbo))

    def _mend(self, leaving: str, target: str, part: FragmentRange) -> None:
        """One repair, to its end."""
        is_filling = leaving == target
        self.repairers += 1
        client = self.world.add_client(
            f"repairer-{self.repairers}",
            FragmentRepair(
                self.world.store.row,
                fragment=part.fragment,
                leaving=leaving,
                target=target,
                first=part.first if is_filling else None,
                last=part.last if is_filling else None,
                read_entries=self.plan.read_entries,
            ),
        )
        ends: list[Effect] = []

        def said(_: Client, effect: Effect) -> None:
            ends.append(effect)

        client.on_output = said
        self.world.deliver(client, Begin())
        self.world.run_until(self.world.now + SETTLE, is_done=lambda: bool(ends))
        is_done = ends and not isinstance(ends[0], Failed)
        judged(invariants.copies_come_back([] if is_done else [target, *ends]))

    def _read_all(self) -> None:
        """I3: whoever reads the closed ledger gets all of it."""
        last = self.world.store.row.last_entry
        reader = self.read(is_all=True)
        if reader is not None:
            self.world.run_until(self.world.now + SETTLE, is_done=lambda: reader.confirmed == last)
            if reader.confirmed != last:
                why = reader.failed and (reader.failed.code, reader.failed.entry_id)
                raise Violation(f"I3: read to {reader.confirmed} of {last}: {why}")

    def _is_closed(self) -> bool:
        return self.world.store.row.state is State.CLOSED

    def _is_writing(self) -> bool:
        row = self.world.store.row
        return (
            self.writer.is_alive
            and self.writer.failed is None
            and self.writer.closed is None
            and not self.is_closing
            and row.state is State.OPEN
        )


def run_plan(plan: Plan, *, is_reported: bool = False) -> Outcome:
    """A plan's verdict."""
    run = Run(plan, is_reported=is_reported)
    violation = None
    try:
        run.storm()
        run.heal()
    except AssertionError as broken:
        kind = "" if isinstance(broken, Violation) else "check: "
        violation = kind + (str(broken) or repr(broken))
        if not isinstance(broken, Violation):
            violation += _place(broken)
    except Exception as broken:  # noqa: BLE001 - a machine that raises is a finding like any other
        violation = f"{type(broken).__name__}: {broken}{_place(broken)}"
    world = run.world
    row, restores = world.store.row, world.restores
    ended = "gone" if restores.is_gone else str(restores.waits) or row.state.value
    return Outcome(
        plan,
        world.trace_hash,
        world.messages,
        world.now,
        violation,
        tuple(world.story),
        run.checker.acked,
        ended,
        restores.count,
        bool(restores.waits),
    )


def _place(broken: BaseException) -> str:
    at = broken.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return ""
    return f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"


def run_seed(seed: int) -> Outcome:
    """A seed's verdict."""
    return run_plan(draw(seed))


def kind_of(violation: str | None) -> str:
    """The invariant's name of a violation."""
    return "" if violation is None else violation.partition(":")[0]


def shrink(outcome: Outcome) -> Outcome:
    """A smaller plan that breaks the same rule, told as a story: faults, work and noise dropped."""
    kind = kind_of(outcome.violation)
    plan = shrunk(
        outcome.plan,
        lambda smaller: kind_of(run_plan(smaller).violation) == kind,
        lists=("faults", "appends", "repairs", "reads", "recoveries", "replaces"),
        quiet=(
            {"loss": 0.0},
            {"duplicate": 0.0},
            {"straggler": 0.0},
            {"store_answer_loss": 0.0},
            {"close_at": None},
        ),
        dice=DICE,
    )
    return run_plan(plan, is_reported=True)
