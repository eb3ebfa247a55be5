"""The driver of a log's machines: what becomes of appends that the ledger's handle does not take."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from quorumlog.errors import Overloaded, QuorumLogError
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    Ask,
    EntriesDurable,
    Event,
    ReadLog,
    Retired,
    Stopped,
    Submit,
    SubmitFailed,
    SubmitRefused,
)
from services.gateway.interface import EntriesAppended
from services.gateway.logs.driver import Broke, LogDriver, LogOutcome, LogPorts
from services.gateway.logs.offsets import OffsetIndex
from tests.support.waiting import turns


class ScriptedMachine:
    """Submits some entries at its first event, and remembers what it hears."""

    def __init__(self, *effects: Any) -> None:
        self.effects = list(effects)
        self.heard: list[Event] = []

    def step(self, event: Event, _now: Now) -> list[Any]:
        self.heard.append(event)
        effects, self.effects = self.effects, []
        return effects


class BoundedEngine:
    """Takes so many bytes."""

    def __init__(self, room: int, error: QuorumLogError | None = None) -> None:
        self.room = room
        self.error = error or Overloaded()
        self.taken: list[tuple[int, int]] = []
        self.futures: list[asyncio.Future[EntriesAppended]] = []

    @property
    def handles(self) -> "BoundedEngine":
        return self

    def get(self, _ledger_id: int) -> "BoundedEngine":
        return self

    def append(self, payloads: Sequence[bytes], expect: int) -> asyncio.Future[EntriesAppended]:
        size = sum(map(len, payloads))
        if size > self.room:
            raise self.error
        self.room -= size
        self.taken.append((expect, len(payloads)))
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]


def driver(
    machine: ScriptedMachine,
    engine: BoundedEngine,
    store: Any = None,
    notify: Callable[[LogOutcome], None] = lambda _reported: None,
) -> LogDriver:
    ports = LogPorts(
        cast(Any, engine),
        store,
        cast(Any, None),
        cast(Any, None),
        lambda: Now(0, 0),
        OffsetIndex(),
        asyncio.create_task,
        jitter_s=0.0,
        probe_every_s=1.0,
    )
    return LogDriver(cast(Any, machine), "log", ports, notify)


@pytest.mark.parametrize(
    ("one_by_one", "taken", "refused"), [(True, [(4, 1), (5, 1)], (6, 1)), (False, [], (4, 3))]
)
async def test_the_machine_hears_what_a_ledger_refused(
    *, one_by_one: bool, taken: list[tuple[int, int]], refused: tuple[int, int]
) -> None:
    payloads, error = (b"aa", b"bb", b"cc"), Overloaded()
    machine = ScriptedMachine(Submit(1, 4, payloads, number=7, one_by_one=one_by_one))
    engine = BoundedEngine(room=5, error=error)

    driver(machine, engine).post(Retired())

    assert engine.taken == taken
    assert machine.heard[1:] == [SubmitRefused(1, *refused, error, number=7)]


async def test_large_submissions_are_cut_in_order() -> None:
    half = b"x" * (600 << 10)
    machine, engine = (
        ScriptedMachine(Submit(1, 0, (half, half, b"y", half))),
        BoundedEngine(room=1 << 30),
    )

    driver(machine, engine).post(Retired())

    assert engine.taken == [(0, 1), (1, 2), (3, 1)]


@pytest.mark.parametrize("first", [0, 7])
async def test_an_acknowledgement_of_another_entry_is_none(first: int) -> None:
    machine, engine = ScriptedMachine(Submit(1, 0, (b"a", b"b"))), BoundedEngine(room=9)
    driver(machine, engine).post(Retired())

    engine.futures[0].set_result(EntriesAppended(first, first + 1, first + 1))
    await turns(20)

    heard = machine.heard[-1]
    if first == 0:
        assert heard == EntriesDurable(1, 1)
    else:
        assert isinstance(heard, SubmitFailed)


async def test_a_question_that_is_cut_off_tells_the_machine_that_the_process_ends() -> None:
    asked = asyncio.Event()

    class Store:
        async def get(self, _name: str) -> Any:
            asked.set()
            await asyncio.Event().wait()

    machine = ScriptedMachine(Ask(1, ReadLog("log")))
    driver(machine, BoundedEngine(room=0), Store()).post(Retired())
    await asked.wait()
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert machine.heard[-1] == Stopped()


async def test_a_question_that_is_cut_off_before_its_first_step_is_told_too() -> None:
    machine = ScriptedMachine(Ask(1, ReadLog("log")))
    driver(machine, BoundedEngine(room=0)).post(Retired())
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert machine.heard[-1] == Stopped()


async def test_a_machine_that_breaks_twice_hears_nothing_more_and_its_owner_is_told() -> None:
    class Broken(ScriptedMachine):
        def step(self, event: Event, _now: Now) -> list[Any]:
            self.heard.append(event)
            raise RuntimeError("unforeseen")

    machine, reported = Broken(), list[LogOutcome]()
    broken = driver(machine, BoundedEngine(room=0), notify=reported.append)

    broken.post(Retired())
    broken.post(Retired())

    assert machine.heard == [Retired(), Stopped()]
    assert [type(one) for one in reported] == [Broke]
