"""A metadata store that goes back to an earlier state, and what bookies' copies make of it (rule 18d).

A dump is restored, a standby without the last changes takes over, or an empty store takes the place of one that is
lost. The store answers nothing until the shipped decision (`protocol/rebuild.py`) gives the row: on what bookies
hold on their disks, each asked at a moment of its own. Where that proves nothing, more bookies come up first; then
the ledger waits for an operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from quorumlog.protocol import rebuild
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import Action, Bookies, Decision, Held, Known, Registered
from quorumlog.protocol.writer import LedgerWriter
from tests.model.sim.plan import MS, SECOND, Fault
from tests.model.sim.store import Snapshot

if TYPE_CHECKING:
    from tests.model.sim.limbo import LosingBookie
    from tests.model.sim.world import World

ASK_US: Final = 50 * MS
"""Within this time all bookies are asked."""
TRIES_HEALED: Final = 3
"""Of a rebuild, once all bookies are up that come up: then an operator decides."""


WIPED_EVERY: Final = 2
"""Of so many times that the store goes back, a bookie loses its disk at the same time at one."""
EARLY_EVERY: Final = 4
"""Of so many of these bookies one registers before the rebuild."""
RESTARTED_EVERY: Final = 4
"""Of so many times that the store goes back, the processes of before are restarted at one."""
HASTY: Final = 2
"""Of eight operators so many accept a loss at once, where bookies that are down may hold the proof."""
ACCEPTED_EVERY: Final = 2
"""Of so many seeds one accepts a loss where nothing is proven."""


class Waits(StrEnum):
    """What an operator is asked."""

    NOTHING = ""
    WAIT = "WAIT"
    CONFLICT = "CONFLICT"


@dataclass(slots=True)
class Restores:
    """The store of a world, as far as it goes back."""

    world: "World"
    count: int = 0
    stranded: int = 0
    """Clients that were restarted since the store lacked their row."""
    waits: Waits = Waits.NOTHING
    """The rebuild came to no decision, with all bookies up."""
    is_gone: bool = False
    """The store is empty, and no bookie has heard of the ledger."""
    is_loss_accepted: bool = False
    """An operator decided where nothing was proven."""
    is_unnoticed: bool = False
    """An empty bookie may register before anybody knows that the store has gone back."""
    _tries: int = 0
    _is_hasty: bool = False
    """The operator waits for no bookie, and accepts the loss at once."""

    def strike(self, fault: Fault) -> None:
        """Go back. The processes of before are restarted at once, or live on."""
        world = self.world
        if world.store.behind is not None or self.is_gone:
            return
        self.count += 1
        if (fault.target + fault.other) % WIPED_EVERY == 0:
            # A disk is lost together with the database, and starts empty under the old name.
            bookie = world.bookies[f"b{(fault.target + 1) % world.plan.bookies + 1}"]
            bookie.crash("wipe")
            world.after(fault.lasts // 2, bookie.restart)
            self.is_unnoticed = fault.other // 4 % EARLY_EVERY == 0
        states = self._states(fault)
        world.store.go_back(states)
        is_restart = fault.other % RESTARTED_EVERY == 0
        self._is_hasty = fault.target // 4 % 8 < HASTY
        world.note("store goes back", states, "restart" if is_restart else "")
        if is_restart:
            for client in world.clients:
                client.is_alive = False
        world.after(min(fault.lasts, max(world.plan.heal_at - world.now, 0)), self._rebuild)

    def _states(self, fault: Fault) -> int:
        """How many states are lost: some of the last, any number, or all."""
        history = len(self.world.store.history)
        match fault.target % 4:
            case 0:
                return fault.other % (history + 1)
            case 1:
                return history + 1
            case _:
                return min(1 + fault.other // 2 % 3, history)

    # --- the rebuild --------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Ask every bookie, each at another moment, and decide."""
        self.restart_who_knows()
        held: list[Held] = []
        silent: list[str] = []
        answering: dict[str, int] = {}

        def ask(bookie: "LosingBookie") -> None:
            if bookie.is_telling:
                answering[bookie.name] = bookie.incarnation
                held.extend(bookie.held(self.world.store.rows))
            if not bookie.is_telling or bookie.may_lack:
                silent.append(bookie.name)

        for bookie in self.world.bookies.values():
            self.world.after(self.world.rng.randint(0, ASK_US), ask, bookie)
        bookies = Bookies(answering, frozenset())
        self.world.after(ASK_US + 1, self._decide, held, bookies, silent)

    def restart_who_knows(self) -> None:
        """The runbook stops gateways before a rebuild. At least those writers must go that know of changes which the
        store lacks: a writer would acknowledge entries by a row that nobody who recovers the ledger can know.
        Other clients live on with rows of the lost history, and change nothing by them.
        """
        for client in self.world.clients:
            machine = client.machine
            if not client.is_alive or not isinstance(machine, LedgerWriter):
                continue
            if client.closed is None and self.world.store.is_lost(machine.metadata):
                self.stranded += 1
                client.is_alive = False

    def _decide(self, held: Sequence[Held], bookies: Bookies, silent: Sequence[str]) -> None:
        world, behind = self.world, self.world.store.behind
        assert behind is not None, "one rebuild at a time"
        self._put_cookies(held, bookies)
        bookies = Bookies(bookies.answering, frozenset(silent), dict(world.store.cookies))
        tokens = {row.attempt for one in held for row in one.rows}
        known = Known(behind.row, attempts=behind.applied & tokens)
        decision = rebuild.decide(known, held, bookies)
        for name, incarnation in bookies.answering.items():
            world.store.put_cookie(name, incarnation)
        world.note("rebuild", decision.action, decision.why, *sorted(silent))
        row = decision.row or behind.row
        if decision.action in (Action.WRITE, Action.SAME) and row is not None:
            self._come_back(decision, row, tokens)
        elif behind.row is None and not (tokens or silent):
            self._vanish()
        elif "with a new directory" in decision.why and self._wipe_again(bookies):
            world.after(SECOND, self._rebuild)
        elif self._is_hasty or (world.is_healed and self._tries >= TRIES_HEALED):
            self._ask_operator(decision, behind, held)
        else:
            self._tries += world.is_healed
            world.after(SECOND, self._rebuild)

    def _put_cookies(self, held: Sequence[Held], bookies: Bookies) -> None:
        """Of bookies that copies name and that do not answer, before a row is written (rule 15b)."""
        store = self.world.store
        named: dict[str, int] = {}
        for member in (m for one in held for row in one.rows for m in row.all_members):
            name, incarnation = member_name(member), member_incarnation(member)
            named[name] = max(incarnation, named.get(name, 0))
        present = dict(bookies.answering)
        for name, incarnation in store.registered.items():
            present[name] = max(incarnation, present.get(name, 0))
        for name, incarnation in rebuild.stand_ins(named, present).items():
            store.put_cookie(name, incarnation)
            bookie = self.world.bookies[name]
            if bookie.is_up:
                # Its directory registered early, as an incarnation below the stand-in: it stops when its
                # registration is refused, and the operator gives it another directory (seed 580644).
                bookie.fall("wipe")
                self.world.after(SECOND, bookie.restart)

    def _wipe_again(self, bookies: Bookies) -> bool:
        """The operator gives a bookie that registered too early a new directory. Returns whether there is one."""
        found = [
            bookie
            for bookie in self.world.bookies.values()
            if bookies.registered.get(bookie.name, Registered(0)).born_at and not bookie.log
        ]
        for bookie in found:
            bookie.fall("wipe")
            bookie.restart()
        return bool(found)

    def _come_back(self, decision: Decision, row: LedgerMetadata, tokens: set[str]) -> None:
        world = self.world
        contained = tokens if decision.action is Action.WRITE else ()
        world.store.come_back(row, contained)
        world.note("store comes back", row.version, row.attempt[-4:], row.state)
        if world.watcher is not None:
            world.watcher.rebuilt(row)

    def _vanish(self) -> None:
        """The ledger's creation is lost, and nobody was ever told that it holds anything."""
        self.is_gone = True
        if self.world.watcher is not None:
            self.world.watcher.vanished()

    def _ask_operator(self, decision: Decision, behind: Snapshot, held: Sequence[Held]) -> None:
        """Nothing is proven. An operator leaves it so, or accepts the loss: the rebuild came first."""
        world = self.world
        self.waits = Waits(decision.action.upper())
        row = behind.row or rebuild.newest_of(held)
        if row is None or not (self._is_hasty or world.plan.seed % ACCEPTED_EVERY == 0):
            return
        for client in world.clients:
            client.is_alive = False
        self.is_loss_accepted = True
        if world.watcher is not None:
            world.watcher.loss_accepted()
        self._come_back(decision, replace(row, ledger_key=world.metadata.ledger_key), set())
