"""The simulated world: virtual time, network, metadata, bookies and the clients that live in it.

One heap of (time, number, action) drives the machines that ship. Nothing here knows the protocol:
a client steps its machine and performs the effects, a bookie answers by its replica, and all dice
come from one seeded generator, so that a seed is a whole history. What must hold is the
checker's business (tests/model/sim/checker.py).
"""

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, assert_never

from quorumlog.protocol.ends import RowSpread, Spreading
from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.messages import (
    AddAnswered,
    BookiesFound,
    CasStatus,
    Closed,
    Confirmed,
    Effect,
    EntriesRead,
    Event,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    ReadAnswered,
    ReadMetadata,
    RecoveryNeeded,
    Repaired,
    RowAnswered,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.rebuild import Registered
from quorumlog.protocol.record import Entry
from quorumlog.protocol.row_copy import RowName
from tests.model.sim.limbo import DeferringBookie, LosingBookie
from tests.model.sim.plan import MS, SECOND, Fault, Plan
from tests.model.sim.restores import Restores
from tests.model.sim.store import Store
from tests.support import invariants
from tests.support.invariants import Wrong

LEDGER: Final = 7
MESSAGES_MAX: Final = 10_000
"""More than any healed world needs: beyond it a retry spins (L6). A storm whose timers fire before
answers can come may well be that loud, and just ends there.
"""

TIMER_TIMES: Final = {
    Timer.ADD: 2 * SECOND,
    Timer.QUORUM: 10 * SECOND,
    Timer.HEDGE: 50 * MS,
    Timer.RETRY: SECOND,
}

Request = SendAdd | SendFence | SendRead | SendRow

OUTPUTS: Final = (Confirmed, Failed, Closed, Repaired, RecoveryNeeded, EntriesRead)
"""What a machine tells its owner, at once and in order; all else are requests."""


class Machine(Protocol):
    """What writer, recovery and repair have in common."""

    def step(self, event: Event) -> list[Effect]: ...

    def check(self) -> None: ...


class Violation(AssertionError):
    """An invariant does not hold."""


def judged(*found: Wrong) -> None:
    """Raise Violation where a check says what is wrong."""
    for wrong in found:
        if wrong is not None:
            raise Violation(wrong)


@dataclass(slots=True)
class Client:
    """A process that drives one machine. `closed` is the row it was told to be CLOSED."""

    name: str
    machine: Machine
    is_alive: bool = True
    paused_until: int = 0
    clock_until: int = 0
    clock_rate: float = 1.0
    """Until then its timers run so much slower or faster: its clock jumps, forwards or back."""
    failed: Failed | None = None
    closed: LedgerMetadata | None = None
    confirmed: int = -1
    on_output: "Callable[[Client, Effect], None] | None" = None


@dataclass(slots=True)
class Network:
    """Which links are cut or clogged, until when. A link is (from, to)."""

    cut: dict[tuple[str, str], int] = field(default_factory=dict)
    clogged: dict[tuple[str, str], int] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)


class Watcher(Protocol):
    """The checker, as the world sees it."""

    def before_step(self, client: Client, event: Event) -> None: ...

    def effect(self, client: Client, effect: Effect) -> None: ...

    def stored(self, member: str, entries: Sequence[Entry]) -> None: ...

    def copied(self, member: str, name: RowName) -> None: ...

    def row_changed(
        self, client: Client, before: LedgerMetadata, after: LedgerMetadata
    ) -> None: ...

    def reported(self, row: LedgerMetadata) -> None: ...

    def rebuilt(self, row: LedgerMetadata) -> None: ...

    def vanished(self) -> None: ...

    def loss_accepted(self) -> None: ...


class World:
    """Everything that happens in a run, in virtual microseconds."""

    def __init__(self, plan: Plan, *, is_reported: bool = False) -> None:
        self.plan = plan
        self.rng = random.Random(f"dice-{plan.seed}")
        self.now = 0
        self.messages = 0
        self.story: list[str] = []
        self._is_reported = is_reported
        self._hash = hashlib.blake2b(digest_size=8)
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0
        self.is_healed = False
        self._messages_in_storm = 0
        self.lies_until = 0
        self.lost_copies = 0
        self.hung: set[str] = set()
        """Bookies that take requests and never answer."""
        self.network = Network()
        self.clients: list[Client] = []
        self.watcher: Watcher | None = None
        self._tokens: dict[tuple[str, int], str] = {}
        names = [f"b{number}" for number in range(1, plan.bookies + 1)]
        digest = self.rng.choice((DigestKind.CRC32C, DigestKind.CRC32C, DigestKind.HMAC_SHA256))
        self.metadata = LedgerMetadata(
            ledger_id=LEDGER,
            quorum=plan.quorum,
            digest=digest,
            fragments=(
                Fragment(0, tuple(member_of(n, 1) for n in names[: plan.quorum.ensemble_size])),
            ),
            writer=Writer("writer", ""),
            ledger_key=b"k" * 32,
            mac_key=b"m" * 32 if digest is DigestKind.HMAC_SHA256 else b"",
            attempt=self._token(("writer", 0)),
        )
        self.store = Store(self.metadata)
        self.restores = Restores(self)
        kind = DeferringBookie if plan.is_deferred else LosingBookie
        self.bookies = {name: kind(name, self) for name in names}
        self.store.cookies = {name: Registered(1) for name in names}

    # --- time ---------------------------------------------------------------------------------

    def after(self, delay: int, action: Callable[..., object], *args: Any) -> None:
        """Do this after a virtual delay."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(delay, 0), self._number, action, args))

    def run_until(self, time: int, *, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until a time, or until it is done."""
        heap = self._heap
        while heap and heap[0][0] <= time:
            if is_done():
                return
            at, _, action, args = heapq.heappop(heap)
            self.now = at
            action(*args)
            if self.is_healed and self.messages - self._messages_in_storm > MESSAGES_MAX:
                judged(
                    invariants.comes_to_rest(self.messages - self._messages_in_storm, MESSAGES_MAX)
                )
        self.now = max(self.now, time)

    def note(self, *parts: object) -> None:
        """Part of the trace: hashed always, told when somebody wants the story."""
        line = f"{self.now} " + " ".join(map(str, parts))
        self._hash.update(line.encode())
        if self._is_reported:
            self.story.append(f"{self.now / SECOND:10.6f}  " + line.partition(" ")[2])

    @property
    def trace_hash(self) -> str:
        """Equal for equal runs."""
        return self._hash.hexdigest()

    # --- network ------------------------------------------------------------------------------

    @property
    def sync(self) -> tuple[int, int]:
        """How long a disk takes, at least and at most."""
        return self.plan.sync

    def send(self, source: str, target: str, action: Callable[..., None], *args: Any) -> None:
        """One message: lost, late, doubled or out of order, as the plan says."""
        plan, rng, link = self.plan, self.rng, (source, target)
        if self.network.cut.get(link, -1) > self.now:
            return
        copies = 1
        if not self.is_healed:
            if plan.loss and rng.random() < plan.loss:
                return
            if plan.duplicate and rng.random() < plan.duplicate:
                copies = 2
        for _ in range(copies):
            low, high = (200, 2 * MS) if self.is_healed else plan.delay
            delay = rng.randint(low, high)
            if not self.is_healed and plan.straggler and rng.random() < plan.straggler:
                delay += rng.randint(0, plan.straggler_max)
            at = max(self.now + delay, self.network.clogged.get(link, 0))
            if plan.in_order:
                at = max(at, self.network.last.get(link, 0))
                self.network.last[link] = at
            self.after(at - self.now, action, *args)

    # --- clients ------------------------------------------------------------------------------

    def add_client(self, name: str, machine: Machine) -> Client:
        """A new process."""
        client = Client(name, machine)
        self.clients.append(client)
        return client

    def deliver(self, client: Client, event: Event) -> None:
        """The client's process hears an event, when it runs again."""
        if not client.is_alive:
            return
        if client.paused_until > self.now:
            self.after(client.paused_until - self.now, self.deliver, client, event)
            return
        if isinstance(event, MetadataAnswered):
            row = event.metadata
            if row is not None and self.store.is_lost(row) and row.state is not State.CLOSED:
                # The runbook stops a writer with a row that the store lacks: here its connection breaks.
                event = MetadataAnswered(event.attempt, CasStatus.UNKNOWN)
        self.messages += 1
        self.note(client.name, "<-", notify(event))
        if self.watcher is not None:
            self.watcher.before_step(client, event)
        effects = client.machine.step(event)
        client.machine.check()
        # Effects of one list have no order; what the caller is told is told at once.
        outputs = [effect for effect in effects if isinstance(effect, OUTPUTS)]
        requests = [effect for effect in effects if not isinstance(effect, OUTPUTS)]
        self.rng.shuffle(requests)
        for effect in (*outputs, *requests):
            self.note(client.name, "->", notify(effect))
            if self.watcher is not None:
                self.watcher.effect(client, effect)
            self.perform(client, effect)

    def perform(self, client: Client, effect: Effect) -> None:
        """The driver: each request ends in exactly one answer, in time or as UNKNOWN."""
        match effect:
            case SendAdd() | SendFence() | SendRead() | SendRow():
                self._request(client, effect)
            case UpdateMetadata():
                token = self._token((client.name, effect.attempt))
                self._cas(client, effect, token, first=True)
            case ReadMetadata():
                self._read_row(client, effect)
            case FindBookies():
                self._find(client, effect)
            case StartTimer():
                factor = 1.0 if self.is_healed else self.plan.timers
                if client.clock_until > self.now:
                    factor *= client.clock_rate
                time = int(TIMER_TIMES[effect.timer] * factor * self.rng.uniform(0.9, 1.1))
                self.after(time, self.deliver, client, TimerFired(effect.timer, effect.tag))
            case Confirmed(_, last):
                client.confirmed = last
            case Failed():
                client.failed = effect
            case Closed():
                client.closed = effect.metadata
            case RecoveryNeeded() | EntriesRead() | Repaired():
                pass
            case _:
                assert_never(effect)
        if client.on_output is not None and isinstance(effect, OUTPUTS):
            client.on_output(client, effect)

    def spread(self, client: Client, row: LedgerMetadata, then: Callable[[], None]) -> None:
        """Send copies of a row that no add brings, as `net/driver.py` does; `then` comes when enough bookies
        have one, or after twice the time of an add (rule 18b).
        """
        machine = RowSpread(row)
        is_over = False

        def go_on() -> None:
            nonlocal is_over
            if machine.phase is Spreading.PLACING:
                found = self._live_bookies(row.last_fragment.bookies, tuple(row.all_members))
                self.after(TIMER_TIMES[Timer.ADD], overdue)
                send(machine.others(found))
            if machine.phase is Spreading.OVER and not is_over:
                is_over = True
                then()

        def send(members: Iterable[str]) -> None:
            for member in members:
                self._request(client, SendRow(member, row), hear)

        def hear(event: Event) -> None:
            assert isinstance(event, RowAnswered)
            machine.answered(event.member, event.status)
            go_on()

        def members_overdue() -> None:
            if machine.phase is Spreading.MEMBERS:
                overdue()

        def overdue() -> None:
            machine.overdue()
            go_on()

        send(machine.begin(down=()))
        self.after(TIMER_TIMES[Timer.ADD], members_overdue)

    def _request(
        self, client: Client, effect: Request, listener: Callable[[Event], None] | None = None
    ) -> None:
        """Ask a bookie. After the request's time the answer is UNKNOWN; a later one may come."""
        bookie = self.bookies[member_name(effect.member)]
        is_answered = [False]

        def hear(event: Event, *, is_timeout: bool = False) -> None:
            if is_answered[0] and not (self.plan.late_answers and not is_timeout):
                return
            is_answered[0] = True
            if listener is None:
                self.deliver(client, event)
            else:
                listener(event)

        def answer(event: Event) -> None:
            self.send(bookie.name, client.name, hear, event)

        wipes = bookie.wipes

        def arrive() -> None:
            if bookie.name in self.hung:
                return
            # What was on its way to a process that has lost its disk ended with the connection.
            if bookie.is_up and bookie.wipes == wipes:
                self.note(bookie.name, "<-", client.name, notify(effect))
                self.messages += 1
                bookie.receive(effect, answer)
            else:
                answer(unknown(effect))

        self.send(client.name, bookie.name, arrive)
        time = 2 * SECOND if self.is_healed else self.plan.request_timeout
        self.after(time, lambda: hear(unknown(effect), is_timeout=True))

    # --- metadata -----------------------------------------------------------------------------

    def _store_delay(self) -> int:
        low, high = (500, 5 * MS) if self.is_healed else self.plan.store_delay
        return self.rng.randint(low, high)

    def _token(self, change: tuple[str, int]) -> str:
        """The token of a client's change: a repeat has the same one (rule 6)."""
        return self._tokens.setdefault(change, f"{len(self._tokens) + 1:032x}")

    def _cas(self, client: Client, effect: UpdateMetadata, token: str, *, first: bool) -> None:
        """A compare-and-swap, asked again with its token until it is settled (rule 6)."""
        if not client.is_alive:
            return
        if self.store.is_down:
            if first:
                answer = MetadataAnswered(effect.attempt, CasStatus.UNKNOWN)
                self.after(self._store_delay(), self.deliver, client, answer)
            else:
                self.after(200 * MS, lambda: self._cas(client, effect, token, first=False))
            return
        is_settled = [False]

        def apply() -> None:
            if self.store.is_down:
                return
            before = self.store.row
            is_new = token not in self.store.applied
            status, row = self.store.cas(token, effect.metadata, effect.missed)
            self.note("store", client.name, status, describe(row))
            if is_new and status is CasStatus.OK and self.watcher is not None:
                self.watcher.row_changed(client, before, row)
            if is_new and status is CasStatus.OK:
                self._check_added(before, row)
            if self.is_healed or self.rng.random() >= self.plan.store_answer_loss:
                self.after(self._store_delay(), settle, status, row)

        def settle(status: CasStatus, row: LedgerMetadata) -> None:
            if not is_settled[0]:
                is_settled[0] = True
                self.deliver(client, MetadataAnswered(effect.attempt, status, row))

        def again() -> None:
            if not is_settled[0]:
                is_settled[0] = True
                self._cas(client, effect, token, first=False)

        self.after(self._store_delay(), apply)
        self.after(self.rng.randint(20 * MS, 2 * SECOND), again)

    def _check_added(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Rule 15b, by a count of our own: who comes into a row is the registered incarnation."""
        came = {*after.all_members} - {*before.all_members}
        registered = self.store.registered
        strange = [m for m in came if registered.get(member_name(m)) != member_incarnation(m)]
        if strange:
            raise Violation(
                f"rule 15b: {sorted(strange)} came into the row, and are not registered"
            )

    def _read_row(self, client: Client, effect: ReadMetadata) -> None:
        def read() -> None:
            answer = MetadataAnswered(effect.attempt, CasStatus.UNKNOWN)
            if not self.store.is_down:
                answer = MetadataAnswered(effect.attempt, CasStatus.OK, self.store.row)
            self.after(self._store_delay(), self.deliver, client, answer)

        self.after(self._store_delay(), read)

    def _find(self, client: Client, effect: FindBookies) -> None:
        """Candidates. A liveness store that lies names dead, old and excluded ones too (I31)."""
        if self.lies_until > self.now:
            found = [
                member_of(bookie.name, self.rng.randint(1, bookie.incarnation))
                for bookie in self.bookies.values()
                if self.rng.random() < 0.6
            ]
        else:
            found = self._live_bookies(effect.ensemble, effect.exclude)
        self.rng.shuffle(found)
        self.after(
            self._store_delay(), self.deliver, client, BookiesFound(effect.attempt, tuple(found))
        )

    def _live_bookies(self, ensemble: Sequence[str], exclude: Sequence[str]) -> list[str]:
        """Who is proposed: the metadata service ignores heartbeats of another incarnation than the cookie's (seed 408941)."""
        staying = {member_name(member) for member in ensemble}
        registered = self.store.registered
        return [
            bookie.member
            for bookie in self.bookies.values()
            if bookie.is_up
            and registered.get(bookie.name) == bookie.incarnation
            and not bookie.is_full
            and bookie.name not in staying
            and bookie.member not in exclude
        ]

    # --- faults -------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Let a fault happen, and its end."""
        if self.is_healed:
            return
        self.note("fault", fault)
        bookie = self.bookies[f"b{fault.target % self.plan.bookies + 1}"]
        until = min(self.now + fault.lasts, self.plan.heal_at)
        match fault.kind:
            case "kill" | "power-cut" | "wipe":
                bookie.crash(fault.kind)
                self.after(fault.lasts, bookie.restart)
            case "partition" | "one-way":
                if self.clients:
                    ends = (bookie.name, self.clients[fault.other % len(self.clients)].name)
                    links = [ends, ends[::-1]]
                    chosen = links if fault.kind == "partition" else [links[fault.other % 2]]
                    self.network.cut.update(dict.fromkeys(chosen, until))
            case "clog":
                links = [(client.name, bookie.name) for client in self.clients]
                links = links if fault.other % 2 else [link[::-1] for link in links]
                self.network.clogged.update(dict.fromkeys(links, until))
            case "pause":
                if self.clients:
                    client = self.clients[fault.target % len(self.clients)]
                    client.paused_until = max(client.paused_until, self.now + fault.lasts)
            case "clock":
                if self.clients:
                    client = self.clients[fault.target % len(self.clients)]
                    client.clock_until = until
                    client.clock_rate = (0.02, 0.2, 30.0)[fault.other % 3]
            case "slow":
                bookie.slow_until = until
            case "flip":
                bookie.flips_until = until
            case "full":
                bookie.full_until = until
            case "store-down":
                self.store.is_away = True
                self.after(fault.lasts, self._store_up)
            case "store-back":
                self.restores.strike(fault)
            case "lies":
                self.lies_until = until
            case "corrupt":
                bookie.corrupt()
            case "damage-target":
                self._damage_a_target(fault.target)
            case "writer-dies":
                self.clients[0].is_alive = False
            case _:
                raise AssertionError(fault.kind)

    def _damage_a_target(self, number: int) -> None:
        """A copy is damaged where a repair is to give a place to what is held: at a pending target, else
        at a bookie that had a place once. It counts among the lost ones, for it may become a member's.
        """
        row = self.store.row
        pending = {member_name(repair.target) for repair in row.repairs}
        members = {member_name(m) for fragment in row.fragments for m in fragment.bookies}
        names = sorted(name for name in pending or self.bookies.keys() - members)
        if names:
            self.bookies[names[number % len(names)]].corrupt()

    def may_lose_a_copy(self) -> bool:
        """Whether one more copy may be destroyed: an ack quorum of them is data loss by design."""
        self.lost_copies += 1
        return self.lost_copies <= self.plan.max_lost_copies

    @property
    def is_quorum_lost(self) -> bool:
        """Whether faults destroyed an ack quorum of copies, where the plan allows that."""
        return self.lost_copies >= self.plan.quorum.ack_quorum <= self.plan.max_lost_copies

    def _store_up(self) -> None:
        self.store.is_away = False

    def heal(self) -> None:
        """The faults are over: all that is left must come to rest (liveness)."""
        self.note("healed")
        self.is_healed = True
        # What is on its way arrives yet, and is answered: that is the storm's noise.
        self._messages_in_storm = self.messages + 2 * len(self._heap)
        self.network = Network(last=self.network.last)
        self._store_up()
        self.lies_until = 0
        for client in self.clients:
            client.paused_until = min(client.paused_until, self.now)
            client.clock_until = 0
        for bookie in self.bookies.values():
            bookie.slow_until = bookie.full_until = bookie.flips_until = 0
            if not bookie.is_up:
                bookie.restart()


def unknown(effect: Request) -> Event:
    """The answer of a bookie that does not answer."""
    match effect:
        case SendAdd(position, member, generation, run):
            return AddAnswered(position, member, generation, run.first, run.last, Status.UNKNOWN)
        case SendFence(position, member):
            return FenceAnswered(position, member, Status.UNKNOWN)
        case SendRead(position, member, _, first, last):
            return ReadAnswered(position, member, first, last, Status.UNKNOWN)
        case SendRow(member, row):
            return RowAnswered(member, row.version, Status.UNKNOWN)
        case _:
            assert_never(effect)


def describe(row: LedgerMetadata) -> str:
    """A row in a few words."""
    fragments = " ".join(f"{f.first_entry}:{','.join(f.bookies)}" for f in row.fragments)
    end = "" if row.last_entry is None else f" last={row.last_entry} length={row.length}"
    repairs = "".join(f" repair {r.first_entry}:{r.leaving}>{r.target}" for r in row.repairs)
    return f"v{row.version} {row.state}{end} [{fragments}]{repairs}"


def notify(message: Event | Effect) -> str:
    """An event or effect as one line of a story."""
    match message:
        case SendAdd(position, member, generation, run, _, recovery):
            kind = "recovery-add" if recovery else "add"
            return f"{kind} {run.first}..{run.last} to {position}:{member} gen={generation}"
        case SendFence(position, member):
            return f"fence {position}:{member}"
        case SendRead(position, member, _, first, last, fence):
            kind = "fencing-" if fence else "disk-" if message.from_disk else ""
            return f"{kind}read {first}..{last} of {position}:{member}"
        case SendRow(member, row):
            return f"keep v{row.version} at {member}"
        case RowAnswered(member, version, status):
            return f"kept v{version} at {member}: {status}"
        case AddAnswered(position, member, generation, first, last, status):
            return f"added {first}..{last} by {position}:{member} gen={generation}: {status}"
        case FenceAnswered(position, member, status, lac):
            return f"fenced {position}:{member}: {status} lac={lac}"
        case ReadAnswered(position, member, first, last, status, run, absent):
            present = "" if run is None else f" {run.first}..{run.last}"
            return f"read {first}..{last} of {position}:{member}: {status}{present} absent={absent}"
        case UpdateMetadata(attempt, metadata):
            return f"cas #{attempt} {describe(metadata)}"
        case MetadataAnswered(attempt, status, row):
            return f"row #{attempt} {status} {'' if row is None else describe(row)}"
        case Closed(metadata):
            return f"closed {describe(metadata)}"
        case _:
            return repr(message)
