"""The explorer tells states apart by `key`: no field may be missing from it without a reason."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, get_type_hints

import pytest

from quorumlog.protocol.ends import LacByCoverage, RowSpread
from quorumlog.protocol.keyed import Keyed, Out, left_out
from quorumlog.protocol.messages import (
    AppendRequested,
    Begin,
    CasStatus,
    FenceAnswered,
    MetadataAnswered,
    RecoverRequested,
    SendFence,
    Status,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.replica import Replica
from quorumlog.protocol.slots import Slots
from quorumlog.protocol.tally import Tally
from quorumlog.protocol.window import PendingRun, Window
from quorumlog.protocol.writer import LedgerWriter
from tests.support.replicas import HeldEntries
from tests.unit.protocol.hands import B1, B2, B3, B4, CODEC, applied, ledger, run_of

CLOSED: Final = ledger(state=State.CLOSED, last_entry=0, length=1)


def appending() -> LedgerWriter:
    writer = LedgerWriter(ledger(), CODEC)
    writer.step(AppendRequested((b"p",)))
    return writer


def reading_forward() -> Recovery:
    recovery = Recovery()
    (marking,) = recovery.step(RecoverRequested(ledger()))
    assert isinstance(marking, UpdateMetadata)
    answer = MetadataAnswered(marking.attempt, CasStatus.OK, applied(marking))
    for fence in recovery.step(answer):
        assert isinstance(fence, SendFence)
        recovery.step(FenceAnswered(fence.position, fence.member, Status.OK))
    return recovery


def reading() -> RangeReader:
    reader = RangeReader(CLOSED, first=0, last=0)
    reader.step(Begin())
    return reader


def copying() -> FragmentRepair:
    repair = FragmentRepair(CLOSED, fragment=0, leaving=B3, target=B4)
    (marking,) = repair.step(Begin())
    assert isinstance(marking, UpdateMetadata)
    repair.step(MetadataAnswered(marking.attempt, CasStatus.OK, applied(marking)))
    return repair


def tallying() -> Tally:
    return Tally(Quorum(3, 3, 2), Fragment(0, (B1, B2, B3)), first=0, last=1)


def waiting() -> Window:
    window = Window(Quorum(3, 3, 2), last_confirmed=-1, length=0)
    window.push(run_of(b"p"), usable=7, tick=1)
    return window


def pending() -> PendingRun:
    return next(iter(waiting().runs.values()))


def slots() -> Slots:
    slots = Slots()
    slots.begin(ledger(), last_confirmed=-1)
    return slots


def spreading() -> RowSpread:
    return RowSpread(CLOSED)


def confirming() -> LacByCoverage:
    return LacByCoverage(CLOSED)


def replica() -> Replica:
    return Replica(B1, HeldEntries())


MADE: Final[tuple[Callable[[], Keyed], ...]] = (
    appending,
    reading_forward,
    reading,
    copying,
    tallying,
    waiting,
    pending,
    slots,
    spreading,
    confirming,
    replica,
    HeldEntries,
)
FIELDS: Final = [(make, one.name) for make in MADE for one in fields(type(make()))]  # type: ignore[arg-type]


def change(machine: Any, name: str) -> None:
    """Give a field another value: in place where it is a list or a dictionary."""
    value = getattr(machine, name)
    if isinstance(value, list):
        value.append("other")
    elif isinstance(value, dict) and value:
        value.popitem()
    elif isinstance(value, dict):
        value["other"] = "other"
    elif isinstance(value, Keyed):
        change(value, fields(value)[0].name)  # type: ignore[arg-type]
    else:
        setattr(machine, name, HeldEntries() if value is None else "other")


@pytest.mark.parametrize(("make", "name"), FIELDS)
def test_a_changed_field_changes_the_key_or_says_why(make: Callable[[], Keyed], name: str) -> None:
    machine = make()
    before, twin = machine.key(), machine.copy()
    reason = left_out(get_type_hints(type(machine), include_extras=True)[name])

    change(machine, name)

    assert (machine.key() == before) == (reason is not None)
    assert reason is None or len(reason) > 10, "a reason"
    assert twin.key() == before == make().key(), "a copy is independent"


@pytest.mark.parametrize("make", MADE)
def test_a_copy_has_the_same_key_and_changes_by_itself(make: Callable[[], Keyed]) -> None:
    machine = make()
    before = machine.key()

    for one in fields(type(machine)):  # type: ignore[arg-type]
        twin = machine.copy()
        assert twin.key() == before
        change(twin, one.name)

    assert machine.key() == before


def test_every_keyed_class_of_the_protocol_is_tried_here() -> None:
    there = {(cls.__module__, cls.__name__) for cls in Keyed.__subclasses__()}
    mine = {(type(make()).__module__, type(make()).__name__) for make in MADE}

    assert {cls for cls in there if cls[0].startswith("quorumlog.")} <= mine


@dataclass(slots=True, eq=False)
class Odd(Keyed):
    number: int
    found: set[int]


@dataclass(slots=True, eq=False)
class Noted(Keyed):
    number: int
    note: Annotated[list[str], Out("told to people only")]


def test_a_field_that_cannot_be_copied_by_its_type_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        Odd(1, {2}).key()


def test_a_field_that_is_left_out_is_copied_all_the_same() -> None:
    noted = Noted(1, ["a"])
    twin = noted.copy()
    twin.note.append("b")

    assert noted.key() == twin.key()
    assert noted.note == ["a"]
