"""Copies of rows: which members are sent one, and which add brings it (rule 18b)."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from quorumlog.net import bookie_client
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.driver import spread
from quorumlog.net.ports import AddDone, MachineTimes, Ports
from quorumlog.protocol.access_key import sealed
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Repair, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowCopy, name_of
from quorumlog.wire import row_copies
from quorumlog.wire.frames import Message, Request
from tests.support.framed import Line
from tests.support.waiting import until, within
from tests.unit.net.peer import ok, peer, well
from tests.unit.net.test_bookie_client import KEY, MEMBER, PATIENT, client, run_of

OPEN = LedgerMetadata(
    7,
    Quorum(3, 3, 2),
    DigestKind.CRC32C,
    (Fragment(0, ("a@1", "b@1", "c@1")), Fragment(5, ("a@1", "b@1", "d@1"))),
    ledger_key=b"k" * 32,
)
ROW = replace(OPEN.closed(last_entry=9, length=10), version=3)


class World:
    """Bookies that answer when the test says so, and its clock."""

    def __init__(self, *down: str) -> None:
        self.down = down
        self.asked: dict[str, AddDone] = {}
        self.rows: list[tuple[bytes, LedgerMetadata]] = []
        self.timers: list[tuple[float, Callable[..., None]]] = []
        self.broken = ""
        self.others: tuple[str, ...] = ()

    def _break(self, name: str) -> None:
        if name == self.broken:
            raise RuntimeError("a defect of a port")

    def candidates(self, _ensemble: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(other for other in self.others if other not in exclude)

    def is_down(self, member: str) -> bool:
        self._break("is_down")
        return member in self.down

    def keep_row(self, member: str, key: bytes, row: LedgerMetadata, done: AddDone) -> None:
        self._break("keep_row")
        self.asked[member] = done
        self.rows.append((key, row))

    def after(self, delay_s: float, call: Callable[..., None]) -> None:
        self._break("after")
        self.timers.append((delay_s, call))

    def spread(self, row: LedgerMetadata = ROW) -> asyncio.Future[int]:
        world = cast("Any", self)
        return spread(row, Ports(world, world, world, world, world, MachineTimes(add_s=2.0)))


async def test_each_member_of_each_fragment_and_each_target_of_a_repair_is_sent_a_copy() -> None:
    world, row = World(), ROW.with_repair(Repair(0, "c@1", "e@1"))

    _ = world.spread(row)

    assert sorted(world.asked) == ["a@1", "b@1", "c@1", "d@1", "e@1"]
    assert world.rows == [(ROW.ledger_key, row)] * 5


async def test_it_ends_with_as_many_copies_as_an_entry_needs() -> None:
    world = World()
    end = world.spread()

    world.asked["a@1"](Status.OK)
    world.asked["c@1"](Status.OK)  # of an earlier fragment
    assert not end.done()
    world.asked["d@1"](Status.OK)

    assert end.result() == 3


async def test_each_write_set_of_a_striped_ledger_has_an_ack_quorum_with_a_copy() -> None:
    world = World()
    members = tuple(f"b{n}@1" for n in range(5))
    row = replace(ROW, quorum=Quorum(5, 3, 2), fragments=(Fragment(0, members),))
    end = world.spread(row)

    for member in members[:3]:
        world.asked[member](Status.OK)
    assert not end.done()
    world.asked[members[3]](Status.OK)

    assert end.done()


async def test_it_ends_where_all_who_are_waited_for_have_answered() -> None:
    world = World()
    end = world.spread()

    world.asked["a@1"](Status.OK)
    world.asked["b@1"](Status.UNKNOWN)
    assert not end.done()
    world.asked["d@1"](Status.WRONG_KEY)

    assert end.result() == 1, "it tells how many keep a copy"


async def test_a_member_that_is_known_to_be_down_is_sent_a_copy_and_not_waited_for() -> None:
    world = World("b@1", "d@1")
    end = world.spread()
    assert sorted(world.asked) == ["a@1", "b@1", "c@1", "d@1"]

    world.asked["a@1"](Status.OK)

    assert end.done()


async def test_nobody_waits_where_all_are_down() -> None:
    world = World("a@1", "b@1", "d@1")

    assert world.spread().done()
    assert len(world.asked) == 4


async def test_it_ends_with_the_deadline_of_an_add_and_later_answers_change_nothing() -> None:
    world = World()
    end = world.spread()
    ((delay_s, fire),) = world.timers
    assert delay_s == 2.0

    fire()
    assert end.done()

    for done in world.asked.values():
        done(Status.OK)


def answer(world: World, **statuses: Status) -> None:
    for name, status in statuses.items():
        world.asked[f"{name}@1"](status)


async def test_others_keep_an_end_that_too_few_members_keep() -> None:
    world = World("d@1")
    world.others = ("a@1", "x@1", "y@1")
    end = world.spread()

    answer(world, a=Status.OK)
    assert "x@1" not in world.asked
    answer(world, b=Status.UNKNOWN)
    assert "y@1" not in world.asked, "an ack quorum of copies is enough"
    assert not end.done()
    answer(world, x=Status.OK)

    assert end.done()


async def test_others_are_asked_after_the_deadline_once_and_no_longer_than_members() -> None:
    world = World()
    world.others = ("x@1", "y@1", "z@1")
    end = world.spread()

    world.timers[0][1]()
    assert not end.done()
    assert {"x@1", "y@1"} <= world.asked.keys()
    answer(world, x=Status.UNKNOWN)
    world.timers[1][1]()

    assert end.done()
    assert "z@1" not in world.asked
    assert len(world.timers) == 2


async def test_the_deadline_of_the_members_is_none_of_the_others() -> None:
    """Members that answer with errors just before their deadline leave the others as long as any."""
    world = World()
    world.others = ("x@1", "y@1")
    end = world.spread()
    answer(world, a=Status.UNKNOWN, b=Status.UNKNOWN, d=Status.UNKNOWN)

    world.timers[0][1]()
    answer(world, x=Status.OK)
    assert not end.done()
    answer(world, y=Status.OK)

    assert end.done()


async def test_nobody_else_is_asked_to_keep_the_row_of_an_open_ledger() -> None:
    world = World("a@1", "b@1", "d@1")
    world.others = ("x@1", "y@1")

    assert world.spread(OPEN).done()
    assert "x@1" not in world.asked


async def test_a_waiter_that_gave_up_is_no_defect() -> None:
    world = World()
    end = world.spread()
    end.cancel()

    for done in world.asked.values():
        done(Status.OK)
    for _, fire in world.timers:
        fire()

    assert end.cancelled()


@pytest.mark.parametrize("broken", ["keep_row", "after", "is_down"])
async def test_a_broken_port_ends_it_loudly(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.broken = broken

    with caplog.at_level(logging.ERROR):
        end = world.spread()

    assert end.done()
    assert end.exception() is None
    assert [record.message for record in caplog.records] == ["row-spread-broke"]


async def test_a_row_that_is_open_is_spread_like_a_closed_one() -> None:
    world = World()
    row = replace(OPEN, fragments=OPEN.fragments[:1])
    assert row.state is State.OPEN
    end = world.spread(row)

    for done in world.asked.values():
        done(Status.OK)

    assert end.done()
    assert sorted(world.asked) == ["a@1", "b@1", "c@1"]


OPEN_ROW = LedgerMetadata(
    1,
    Quorum(1, 1, 1),
    DigestKind.HMAC_SHA256,
    (Fragment(0, (MEMBER,)),),
    attempt="00000000-0000-4000-8000-000000000001",
    ledger_key=KEY,
    mac_key=b"m" * 32,
    access_key=b"s" * 16 + b"a" * 32,
    custom=(("topic", "prices"),),
    log="orders",
)
CHANGED = replace(OPEN_ROW, version=2, attempt="00000000-0000-4000-8000-000000000002")


async def add(
    bookies: BookieClient, row: LedgerMetadata | None = OPEN_ROW, first: int = 0
) -> Status:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    run = run_of(first, 1 if row is None else row.ledger_id)
    bookies.add(MEMBER, KEY, run, answered.set_result, recovery=row is None, row=row)
    async with within("it is answered"):
        return await answered


async def refusing(request: Request, _line: Line) -> Message:
    """Keep nothing."""
    return ok(request, Status.UNKNOWN)


def brought(requests: list[Request]) -> list[bool]:
    """Whether each of these adds brought a copy."""
    return [request.row is not None for request in requests]


async def test_a_copy_comes_with_the_first_add_and_names_its_row() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        assert await add(bookies) is Status.OK
        assert await add(bookies, first=1) is Status.OK

    assert bookie.seen[0].row == RowCopy(name_of(OPEN_ROW), row_copies.encode(OPEN_ROW))
    assert bookie.seen[1].row is None
    assert [request.named_by for request in bookie.seen] == [name_of(OPEN_ROW)] * 2


async def test_adds_before_the_first_answer_bring_the_copy_too() -> None:
    async def late(request: Request, line: Line) -> None:
        if request.first == 2:
            for one in bookie.seen:
                line.send(ok(one))

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = late

        await asyncio.gather(*[add(bookies, first=first) for first in range(3)])

    assert brought(bookie.seen) == [True] * 3


async def test_another_row_is_brought_anew() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        for row in (OPEN_ROW, CHANGED, CHANGED, replace(OPEN_ROW, ledger_id=2)):
            await add(bookies, row)

    assert brought(bookie.seen) == [True, True, False, True]


async def test_a_refusal_brings_the_copy_again() -> None:
    async def refuses(request: Request, _line: Line) -> Message:
        return ok(request, Status.UNKNOWN if len(bookie.seen) == 2 else Status.OK)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = refuses
        for _ in range(4):
            await add(bookies)

    assert brought(bookie.seen) == [True, False, True, False]


async def test_a_new_connection_brings_the_copy_again() -> None:
    async def cuts(request: Request, _line: Line) -> Message | None:
        if len(bookie.seen) == 2:
            bookie.behave = well
            await bookie.cut()
        return ok(request)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = cuts
        await add(bookies)
        await add(bookies)

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected again")

    assert bookie.connections == 2
    assert brought(bookie.seen)[:3] == [True, False, True]


async def test_an_add_that_finds_no_connection_brings_the_copy() -> None:
    """The bookie may have returned with an empty disk, and a refusal costs the writer a second."""
    at_once = replace(PATIENT, backoff_max_s=0.0)
    async with peer() as bookie, client(bookie.url, at_once) as bookies:
        await add(bookies)
        await bookie.cut()
        await until(lambda: not any(bookies.channels().values()), "the break is noticed")

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected again")

    assert brought(bookie.seen)[:2] == [True, True]


async def test_a_recovery_add_names_no_row() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        await add(bookies, None)

    assert bookie.seen[0].named_by is None
    assert bookie.seen[0].row is None


async def keep(bookies: BookieClient, row: LedgerMetadata = OPEN_ROW) -> Status:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookies.keep_row(MEMBER, KEY, row, answered.set_result)
    async with within("it is answered"):
        return await answered


async def test_an_add_behind_a_copy_that_is_kept_brings_none() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        await keep(bookies)
        await add(bookies)

    assert brought(bookie.seen) == [True, False]


async def test_an_add_behind_a_copy_that_was_refused_brings_one() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = refusing
        assert await keep(bookies) is Status.UNKNOWN
        bookie.behave = well
        await add(bookies)

    assert brought(bookie.seen) == [True, True]


async def test_a_closed_ledger_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie_client, "_COPIES_MAX", 1)
    async with peer() as bookie, client(bookie.url) as bookies:
        await add(bookies)
        await keep(bookies, replace(OPEN_ROW, ledger_id=2).closed(last_entry=-1, length=0))
        await add(bookies)

    assert brought(bookie.seen) == [True, True, False]


async def test_a_copy_is_sent_without_an_add() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        status = await keep(bookies)

    assert status is Status.OK
    assert bookie.seen[0].row == RowCopy(name_of(OPEN_ROW), row_copies.encode(OPEN_ROW))
    assert bookie.seen[0].ledger_key == KEY


async def test_a_forgotten_ledger_brings_its_copy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie_client, "_COPIES_MAX", 1)
    async with peer() as bookie, client(bookie.url) as bookies:
        for ledger_id in (1, 2, 1, 1):
            await add(bookies, replace(OPEN_ROW, ledger_id=ledger_id))

    assert brought(bookie.seen) == [True, True, True, False]


def test_a_copy_holds_all_of_a_row_but_its_secrets() -> None:
    copy = row_copies.encode(OPEN_ROW)
    reported = row_copies.decode(copy)

    known = sealed(b"s" * 16, hashlib.sha256(OPEN_ROW.access_key).digest())
    assert reported == replace(OPEN_ROW, ledger_key=b"", mac_key=b"", access_key=known)
    for secret in (OPEN_ROW.ledger_key, OPEN_ROW.mac_key, OPEN_ROW.access_key):
        assert secret not in copy
