"""Rule 18b at the sender: the copy of a row rides on adds until the bookie acknowledged one that brought it."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from quorumlog.net import bookie_client
from quorumlog.net.bookie_client import BookieClient
from quorumlog.protocol.access_key import sealed
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowCopy, name_of
from quorumlog.wire import row_copies
from quorumlog.wire.frames import Message, Request
from tests.support.framed import Line
from tests.support.waiting import until, within
from tests.unit.net.peer import ok, peer, well
from tests.unit.net.test_bookie_client import KEY, MEMBER, PATIENT, client, run_of

ROW = LedgerMetadata(
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
CHANGED = replace(ROW, version=2, attempt="00000000-0000-4000-8000-000000000002")


async def add(bookies: BookieClient, row: LedgerMetadata | None = ROW, first: int = 0) -> Status:
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

    assert bookie.seen[0].row == RowCopy(name_of(ROW), row_copies.encode(ROW))
    assert bookie.seen[1].row is None
    assert [request.named_by for request in bookie.seen] == [name_of(ROW)] * 2


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
        for row in (ROW, CHANGED, CHANGED, replace(ROW, ledger_id=2)):
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


async def keep(bookies: BookieClient, row: LedgerMetadata = ROW) -> Status:
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


async def test_a_closed_ledger_takes_no_room_among_the_remembered_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bookie_client, "_COPIES_MAX", 1)
    async with peer() as bookie, client(bookie.url) as bookies:
        await add(bookies)
        await keep(bookies, replace(ROW, ledger_id=2).closed(last_entry=-1, length=0))
        await add(bookies)

    assert brought(bookie.seen) == [True, True, False]


async def test_a_copy_is_sent_without_an_add() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        status = await keep(bookies)

    assert status is Status.OK
    assert bookie.seen[0].row == RowCopy(name_of(ROW), row_copies.encode(ROW))
    assert bookie.seen[0].ledger_key == KEY


async def test_a_ledger_beyond_the_remembered_ones_brings_its_copy_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bookie_client, "_COPIES_MAX", 1)
    async with peer() as bookie, client(bookie.url) as bookies:
        for ledger_id in (1, 2, 1, 1):
            await add(bookies, replace(ROW, ledger_id=ledger_id))

    assert brought(bookie.seen) == [True, True, True, False]


def test_a_copy_holds_all_of_a_row_but_its_secrets() -> None:
    copy = row_copies.encode(ROW)
    reported = row_copies.decode(copy)

    known = sealed(b"s" * 16, hashlib.sha256(ROW.access_key).digest())
    assert reported == replace(ROW, ledger_key=b"", mac_key=b"", access_key=known)
    for secret in (ROW.ledger_key, ROW.mac_key, ROW.access_key):
        assert secret not in copy
