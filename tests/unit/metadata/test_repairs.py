"""The repair queue and leases: who may work on what, and what is never cleared too early."""

import asyncio
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, VersionConflict
from quorumlog.net.metadata_client import RepairClient
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.repair_bodies import RepairAdd, RepairSettings, RepairSettingsPut
from services.metadata.database import Database
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, swapped

LONG_S = 3600.0
SOON_S = 0.05


@pytest.fixture
def worker(service: Service) -> RepairClient:
    return RepairClient(service.client, "worker-1")


@pytest.fixture
def other(service: Service) -> RepairClient:
    return RepairClient(service.client, "worker-2")


async def with_gap(service: Service, *missed: MissedRange) -> LedgerMetadata:
    row = await service.client.create(DRAFT)
    return await swapped(service.client, row, missed)


GAP = MissedRange("b3@1", 0, 9)


async def test_missed_entries_are_queued_atomically(service: Service, worker: RepairClient) -> None:
    row = await service.client.create(DRAFT)
    missed = (MissedRange("b3@1", 0, 4), MissedRange("b3@1", 3, 9), MissedRange("b2@1", 7, 7))

    await service.client.cas(row.in_recovery(), missed)
    await service.client.cas(row.in_recovery(), (MissedRange("b1@1", 0, 0),))  # a conflict

    found, following = await worker.list()
    assert following is None
    assert [(item.ledger_id, item.member, item.ranges) for item in found] == [
        (row.ledger_id, "b2@1", ((7, 7),)),
        (row.ledger_id, "b3@1", ((0, 9),)),
    ]


async def test_an_item_is_claimed_by_one_worker_at_a_time(
    service: Service, worker: RepairClient, other: RepairClient
) -> None:
    for _ in range(6):
        await with_gap(service, GAP)

    claims = await asyncio.gather(
        *(client.claim(lease_s=LONG_S, limit=2) for client in (worker, other) * 4)
    )

    ids = [item.ledger_id for claim in claims for item in claim]
    assert len(ids) == 6
    assert len(set(ids)) == 6
    assert await worker.claim(lease_s=LONG_S) == ()


async def test_the_fewest_survivors_come_first(service: Service, worker: RepairClient) -> None:
    rows = [await with_gap(service, GAP) for _ in range(4)]
    for row, survivors in zip(rows, (2, 1, None, 3), strict=True):
        await worker.add(
            [
                RepairAdd(
                    ledger_id=row.ledger_id, member="b3@1", ranges=((3, 12),), survivors=survivors
                )
            ]
        )

    claimed = await worker.claim(lease_s=LONG_S, limit=10)

    assert [(item.ledger_id, item.survivors) for item in claimed] == [
        (rows[1].ledger_id, 1),
        (rows[0].ledger_id, 2),
        (rows[3].ledger_id, 3),
        (rows[2].ledger_id, None),
    ]
    assert {item.ranges for item in claimed} == {((0, 12),)}


async def test_progress_removes_finished_ranges(service: Service, worker: RepairClient) -> None:
    await with_gap(service, GAP)
    (item,) = await worker.claim(lease_s=LONG_S)

    assert await worker.progress(item, ((2, 4),), lease_s=LONG_S) == ((0, 1), (5, 9))
    assert await worker.progress(item, ((2, 4),), lease_s=LONG_S) == ((0, 1), (5, 9))
    assert await worker.progress(item, ((0, 9),), lease_s=LONG_S) == ()

    assert await worker.list() == ((), None)
    assert await worker.progress(item, ((0, 9),), lease_s=LONG_S) == ()


async def test_a_worker_with_an_expired_claim_clears_nothing(
    service: Service, worker: RepairClient, other: RepairClient
) -> None:
    await with_gap(service, GAP)
    (item,) = await worker.claim(lease_s=SOON_S)

    (taken,) = await until(lambda: other.claim(lease_s=LONG_S), "the first claim runs out")

    assert taken.ledger_id == item.ledger_id
    with pytest.raises(VersionConflict):
        await worker.progress(item, ((0, 9),), lease_s=LONG_S)
    with pytest.raises(VersionConflict):
        await worker.fail(item, "late")
    assert (await other.list())[0] == (taken,)


async def test_ranges_queued_meanwhile_stay(service: Service, worker: RepairClient) -> None:
    row = await with_gap(service, GAP)
    (item,) = await worker.claim(lease_s=LONG_S)

    await service.client.cas(row, (MissedRange("b3@1", 5, 5),))

    with pytest.raises(VersionConflict):
        await worker.progress(item, ((0, 9),), lease_s=LONG_S)
    (left,) = (await worker.list())[0]
    assert left.ranges == ((0, 9),)
    assert left.worker is None  # and it need not wait for the end of a claim that is over
    (again,) = await worker.claim(lease_s=LONG_S)
    assert await worker.progress(again, ((0, 9),), lease_s=LONG_S) == ()


async def test_a_failed_item_is_claimed_again_with_the_reason(
    service: Service, worker: RepairClient, other: RepairClient
) -> None:
    await with_gap(service, GAP)
    (item,) = await worker.claim(lease_s=LONG_S)

    await worker.fail(item, "bookie away")

    (again,) = await until(lambda: other.claim(lease_s=LONG_S), "the pause is over")
    assert (again.failures, again.detail, again.worker) == (1, "bookie away", "worker-2")
    await other.progress(again, (), lease_s=LONG_S)
    assert (await other.list())[0][0].failures == 0


async def test_a_deleted_ledger_has_no_repair_items(service: Service, worker: RepairClient) -> None:
    row = await with_gap(service, GAP)
    closed = await swapped(service.client, row.closed(last_entry=9, length=0))
    await service.client.delete(row.ledger_id, version=closed.version)

    await worker.add([RepairAdd(ledger_id=row.ledger_id, member="b3@1", ranges=((0, 1),))])

    assert await worker.list() == ((), None)


async def test_the_queue_is_listed_in_pages(service: Service, worker: RepairClient) -> None:
    for _ in range(2):
        await with_gap(service, GAP, MissedRange("b1@1", 0, 2**63 - 2))

    first, after = await worker.list(limit=3)
    rest, end = await worker.list(limit=3, after=after)

    assert [item.member for item in (*first, *rest)] == ["b1@1", "b3@1"] * 2
    assert first[0].ranges == ((0, 2**63 - 2),)
    assert end is None


async def test_a_lease_has_one_holder_at_a_time(worker: RepairClient, other: RepairClient) -> None:
    leases = await asyncio.gather(
        *(client.take_lease("auditor", ttl_s=LONG_S) for client in (worker, other) * 3)
    )

    assert len({(lease.holder, lease.token) for lease in leases}) == 1
    holder, rival = (worker, other) if leases[0].holder == "worker-1" else (other, worker)
    assert (await rival.take_lease("auditor", ttl_s=LONG_S)).holder == leases[0].holder
    assert (await holder.take_lease("auditor", ttl_s=LONG_S)).token == 1


async def test_an_expired_lease_is_free(worker: RepairClient, other: RepairClient) -> None:
    await worker.take_lease("auditor", ttl_s=SOON_S)

    async def is_taken() -> bool:
        return (await other.take_lease("auditor", ttl_s=LONG_S)).holder == "worker-2"

    await until(is_taken, "the first holder's time is over")
    assert (await other.take_lease("auditor", ttl_s=LONG_S)).token == 2


async def test_a_range_beyond_the_ids_is_refused(service: Service) -> None:
    row = await service.client.create(DRAFT)
    for ranges in ([[0, 2**63 - 1]], [[1, 0]], [[-1, 0]], [[0]]):
        item = {"ledger_id": row.ledger_id, "member": "b1@1", "ranges": ranges}

        status, problem = await service.send("POST", "/v1/repairs", {"items": [item]})

        assert (status, problem["code"]) == (422, "invalid")
    with pytest.raises((InvalidRequest, ValueError)):
        await service.client.cas(row, (MissedRange("b1@1", 0, 2**63 - 1),))


async def test_repair_settings_are_shared(worker: RepairClient, other: RepairClient) -> None:
    assert await worker.settings() == RepairSettings()

    await worker.change_settings(RepairSettingsPut(paused=True, bytes_per_s=1000))
    changed = await other.change_settings(RepairSettingsPut(lost_bookie_delay_s=7))
    assert changed == RepairSettings(paused=True, bytes_per_s=1000, lost_bookie_delay_s=7)

    await other.change_settings(RepairSettingsPut(bytes_per_s=None, paused=False))
    assert await worker.settings() == RepairSettings(lost_bookie_delay_s=7)
    assert (await worker.trigger()).triggers == 1


async def test_failed_items_are_retried_on_request(service: Service, worker: RepairClient) -> None:
    await with_gap(service, GAP)
    for _ in range(3):
        (item,) = await until(lambda: worker.claim(lease_s=LONG_S), "it is claimed")
        await worker.fail(item, "no bookie is free")
        await worker.hurry()
    (item,) = await worker.claim(lease_s=LONG_S)
    await worker.hurry()
    assert await worker.claim(lease_s=LONG_S) == ()  # a claim is not cut short
    await worker.fail(item, "no bookie is free")
    assert await worker.claim(lease_s=LONG_S) == ()
    found = await worker.summary()
    assert (found.items, found.ledgers, found.waiting) == (1, 1, 1)


async def test_an_audit_allows_a_move_without_pause(service: Service, worker: RepairClient) -> None:
    row = await with_gap(service, GAP)
    (item,) = await worker.claim(lease_s=LONG_S)
    assert not item.moves  # rule 8: it is for that very member
    for _ in range(4):
        await worker.fail(item, "the bookie is waited for")
        await worker.hurry()
        (item,) = await worker.claim(lease_s=LONG_S)
    await worker.fail(item, "the bookie is waited for")

    places = RepairAdd(ledger_id=row.ledger_id, member=GAP.member, ranges=((0, 99),), moves=True)
    await worker.add([places])
    (item,) = await worker.claim(lease_s=LONG_S)
    assert item.moves
    await worker.add([places.model_copy(update={"moves": False})])
    assert [item.moves for item in (await worker.list())[0]] == [True]


async def test_however_many_items_wait_all_are_hurried(
    service: Service, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transactions of some items each: one of all would pass its deadline, again and again."""
    row = await service.client.create(DRAFT)
    async with connected(stores) as connection:
        await connection.execute(
            "INSERT INTO repairs (ledger_id, member, ranges, failures, next_try_at)"
            f" SELECT {row.ledger_id}, 'b' || n || '@1', '{{[0,9]}}', 1, now() + interval '1 hour'"
            " FROM generate_series(1, 4500) n"
        )
        sizes: list[str] = []
        inner = Database.run

        async def counted(self: Database, work: Any, **options: Any) -> Any:
            done = await inner(self, work, **options)
            if isinstance(done, str) and done.startswith("UPDATE"):
                sizes.append(done)
            return done

        monkeypatch.setattr(Database, "run", counted)
        await RepairClient(service.client, "operator").hurry()

        left = await connection.fetchval("SELECT count(*) FROM repairs WHERE next_try_at > now()")
        assert left == 0
        assert sizes == ["UPDATE 2000", "UPDATE 2000", "UPDATE 500", "UPDATE 0"]
