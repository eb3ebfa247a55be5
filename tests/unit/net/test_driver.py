"""The driver: a machine's serial executor."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quorumlog.errors import CopyLost, StaleMember
from quorumlog.net.driver import Driver, Reported
from quorumlog.net.ports import MachineTimes, Ports, ReadDone
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    BookiesFound,
    CasStatus,
    CloseRequested,
    Confirmed,
    Effect,
    Event,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    ReadAnswered,
    ReadMetadata,
    SendAdd,
    SendFence,
    SendRead,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Run
from tests.support.waiting import until
from tests.unit.net.test_bookie_client import run_of

ROW = LedgerMetadata(1, Quorum(1, 1, 1), DigestKind.CRC32C, (Fragment(0, ("b@1",)),))


class World:
    """Ports that answer as soon as they may."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.updates: list[tuple[int, str]] = []
        self.broken = False
        self.is_behind = False
        self.stale: StaleMember | None = None
        self.refreshes = 0
        self.breaks_lists = False

    def add(
        self, _m: str, _k: bytes, _run: Run, done: Callable[[Status], None], **_flags: bool
    ) -> None:
        self.loop.call_soon(done, Status.OK)

    def fence(self, _m: str, _l: int, _k: bytes, done: Callable[[Status, int], None]) -> None:
        self.loop.call_soon(done, Status.OK, 5)

    def read_lac(self, _m: str, _l: int, done: Callable[[Status, int], None]) -> None:
        self.loop.call_soon(done, Status.OK, 5)

    def keep_row(
        self, _m: str, _k: bytes, _row: LedgerMetadata, done: Callable[[Status], None]
    ) -> None:
        self.loop.call_soon(done, Status.OK)

    def read(self, _m: str, _l: int, _first: int, _last: int, done: ReadDone, **_how: Any) -> None:
        self.loop.call_soon(done, Status.OK, run_of(0), ((1, 1),))

    def candidates(self, ensemble: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted({"a@1", "b@1", "c@1"} - set(ensemble) - set(exclude)))

    def is_down(self, _member: str) -> bool:
        return False

    async def refresh(self) -> None:
        self.refreshes += 1
        if self.breaks_lists:
            raise RuntimeError("a defect of the list")

    async def read_row(self, _ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        if self.broken:
            raise RuntimeError("a defect of the client")
        return CasStatus.OK, ROW


class Rows:
    """The metadata port."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        return await self.world.read_row(ledger_id)

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        assert missed == ()
        if self.world.is_behind:
            raise CopyLost("b3 holds a copy")
        if self.world.stale is not None:
            raise self.world.stale
        self.world.updates.append((metadata.version, attempt))
        return CasStatus.OK, metadata


class Script:
    """A machine that answers its nth event with the nth list of effects."""

    def __init__(self, *effects: list[Effect]) -> None:
        self.effects = list(effects)
        self.heard: list[Event] = []
        self.is_inside = False

    def step(self, event: Event) -> list[Effect]:
        assert not self.is_inside
        self.is_inside = True
        self.heard.append(event)
        effects = self.effects.pop(0) if self.effects else []
        self.is_inside = False
        return effects


def ports_of(world: Any) -> Ports:
    times = MachineTimes(hedge_s=0.01, retry_s=0.01)
    return Ports(world, Rows(world), world, Timers(world.loop), Tasks(), times)


def drive(machine: Any, world: World, reported: list[Reported]) -> Driver:
    return Driver(machine, 1, ports_of(world), reported.append)


async def test_each_request_effect_is_answered_once_as_it_was_asked() -> None:
    world, reported = World(), list[Reported]()
    run = run_of(0)
    machine = Script(
        [
            SendAdd(2, "b@1", 7, run, b"k" * 32),
            SendFence(0, "a@1", 1, b"k" * 32),
            SendRead(1, "c@1", 1, 0, 1),
            FindBookies(3, ("a@1",), ()),
            ReadMetadata(4),
            UpdateMetadata(5, ROW),
            StartTimer(Timer.HEDGE, 9),
            Confirmed(0, 0),
        ]
    )
    driver = drive(machine, world, reported)

    driver.post(AppendRequested((b"x",)))
    await until(lambda: len(machine.heard) >= 8, "all are answered")

    assert set(machine.heard[1:]) == {
        AddAnswered(2, "b@1", 7, 0, 0, Status.OK),
        FenceAnswered(0, "a@1", Status.OK, 5),
        ReadAnswered(1, "c@1", 0, 1, Status.OK, run, ((1, 1),)),
        BookiesFound(3, ("b@1", "c@1")),
        MetadataAnswered(4, CasStatus.OK, ROW),
        MetadataAnswered(5, CasStatus.OK, ROW),
        TimerFired(Timer.HEDGE, 9),
    }
    assert len(machine.heard) == 8
    assert reported == [Confirmed(0, 0)]


async def test_an_event_that_comes_while_the_machine_steps_waits_for_its_turn() -> None:
    world = World()
    machine = Script([Confirmed(0, 0), Confirmed(1, 1)], [Confirmed(2, 2)])
    seen: list[Reported] = []

    def notify(reported: Reported) -> None:
        seen.append(reported)
        if reported == Confirmed(0, 0):
            driver.post(CloseRequested())

    driver = Driver(machine, 1, ports_of(world), notify)
    driver.post(AppendRequested((b"x",)))

    assert seen == [Confirmed(0, 0), Confirmed(1, 1), Confirmed(2, 2)]
    assert machine.heard == [AppendRequested((b"x",)), CloseRequested()]


async def test_a_machine_that_breaks_ends_with_an_unknown_outcome() -> None:
    class Broken:
        def step(self, event: Event) -> list[Effect]:
            raise AssertionError(event)

    reported: list[Reported] = []
    driver = drive(Broken(), World(), reported)

    driver.post(CloseRequested())
    driver.post(CloseRequested())

    assert [type(one) for one in reported] == [Failed]


async def test_after_stop_nothing_is_heard_or_told() -> None:
    world, reported = World(), list[Reported]()
    machine = Script([SendFence(0, "a@1", 1, b""), StartTimer(Timer.HEDGE)])
    driver = drive(machine, world, reported)
    driver.post(CloseRequested())

    driver.stop()
    fired: asyncio.Future[None] = world.loop.create_future()
    Timers(world.loop).after(0.05, fired.set_result, None)
    await fired

    assert machine.heard == [CloseRequested()]
    assert reported == []


async def test_a_row_that_cannot_be_read_is_unknown() -> None:
    world = World()
    world.broken = True
    machine = Script([ReadMetadata(1)])
    driver = drive(machine, world, [])

    driver.post(CloseRequested())
    await until(lambda: len(machine.heard) == 2, "the answer")

    assert machine.heard[1] == MetadataAnswered(1, CasStatus.UNKNOWN)


async def test_a_change_by_an_older_row_than_a_bookie_holds_ends_the_machine() -> None:
    """Rule 18d: whoever went on would cut off entries. No attempt is made again."""
    world, reported = World(), list[Reported]()
    world.is_behind = True
    machine = Script([UpdateMetadata(1, ROW)])
    driver = drive(machine, world, reported)

    driver.post(CloseRequested())
    await until(lambda: driver.is_stopped, "the machine ends")

    assert reported == [Failed("copy-lost", detail="b3 holds a copy")]
    assert machine.heard == [CloseRequested()]


@pytest.mark.parametrize("is_final", [True, False])
async def test_a_change_that_adds_a_stale_member_is_chosen_again(is_final: bool) -> None:
    """Rule 15b: a change that may become legal later is not settled, and may still be made (rule 6)."""
    world = World()
    world.stale = StaleMember("b@1 is not registered", is_final=is_final)
    machine = Script([UpdateMetadata(1, ROW)])
    driver = drive(machine, world, [])

    driver.post(CloseRequested())
    await until(lambda: len(machine.heard) == 2, "the answer")

    answer = machine.heard[1]
    refused = MetadataAnswered(1, CasStatus.CONFLICT, ROW)
    assert answer == (refused if is_final else MetadataAnswered(1, CasStatus.UNKNOWN))
    assert refused.refuses(UpdateMetadata(1, ROW))
    assert world.refreshes == 1


async def test_a_list_that_breaks_leaves_the_change_unsettled() -> None:
    """The machine hears an answer whatever fails: without one it would wait for ever."""
    world = World()
    world.stale, world.breaks_lists = StaleMember("b@1 is not registered", is_final=True), True
    machine = Script([UpdateMetadata(1, ROW)])
    driver = drive(machine, world, [])

    driver.post(CloseRequested())
    await until(lambda: len(machine.heard) == 2, "the answer")

    assert machine.heard[1] == MetadataAnswered(1, CasStatus.UNKNOWN)


async def test_the_same_attempt_again_is_the_same_change_to_the_store() -> None:
    world = World()
    machine = Script([UpdateMetadata(1, ROW)], [UpdateMetadata(1, ROW)], [UpdateMetadata(2, ROW)])
    driver = drive(machine, world, [])

    driver.post(CloseRequested())
    await until(lambda: len(machine.heard) == 4, "three answers")

    tokens = [token for _, token in world.updates]
    assert tokens[0] == tokens[1] != tokens[2]
