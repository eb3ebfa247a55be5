"""Members are registered incarnations, and a new directory gets an incarnation that nobody had (rule 15b)."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from loadtest.stores import Stores
from quorumlog.errors import DatabaseWentBack, IncarnationUsed, StaleMember
from quorumlog.net.metadata_client import RepairClient
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, Repair
from quorumlog.wire.bodies import STAND_IN, Cookie
from quorumlog.wire.repair_bodies import RepairAdd
from services.bookie.cookie import identity_of, read_cookie, write_cookie
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import DRAFT, WAITING, Service, serving, swapped
from tests.unit.metadata.test_rebuild import (
    Bookies,
    bookies,
    keep,
    lose_database,
    rebuild,
    until_all_ready,
    until_ready,
    until_replayed,
)

__all__ = ["bookies"]

OTHERS = ("b1@1", "b2@1")


async def register(service: Service, name: str, incarnation: int = 1) -> None:
    """A new directory registers."""
    row = await service.client.cookie(name)
    cookie = Cookie(
        incarnation=incarnation,
        cluster_id=await service.client.cluster_id(),
        instance=str(uuid4()),
    )
    await service.client.put_cookie(name, cookie, version=None if row is None else row.version)


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    """Three bookies are registered; b3 was wiped once."""
    async with serving(stores, are_imagined=False) as running:
        await register_all(running)
        yield running


async def register_all(service: Service) -> None:
    for name in ("b1", "b2", "b3", "b4"):
        await register(service, name)
    await register(service, "b3", 2)


def draft(*members: str) -> LedgerMetadata:
    return replace(DRAFT, fragments=(Fragment(0, members),))


@pytest.mark.parametrize(
    ("stale", "is_final"), [("b3@1", True), ("b3@42", False), ("b77@9", False)]
)
async def test_no_change_adds_a_member_that_no_registered_bookie_stands_for(
    service: Service, stale: str, is_final: bool
) -> None:
    client = service.client
    row = await client.create(draft(*OTHERS, "b4@1"))
    target = replace(row, repairs=(Repair(0, "b4@1", stale),))

    for change in (
        client.create(draft(*OTHERS, stale)),
        client.cas(row.with_ensemble(0, (*OTHERS, stale))),
        client.cas(row.with_ensemble(5, (*OTHERS, stale))),
        client.cas(target.closed(last_entry=3, length=4)),
    ):
        with pytest.raises(StaleMember) as refused:
            await change
        present = {"b3": 2} if stale.startswith("b3") else {"b77": None}
        assert (refused.value.members["present"], refused.value.status) == (present, 409)
        assert refused.value.members["is_final"] is is_final

    assert await client.get(row.ledger_id) == row
    assert (await client.create(draft(*OTHERS, "b3@2"))).ledger_id == row.ledger_id + 1


async def test_a_member_of_an_earlier_fragment_is_added_while_registered(service: Service) -> None:
    client = service.client
    row = await client.create(draft(*OTHERS, "b4@1"))
    moved = await swapped(client, row.with_ensemble(5, (*OTHERS, "b3@2")))
    await register(service, "b4", 2)

    with pytest.raises(StaleMember):
        await client.cas(moved.with_ensemble(9, (*OTHERS, "b4@1")))
    _, ended = await client.cas(moved.closed(last_entry=7, length=9))

    assert ended is not None, "what a row names already is no business of a close"


async def test_a_new_directory_is_no_named_incarnation(stores: Stores, service: Service) -> None:
    client = service.client
    row = await client.create(draft(*OTHERS, "b4@1"))
    async with connected(stores) as connection:
        await connection.execute("DELETE FROM cookies WHERE name = 'b4'")
        for named, rename in (
            (1, None),
            (4, "UPDATE ledger_members SET incarnation = 4 WHERE name = 'b4'"),
            (7, None),
        ):
            if rename is not None:
                await connection.execute(rename)
            if named == 7:
                item = RepairAdd(ledger_id=row.ledger_id, member="b4@7", ranges=((0, 1),))
                await RepairClient(client, "b4").add([item])
            for wrong in (0, named):
                with pytest.raises(IncarnationUsed) as refused:
                    await register(service, "b4", wrong)
                assert refused.value.members["named"] == named

    await register(service, "b4", 8)


async def test_a_registration_waits_for_changes_naming_it(stores: Stores, service: Service) -> None:
    """So the first look of a new incarnation sees each row that names an older one."""
    async with connected(stores) as connection:
        async with connection.transaction():
            await connection.execute("SELECT * FROM hold_incarnations(ARRAY['b4@1', 'b1@1'])")
            registering = asyncio.create_task(register(service, "b4", 2))

            async def waits() -> bool:
                return bool(await connection.fetchval(WAITING))

            await until(waits, "the registration waits")
            assert (await service.client.create(draft(*OTHERS, "b3@2"))).version == 1
        await registering


# --- whole bookies: disk and database are lost together -----------------------------------------


async def refused(bookies: Bookies, service: Service) -> str:
    """What b3 says when it starts with an empty directory and without a permission."""
    bookies.may_end = True
    async with bookies.running(service, ("b3",)):
        await until(lambda: bool(bookies.ended), "b3 refuses to start")
    bookies.may_end = False
    return bookies.ended[0]


async def comes_back_as(bookies: Bookies, service: Service) -> str:
    """The member that b3 becomes with an operator's permission, once it serves."""
    async with bookies.running(service, ("b3",), AUTO_FIX_COOKIES="1") as found:
        await until_ready(found["b3"])
        assert found["b3"].store is not None
        return found["b3"].store.me


def wipe(bookies: Bookies) -> None:
    shutil.rmtree(bookies.folder / "b3")


async def test_a_disk_lost_with_the_database_is_later(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service) as running:
        await until_all_ready(running)
        row = await service.client.create(DRAFT)
        await keep(running["b1"], row)
        await keep(running["b3"], row)
    await lose_database(stores)
    wipe(bookies)

    async with (
        serving(stores, are_imagined=False) as service,
        bookies.running(service, ("b1", "b2")) as running,
    ):
        for bookie in running.values():
            await until_replayed(bookie)
        report, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        stand_in = await service.client.cookie("b3")
        why = await refused(bookies, service)
        member = await comes_back_as(bookies, service)

    assert report is not None
    assert report.ledgers == {"write": 1}
    assert stand_in is not None
    assert (stand_in.cookie.incarnation, stand_in.cookie.instance) == (1, STAND_IN)
    assert "has no cookie, but bookie b3 was registered before" in why
    assert member == "b3@2"


async def goes_back(
    stores: Stores, bookies: Bookies, *, first: int, folder: Path, wipes: bool = True
) -> LedgerMetadata:
    """A dump is from before b3 registers as this incarnation and a ledger names it. Then the database goes back to it, and
    b3 loses its disk if it `wipes`.
    """
    async with serving(stores) as service:
        async with bookies.running(service, ("b1", "b2") if first == 1 else NAMES) as running:
            await until_all_ready(running)
        path = await dump(stores, folder / "before")
        if first == 2:
            wipe(bookies)
        async with bookies.running(service, AUTO_FIX_COOKIES="1") as running:
            await until_all_ready(running)
            row = await service.client.create(draft(*OTHERS, f"b3@{first}"))
            await keep(running["b1"], row)
            if wipes:
                await keep(running["b3"], row)
    if wipes:
        wipe(bookies)
    await restore(stores, path)
    return row


async def until_noticed(service: Service) -> None:
    """The service knows that its database went back, and takes no changes."""

    async def is_noticed() -> bool:
        try:
            await service.client.create(draft(*OTHERS, "b9@1"))
        except DatabaseWentBack:
            return True
        except StaleMember:
            return False
        return False

    await until(is_noticed, "the service knows that its database went back")


NAMES = ("b1", "b2", "b3")


@pytest.mark.parametrize("first", [1, 2], ids=["before-it-registered", "before-its-incarnation"])
async def test_a_backup_gives_no_incarnation_out_again(
    stores: Stores, bookies: Bookies, tmp_path: Path, first: int
) -> None:
    row = await goes_back(stores, bookies, first=first, folder=tmp_path)

    async with (
        serving(stores, are_imagined=False) as service,
        bookies.running(service, ("b1", "b2")) as running,
    ):
        for bookie in running.values():
            await until_replayed(bookie)
        report, why = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        assert report is not None, why
        present = await service.client.get(row.ledger_id)
        refusal = await refused(bookies, service)
        member = await comes_back_as(bookies, service)

    assert report.ledgers == {"write": 1}
    assert present.last_fragment == row.last_fragment
    assert "was registered before" in refusal
    assert member == f"b3@{first + 1}"


async def test_a_directory_that_never_registered_is_no_member_to_a_rebuild(
    stores: Stores, bookies: Bookies, tmp_path: Path
) -> None:
    """Its starts ended while the database was known to have gone back. It answers which rows it holds, as all do."""
    await goes_back(stores, bookies, first=1, folder=tmp_path)
    directory = bookies.folder / "b3"
    other = read_cookie(bookies.folder / "b1")
    assert other is not None
    directory.mkdir()
    identity = identity_of(directory)
    never = {"name": "b3", "registered": False, "ever_registered": False, "boots": 2}
    write_cookie(
        directory,
        other.model_copy(update={**never, "instance": str(uuid4()), "identity": identity}),
    )

    async with (
        serving(stores, are_imagined=False) as service,
        bookies.running(service, ("b1", "b2")) as running,
    ):
        for bookie in running.values():
            await until_replayed(bookie)
        await until_noticed(service)
        bookies.may_end = True
        async with bookies.running(service, ("b3",)) as found:
            await until_replayed(found["b3"])
            report, why = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
            await until(lambda: bool(bookies.ended), "b3 refuses to start")
            refusal = bookies.ended[0]
        bookies.may_end = False
        member = await comes_back_as(bookies, service)

    assert report is not None, why
    assert (report.ledgers, report.silent) == ({"write": 1}, ("b3",))
    assert "another directory is registered for b3@1" in refusal
    assert member == "b3@2"


async def rebuilt_with_b3(bookies: Bookies, service: Service) -> tuple[Any, str, str]:
    """Start b3, which waits, and rebuild. Returns the report, the reason without one, and the member."""
    async with bookies.running(service, ("b3",)) as found:
        await until_replayed(found["b3"])
        report, why = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        await until_ready(found["b3"])
        assert found["b3"].store is not None
        return report, why, found["b3"].store.me


async def test_a_bookie_is_heard_as_the_incarnation_that_a_backup_does_not_know_of(
    stores: Stores, bookies: Bookies, tmp_path: Path
) -> None:
    """The rebuild writes its cookie last, and its rows before that."""
    row = await goes_back(stores, bookies, first=2, folder=tmp_path, wipes=False)

    async with (
        serving(stores, are_imagined=False) as service,
        bookies.running(service, ("b1", "b2")) as running,
    ):
        for bookie in running.values():
            await until_replayed(bookie)
        await until_noticed(service)
        report, why, member = await rebuilt_with_b3(bookies, service)
        present = await service.client.get(row.ledger_id)

    assert report is not None, why
    assert report.ledgers == {"write": 1}
    assert (member, present) == ("b3@2", row)


async def test_a_directory_whose_cookie_an_acceptance_replaced_waits_for_a_rebuild(
    stores: Stores, bookies: Bookies, tmp_path: Path
) -> None:
    """The acceptance writes a stand-in before it is refused. b3 was only away, and keeps its incarnation."""
    await goes_back(stores, bookies, first=2, folder=tmp_path, wipes=False)

    async with (
        serving(stores, are_imagined=False) as service,
        bookies.running(service, ("b1", "b2")) as running,
    ):
        for bookie in running.values():
            await until_replayed(bookie)
        await until_noticed(service)
        _, state = await service.send("GET", "/v1/witnesses")
        body = {"witnesses": [one["witness"] for one in state["missing"]], "lost": ["b3"]}
        _, problem = await service.send("POST", "/v1/witnesses/accept", body)
        stand_in = await service.client.cookie("b3")
        report, why, member = await rebuilt_with_b3(bookies, service)

    assert problem["code"] == "copy-lost"
    assert stand_in is not None
    assert (stand_in.cookie.incarnation, stand_in.cookie.instance) == (2, STAND_IN)
    assert report is not None, why
    assert member == "b3@2"


@pytest.mark.parametrize("first", [1, 2], ids=["before-it-registered", "before-its-incarnation"])
async def test_no_row_is_rebuilt_that_names_an_incarnation_given_out_again(
    stores: Stores, bookies: Bookies, tmp_path: Path, first: int
) -> None:
    """Nobody knew that the database had gone back when the empty bookie registered."""
    await goes_back(stores, bookies, first=first, folder=tmp_path)

    async with serving(stores, are_imagined=False) as service:
        assert await comes_back_as(bookies, service) == f"b3@{first}", (
            "the database knows no better"
        )
        async with bookies.running(service) as running:
            for bookie in running.values():
                await until_replayed(bookie)
            ask: dict[str, Any] = {"bookies": tuple(bookies.urls), "take_over": True}
            waits, why = await rebuild(service, **ask)
            assert waits is not None, why
        wipe(bookies)
        member = await comes_back_as(bookies, service)
        async with bookies.running(service) as running:
            for bookie in running.values():
                await until_replayed(bookie)
            done, _ = await rebuild(service, **ask)

    assert waits.ledgers == {"wait": 1}
    assert "registered as b3@" in waits.findings[0].why
    assert member == f"b3@{first + 1}"
    assert done is not None
    assert done.ledgers == {"write": 1}
