"""Limbo against a real metadata service: who enters it, who leaves it, and when (rule 15, I27)."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.stores import Stores
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import Fragment, LedgerMetadata
from quorumlog.protocol.row_copy import RowName, name_of
from services.bookie.limbo import Limbo
from services.bookie.runtime import is_limbo_due
from services.bookie.store import Store
from tests.support.waiting import until
from tests.unit.bookie.support import COOKIE, KEY, add, ids_of, keep_row, read, run_of, started
from tests.unit.bookie.test_process import bookie_of
from tests.unit.metadata.support import DRAFT, Service, serving, swapped

OLD, NOW = "b1@1", "b1@2"


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    async with serving(stores) as running:
        yield running


def limbo_of(store: Store, service: Service) -> Limbo:
    return Limbo(store, service.client, rest_s=0.01)


async def changed(service: Service, row: LedgerMetadata) -> LedgerMetadata:
    return await swapped(service.client, row)


async def closed(service: Service, row: LedgerMetadata, last: int) -> LedgerMetadata:
    return await changed(service, row.closed(last_entry=last, length=last + 1))


async def queued(service: Service) -> set[tuple[int, str, tuple[tuple[int, int], ...]]]:
    items, _ = await RepairClient(service.client, "test").list()
    return {(item.ledger_id, item.member, item.ranges) for item in items}


async def test_phase_one_marks_older_ledgers_and_fences_them(service: Service, root: Path) -> None:
    draft = replace(DRAFT, ledger_key=KEY)
    is_open = await service.client.create(draft)
    in_recovery = await changed(service, (await service.client.create(draft)).in_recovery())
    is_closed = await closed(service, await service.client.create(draft), 3)
    other = await service.client.create(replace(draft, fragments=_with("b4@1")))
    present = await service.client.create(replace(draft, fragments=_with(NOW)))
    store = started(root / "d", me=NOW)
    await add(store, run_of(is_closed.ledger_id, [0, 2]), member=NOW)

    await limbo_of(store, service).enter()
    await store.stop()
    store = started(root / "d", me=NOW)

    marked = {
        ledger_id: row.is_fenced for ledger_id, row in store.holdings.ledgers() if row.is_limbo
    }
    assert marked == {
        is_open.ledger_id: False,
        in_recovery.ledger_id: True,
        is_closed.ledger_id: True,
    }
    assert store.holdings.row(other.ledger_id) is store.holdings.row(present.ledger_id) is None
    for member in (OLD, NOW):
        answer = await read(store, is_closed.ledger_id, 0, 3, member=member)
        assert (ids_of(answer), answer.absent) == ([0, 2], ())
        for row in (in_recovery, is_closed):
            refused = await add(store, run_of(row.ledger_id, [4]), member=member)
            assert refused.status is Status.FENCED
    # A live writer that took the new incarnation into its ensemble goes on.
    assert (await add(store, run_of(is_open.ledger_id, [4]), member=OLD)).status is Status.NOT_MINE
    assert (await add(store, run_of(is_open.ledger_id, [4]), member=NOW)).status is Status.OK


def _with(member: str) -> tuple[Fragment, ...]:
    (fragment,) = DRAFT.fragments
    return (replace(fragment, bookies=(member, *fragment.bookies[1:])),)


async def test_limbo_ends_with_the_new_incarnations_entries(service: Service, root: Path) -> None:
    row = await service.client.create(replace(DRAFT, ledger_key=KEY))
    row = await closed(service, row, 9)
    ledger_id = row.ledger_id
    store = started(root / "d", me=NOW)
    await add(store, run_of(ledger_id, range(4)), member=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()

    await limbo.round()
    assert await queued(service) == {(ledger_id, OLD, ((0, 9),))}
    assert _is_in_limbo(store, ledger_id)

    await changed(service, row.with_member_replaced(0, OLD, NOW))
    await limbo.round()  # a member in metadata, but not all copies are here
    assert (ledger_id, NOW, ((4, 9),)) in await queued(service)
    assert _is_in_limbo(store, ledger_id)
    assert (await read(store, ledger_id, 4, 4, member=NOW)).absent == ()
    assert limbo.progress.missing_entries == 6

    await add(store, run_of(ledger_id, range(4, 10)), member=NOW, recovery=True)
    assert store.counters["limbo_copied_entries"] == 6
    await limbo.round()
    assert not _is_in_limbo(store, ledger_id)
    assert (await read(store, ledger_id, 9, 10, member=NOW)).absent == ((10, 10),)
    assert (limbo.progress.cleared, limbo.progress.checked_entries) == (1, 10)


async def test_a_database_that_lacks_a_copy_ends_no_limbo(service: Service, root: Path) -> None:
    row = await closed(service, await service.client.create(replace(DRAFT, ledger_key=KEY)), 3)
    store = started(root / "d", me=NOW)
    await add(store, run_of(row.ledger_id, range(4)), member=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()
    await keep_row(store, row.ledger_id, name_of(row))
    lost = RowName(9, b"lost" * 4)
    await keep_row(store, row.ledger_id, lost)
    await changed(service, row.with_member_replaced(0, OLD, NOW))

    await limbo.round()
    assert _is_in_limbo(store, row.ledger_id)
    _, state = await service.send("GET", "/v1/witnesses")
    missing = [missing["witness"] for missing in state["missing"]]
    await service.send("POST", "/v1/witnesses/accept", {"witnesses": missing})
    await limbo.round()
    assert _is_in_limbo(store, row.ledger_id), "an accepted loss is no proof"

    store.ledger(row.ledger_id).drop_row_copies((lost,))
    await limbo.round()
    assert not _is_in_limbo(store, row.ledger_id)


async def test_an_open_ledger_leaves_limbo_after_its_repair(service: Service, root: Path) -> None:
    row = await service.client.create(replace(DRAFT, ledger_key=KEY))
    ledger_id = row.ledger_id
    store = started(root / "d", me=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()
    await limbo.round()
    assert await queued(service) == {(ledger_id, OLD, ((0, ID_MAX - 1),))}

    row = await changed(service, row.with_ensemble(5, (NOW, "b2@1", "b3@1")))
    await add(store, run_of(ledger_id, range(5, 8)), member=NOW)
    await limbo.round()
    assert _is_in_limbo(store, ledger_id)

    await add(store, run_of(ledger_id, range(5)), member=NOW, recovery=True)
    await changed(service, row.with_member_replaced(0, OLD, NOW))
    await limbo.round()
    assert not _is_in_limbo(store, ledger_id)


async def test_the_last_deleted_ledger_removes_the_limbo_mark(service: Service, root: Path) -> None:
    row = await service.client.create(replace(DRAFT, ledger_key=KEY))
    row = await closed(service, row, 0)
    store = started(root / "d", me=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()
    assert (root / "d" / "limbo").exists()

    await service.client.delete(row.ledger_id, version=row.version)
    await limbo.run()

    assert not _is_in_limbo(store, row.ledger_id)
    assert not (root / "d" / "limbo").exists()
    assert limbo.progress.ledgers == 0


async def test_a_striped_ledger_misses_only_the_bookies_share(service: Service, root: Path) -> None:
    (fragment,) = DRAFT.fragments
    striped = replace(
        DRAFT,
        ledger_key=KEY,
        quorum=replace(DRAFT.quorum, ensemble_size=4, write_quorum=2, ack_quorum=2),
        fragments=(replace(fragment, bookies=(OLD, "b2@1", "b3@1", "b4@1")),),
    )
    row = await closed(service, await service.client.create(striped), 9)
    store = started(root / "d", me=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()
    await changed(service, row.with_member_replaced(0, OLD, NOW))

    await limbo.round()

    (item,) = [item for item in await queued(service) if item[1] == NOW]
    assert item[2] == ((0, 0), (3, 4), (7, 8))


async def test_what_is_missing_beyond_the_ranges_of_one_request_keeps_the_ledger_in_limbo(
    service: Service, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bookie.limbo._RANGES_MAX", 1)
    monkeypatch.setattr("services.bookie.limbo._REQUEUE_S", 0.0)
    row = await service.client.create(replace(DRAFT, ledger_key=KEY))
    row = await closed(service, row, 3)
    store = started(root / "d", me=NOW)
    await add(store, run_of(row.ledger_id, [1, 3]), member=NOW)
    limbo = limbo_of(store, service)
    await limbo.enter()
    await changed(service, row.with_member_replaced(0, OLD, NOW))

    await limbo.round()
    assert [item[2] for item in await queued(service) if item[1] == NOW] == [((0, 0),)]
    await add(store, run_of(row.ledger_id, [0]), member=NOW, recovery=True)

    await limbo.round()
    assert _is_in_limbo(store, row.ledger_id)
    await add(store, run_of(row.ledger_id, [2]), member=NOW, recovery=True)
    await limbo.round()
    assert not _is_in_limbo(store, row.ledger_id)


def _is_in_limbo(store: Store, ledger_id: int) -> bool:
    row = store.holdings.row(ledger_id)
    return row is not None and row.is_limbo


async def test_a_kill_during_phase_one_leaves_no_ledger_unmarked(stores: Stores) -> None:
    async with bookie_of(stores) as bookie:
        bookie.start()
        await bookie.ready()
        client = MetadataClient([bookie.settings["METADATA_URLS"]], bookie.session)
        rows = [await client.create(replace(DRAFT, ledger_key=KEY)) for _ in range(40)]
        for row in rows[::2]:
            await client.cas(row.closed(last_entry=0, length=1))
        await bookie.kill()
        shutil.rmtree(bookie.data)

        bookie.start(AUTO_FIX_COOKIES="1")
        await until(lambda: "new-incarnation" in bookie.log.read_text(), "it is a new incarnation")
        await bookie.kill()
        bookie.start(AUTO_FIX_COOKIES="1")
        assert (await bookie.ready())["bookie"] == "b1@2"

        async with bookie.session.get(f"{bookie.url}/v1/ledgers?limit=1000") as answer:
            held = {item["ledger_id"]: item for item in (await answer.json())["ledgers"]}
        assert all(held[row.ledger_id]["limbo"] for row in rows)
        assert all(held[row.ledger_id]["fenced"] for row in rows[::2])
        await client.close()


def test_phase_one_is_due_until_a_start_has_completed_it() -> None:
    new = COOKIE.model_copy(update={"incarnation": 2, "registered": False})
    done = new.model_copy(update={"registered": True})

    assert not is_limbo_due(None, COOKIE)
    assert not is_limbo_due(COOKIE, COOKIE)
    assert is_limbo_due(None, new)
    assert is_limbo_due(COOKIE, new)
    assert is_limbo_due(new, new)  # the start that was to do it did not end
    assert not is_limbo_due(done, new)
