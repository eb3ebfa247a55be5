"""Each named check is asked where the matrix of docs/internals says, and notices a world that is
damaged for it.

A damage changes what is there (a row, a disk, a book, what a client hears), or takes the guard out that
keeps it right; then some seed must be broken by the very check that is named.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from quorumlog.protocol.ends import RowSpread
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.messages import (
    CasStatus,
    Confirmed,
    Event,
    FenceAnswered,
    SendRead,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.replica import FenceSet, LacKept, Replica
from quorumlog.protocol.tally import Tally
from services.bookie.collect import Collector
from tests.model.explore.explorer import Explorer
from tests.model.explore.scope import Scope
from tests.model.logs import simulation as logs
from tests.model.logs.judge import Judge as LogJudge
from tests.model.sim import run as machines
from tests.model.sim.bookie import SimBookie
from tests.model.sim.checker import Checker
from tests.model.sim.limbo import LosingBookie
from tests.model.sim.run import Run
from tests.model.sim.services import run as services
from tests.model.sim.services.judge import Judge
from tests.model.sim.store import Store
from tests.model.sim.world import Client
from tests.mutation.mutants import guards
from tests.mutation.mutants.hunt import stand_in
from tests.mutation.mutants.services import gone_if_unnamed, told_without_copies
from tests.support import invariants
from tests.support.invariants import CHECKS, Wrong
from tests.support.matrix import asked_in

BY_NAME: Final = {check.__name__: check for check in CHECKS}

EXPLORED: Final = (
    Scope("one entry, one recoverer, Qw = 2", shape=(2, 2, 1)),
    Scope("an ensemble change", recoverers=0, spares=1, timeouts=1, closes=True),
)
SEEDS: Final = range(1, 61)
SERVICE_SEEDS: Final = (*range(1, 5), 9)
DAMAGED_SEEDS: Final = range(1, 31)
"""Tried until the check speaks: of a deleted ledger that is asked again it does in one of five."""
LOG_SEEDS: Final = range(1, 61)

Spied = dict[str, list[str]]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    """By check, what it said is wrong; a check that was never asked is not in it."""
    said: Spied = {}
    for name, check in BY_NAME.items():

        def spy(
            *args: Any, name: str = name, check: Callable[..., Wrong] = check, **more: Any
        ) -> Wrong:
            wrong = check(*args, **more)
            said.setdefault(name, []).extend([] if wrong is None else [wrong])
            return wrong

        monkeypatch.setattr(invariants, name, spy)
    return said


def explored() -> None:
    for scope in EXPLORED:
        assert Explorer(scope).run().violation is None


def simulated() -> None:
    for seed in SEEDS:
        assert machines.run_seed(seed).violation is None


def served() -> None:
    for seed in SERVICE_SEEDS:
        assert services.run_seed(seed).violation is None


@pytest.mark.parametrize(("letter", "run"), [("E", explored), ("S", simulated), ("W", served)])
def test_a_world_asks_the_checks_that_the_matrix_says(
    letter: str, run: Callable[[], None], spied: Spied
) -> None:
    run()

    assert spied.keys() == asked_in(letter)
    assert not any(spied.values())


# --- damages -----------------------------------------------------------------------------------------

Damage = Callable[[pytest.MonkeyPatch], None]


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Damage:
    """In place of a method: what `make` makes of it."""
    return lambda patch: patch.setattr(owner, name, make(owner.__dict__[name]))


def row(change: Callable[[LedgerMetadata, LedgerMetadata], LedgerMetadata]) -> Damage:
    """What the store keeps, by the row before and the row that was asked for."""

    def make(original: Any) -> Any:
        def cas(self: Store, *args: Any) -> tuple[CasStatus, LedgerMetadata]:
            before = self.row
            status, after = original(self, *args)
            if after.version == before.version + 1:
                self.row = after = change(before, after)
            return status, after

        return cas

    return wrapped(Store, "cas", make)


def ends_early(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if before.state is State.CLOSED or not after.last_entry or after.last_entry < 1:
        return after
    return replace(after, last_entry=after.last_entry - 1)


def ends_again(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if before.last_entry is None:
        return after
    return replace(after, last_entry=before.last_entry + 1)


def opens_again(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if before.state is not State.CLOSED:
        return after
    return replace(after, state=State.OPEN, last_entry=None, length=None)


def with_twins(_before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    *others, last = after.fragments
    twins = (last.bookies[0], *last.bookies[:-1])
    return replace(after, fragments=(*others, replace(last, bookies=twins)))


def with_moved_borders(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if len(before.fragments) < 2 or after.state is State.CLOSED:
        return after
    first, *others = after.fragments
    moved = (replace(other, first_entry=other.first_entry + 1) for other in others)
    return replace(after, fragments=(first, *moved))


def with_another_past(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if not (before.state is after.state is State.OPEN and len(before.fragments) > 1):
        return after
    first, *others = after.fragments
    turned = replace(first, bookies=first.bookies[::-1])
    return replace(after, fragments=(turned, *others))


def with_a_stranger(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    if before.state is not State.CLOSED:
        return after
    fragments = tuple(Fragment(f.first_entry, ("b99@1", *f.bookies[1:])) for f in after.fragments)
    return replace(after, fragments=fragments)


class Sticky(set[int]):
    """Copies that stay damaged, whatever is written anew."""

    def discard(self, _entry_id: object) -> None:
        return


@stand_in
def all_bad(original: Any, self: Checker, client: Client, event: Event) -> None:
    original(self, client, event)
    if client.name in self.bad:
        self.bad[client.name] = {name: Sticky(range(1000)) for name in self.world.bookies}


def reported(change: Callable[[Any], Any]) -> Damage:
    """What the checker hears of what clients ask and tell."""

    def make(original: Any) -> Any:
        return lambda self, client, effect: original(self, client, change(effect))

    return wrapped(Checker, "effect", make)


def a_gap(effect: Any) -> Any:
    is_reported = isinstance(effect, Confirmed)
    return Confirmed(effect.first + 1, effect.last + 1) if is_reported else effect


def a_phantom(effect: Any) -> Any:
    return Confirmed(effect.first, effect.last + 1000) if isinstance(effect, Confirmed) else effect


def a_change_too_late(effect: Any) -> Any:
    if not isinstance(effect, UpdateMetadata) or effect.metadata.state is not State.OPEN:
        return effect
    *others, last = effect.metadata.fragments
    later = replace(last, first_entry=last.first_entry + 1)
    return replace(effect, metadata=replace(effect.metadata, fragments=(*others, later)))


def silent_disk(_original: Any) -> Any:
    """Nothing becomes durable, though bookies say so."""
    return lambda _self, _records: None


@stand_in
def other_bytes(original: Any, self: Checker, member: str, entries: Any) -> None:
    """One bookie stores other payloads than it was given."""
    changed = [replace(e, payload=e.payload + b"!") for e in entries]
    original(self, member, changed if member_name(member) == "b2" else entries)


@stand_in
def high_lac(original: Any, self: SimBookie, asked: Any, answer: Any) -> None:
    """Bookies tell a LAC that nobody ever reached."""

    def higher(event: Any) -> None:
        is_lac = isinstance(event, FenceAnswered)
        answer(replace(event, last_add_confirmed=10**6) if is_lac else event)

    original(self, asked, higher)


@stand_in
def fenceless(original: Any, self: SimBookie) -> None:
    """A start finds no fence in the log."""
    if not self.is_up:
        self.log = [record for record in self.log if not isinstance(record, FenceSet)]
        self.synced = len(self.log)
    original(self)


@stand_in
def denied_all(original: Any, self: SimBookie, *args: Any, **more: Any) -> None:
    """A bookie has said of every entry that it is not there."""
    self._denied.add((0, 10**6))
    original(self, *args, **more)


@stand_in
def forgets_in_limbo(original: Any, self: LosingBookie) -> None:
    """A bookie in limbo loses its copies, and takes itself for whole."""
    if self.replica.is_limbo:
        self._held.entries.clear()
    original(self)


def whole_by_word(patch: pytest.MonkeyPatch) -> None:
    wrapped(LosingBookie, "try_to_end_limbo", forgets_in_limbo)(patch)
    patch.setattr(LosingBookie, "_lacking", lambda _self: iter(()))


@stand_in
def until_healed(original: Any, self: Run, *args: Any) -> None:
    """Nobody comes once the world is healed."""
    if not self.world.is_healed:
        original(self, *args)


@stand_in
def swallowed(original: Any, self: Run, count: int) -> None:
    """What is appended once the world is healed reaches nobody."""
    if self.world.is_healed:
        self.payloads += count
    else:
        original(self, count)


@stand_in
def fence_that_fades(original: Any, self: SimBookie, asked: Any, answer: Any) -> None:
    """A recovery read finds the fence in memory, and it is not on the disk any more."""
    if isinstance(asked, SendRead) and asked.fence:
        for index, record in enumerate(self.log):
            if isinstance(record, FenceSet):
                self.log[index] = LacKept(-1, record.ledger_key)
    original(self, asked, answer)


@stand_in
def hung_target(original: Any, self: Run, leaving: str, target: str, part: Any) -> None:
    """Who is to get copies hangs."""
    self.world.hung.add(member_name(target))
    original(self, leaving, target, part)


@stand_in
def spinning(original: Any, self: Run) -> None:
    """Somebody asks again and again at the end."""

    def spin() -> None:
        self.world.messages += 1
        self.world.after(50_000, spin)

    spin()
    original(self)


def all_of_them(_original: Any) -> Any:
    """Recovery waits for the fence of every bookie (BK#1067)."""
    return lambda self, fenced: len(set(fenced)) == self.ensemble_size


@stand_in
def skipping_versions(original: Any, self: Judge, before: Any, after: Any, **more: Any) -> None:
    """A row's version grows by two."""
    later = after and replace(after, version=after.version + (before is not None))
    original(self, before, later, **more)


@stand_in
def all_too_late(
    original: Any, self: Judge, ledger_id: int, first: int, last: int, **_more: bool
) -> None:
    """Whatever is acknowledged was sent to a ledger that was deleted before."""
    original(self, ledger_id, first, last, was_deleted=True)


def never(_original: Any) -> Any:
    return lambda *_args, **_more: False


always = guards.always(True)

MACHINES: Final[dict[str, Damage]] = {
    "closed_covers_acked": row(ends_early),
    "acked_reaches_quorum": wrapped(SimBookie, "_report", silent_disk),
    "acked_keeps_its_row": wrapped(Replica, "_kept_row", guards.always(())),
    "one_payload": wrapped(SimBookie, "peek", guards.always(None)),
    "end_never_moves": row(ends_again),
    "same_bytes": wrapped(Checker, "stored", other_bytes),
    "in_order": reported(a_gap),
    "was_appended": reported(a_phantom),
    "lac_is_bounded": wrapped(SimBookie, "receive", high_lac),
    "fenced_rejects": wrapped(Replica, "_is_fence_in_the_way", never),
    "fence_is_kept": wrapped(SimBookie, "restart", fenceless),
    "covers_before_reading": wrapped(Quorum, "is_covered", always),
    "reads_fence": wrapped(SimBookie, "receive", fence_that_fades),
    "absence_is_proven": wrapped(Tally, "_is_absent", guards.one_negative),
    "negative_sticks": wrapped(SimBookie, "_check_add", denied_all),
    "state_goes_on": row(opens_again),
    "row_is_legal": row(with_twins),
    "borders_stay": row(with_moved_borders),
    "begins_after_acked": reported(a_change_too_late),
    "recovery_changes_at_the_close": wrapped(Recovery, "_change", guards.early_commit),
    "writer_changes_the_last": row(with_another_past),
    "repair_copies_first": row(with_a_stranger),
    "repair_reads_back": wrapped(Checker, "before_step", all_bad),
    "repair_looks_again": wrapped(FragmentRepair, "_second_look", guards.always(())),
    "repair_keeps_who_leaves": wrapped(FragmentRepair, "_give_row", guards.let_go_at_once),
    "limbo_denies_nothing": wrapped(Replica, "_may_say_no", always),
    "limbo_takes_no_adds": wrapped(Replica, "_is_limbo_in_the_way", never),
    "limbo_is_marked": wrapped(Replica, "enter_limbo", guards.unmarked),
    "limbo_ends_whole": whole_by_word,
    "ledger_ends": wrapped(Run, "recover", until_healed),
    "appends_are_acked": wrapped(Run, "append", swallowed),
    "one_hung_blocks_nothing": wrapped(Quorum, "is_covered", all_of_them),
    "copies_come_back": wrapped(Run, "_mend", hung_target),
    "limbo_empties": wrapped(LosingBookie, "try_to_end_limbo", guards.always(None)),
    "comes_to_rest": wrapped(Run, "_read_all", spinning),
}
SERVICES: Final[dict[str, Damage]] = {
    "version_grows_by_one": wrapped(Judge, "changed", skipping_versions),
    "deleted_takes_nothing": wrapped(Judge, "acknowledged", all_too_late),
    "garbage_is_proven": wrapped(Collector, "_disposal", gone_if_unnamed),
    "deleted_is_for_ever": wrapped(Replica, "apply", guards.forgotten_id),
    "end_is_kept": wrapped(RowSpread, "begin", told_without_copies),
}


def test_there_is_a_damage_for_every_check() -> None:
    assert MACHINES.keys() | SERVICES.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", MACHINES)
def test_a_damaged_world_of_machines_is_noticed_by_the_check_of_that_name(
    name: str, spied: Spied, monkeypatch: pytest.MonkeyPatch
) -> None:
    MACHINES[name](monkeypatch)

    assert _broken_by(name, spied, (machines.run_seed(seed).violation for seed in SEEDS))


@pytest.mark.parametrize("name", SERVICES)
def test_damaged_services_are_noticed_by_the_check_of_that_name(
    name: str, spied: Spied, monkeypatch: pytest.MonkeyPatch
) -> None:
    SERVICES[name](monkeypatch)

    assert _broken_by(name, spied, (services.run_seed(seed).violation for seed in DAMAGED_SEEDS))


def _broken_by(name: str, spied: Spied, violations: Iterator[str | None]) -> bool:
    """Whether one of the runs ended with what this very check said."""
    for violation in violations:
        if violation is not None and any(said in violation for said in spied.get(name, ())):
            return True
        spied.clear()
    return False


# --- logs --------------------------------------------------------------------------------------------


def unnamed(self: LogJudge, original: Any, ledger: Any) -> None:
    """What is written is a ledger that no row names."""
    original(self, replace(ledger, row=replace(ledger.row, ledger_id=10**6)))


def open_before(self: LogJudge, original: Any, ledger: Any) -> None:
    """A ledger before the one that is written is open again."""
    for item in self._cluster.logs[self._name].items[:-1]:
        if item.ledger_id != ledger.row.ledger_id:
            before = self._cluster.ledgers[item.ledger_id]
            before.row = replace(before.row, state=State.OPEN, last_entry=None, length=None)
    original(self, ledger)


def open_all(self: LogJudge, original: Any, before: Any, now: Any) -> None:
    """Every ledger of the list is open again."""
    for item in now.items:
        ledger = self._cluster.ledgers[item.ledger_id]
        ledger.row = replace(ledger.row, state=State.OPEN, last_entry=None, length=None)
    original(self, before, now)


def shortened(self: LogJudge, original: Any, item: Any) -> None:
    """A ledger has an entry less than its item says."""
    entries = self._cluster.ledgers[item.ledger_id].entries
    if entries:
        entries.pop()
    original(self, item)


@pytest.mark.parametrize(
    ("method", "damage", "said"),
    [
        ("submitted", unnamed, "I32: ledger 1000000 is written"),
        ("submitted", open_before, "I34: written behind ledger"),
        ("replaced", open_all, "I34: ledgers ["),
        ("sealed_as_it_is", shortened, "I33: ledger"),
    ],
)
def test_a_damaged_log_is_noticed(
    method: str, damage: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LogJudge.__dict__[method]
    monkeypatch.setattr(LogJudge, method, lambda self, *args: damage(self, original, *args))

    assert any(said in (logs.run_seed(seed).violation or "") for seed in LOG_SEEDS)
