"""Rewrites and forks of logs in metadata: what names a ledger keeps it, also after a rebuild."""

from dataclasses import replace

import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, LogDeleted, NoSuchLedger, NoSuchLog, OwnedByLog
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import REPLACED_MAX, Deletion, LedgerMetadata
from quorumlog.protocol.rebuild import Action
from quorumlog.protocol.transaction import Sealed
from quorumlog.wire.log_bodies import TRANSACTION_TAG
from services.bookie.runtime import BookieRuntime
from services.metadata import logs as stored
from tests.support.database import sql
from tests.support.waiting import until
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import Service, serving
from tests.unit.metadata.test_rebuild import (
    Bookies,
    bookies,
    closed,
    create,
    forget,
    keep,
    lose_database,
    lost_after,
    until_ready,
)
from tests.unit.metadata.test_rebuilt_logs import LOG, Written, accepts, places, rebuilt

__all__ = ("bookies",)


async def rewrite(
    service: Service, row: LogMetadata, first: int, count: int
) -> tuple[LogMetadata, LedgerMetadata]:
    """Some items of a log are replaced by a new ledger: the row, and that ledger's."""
    new = await closed(service, await create(service, log=row.name), last=7)
    items = row.items[first : first + count]
    done, now = await LogClient(service.client).cas(row.rewritten(items, new.ledger_id, 60))
    assert done
    return now, await service.client.get(new.ledger_id)


async def test_a_rewrite_takes_the_place_of_ledgers_and_names_them(service: Service) -> None:
    log, logs = await Written.of(service, 5), LogClient(service.client)
    ids = [one.ledger_id for one in log.rows]

    row, new = await rewrite(service, log.row, 1, 2)
    again, newest = await rewrite(service, row, 0, 2)

    assert places(row) == [
        (ids[0], 0, 9),
        (new.ledger_id, 10, 29),
        (ids[3], 30, 39),
        (ids[4], 40, 49),
    ]
    assert new.lineage is not None
    assert (new.first_offset, new.lineage.before) == (10, ((ids[0], 0),))
    assert new.lineage.replaced == ((ids[1], 10), (ids[2], 20))
    assert new.lineage.placed_by == new.attempt == row.attempt
    assert newest.lineage is not None
    assert newest.lineage.replaced == (
        (ids[0], 0),
        (ids[1], 10),
        (ids[2], 20),
        (new.ledger_id, 10),
    )
    assert again.items[0].replaced == 4
    assert await logs.orphans(older_than_s=0) == (*ids[:3], new.ledger_id)
    with pytest.raises(OwnedByLog):
        await logs.delete_unnamed(newest.ledger_id)


async def test_only_a_closed_ledger_of_the_log_takes_the_place_of_sealed_ones(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, logs = await Written.of(service, 4), LogClient(service.client)
    still_open = await create(service, log="events")
    elsewhere = await closed(service, await create(service, log="other"))
    fit = await closed(service, await create(service, log="events"))
    two = log.row.items[:2]

    for new in (still_open, elsewhere):
        with pytest.raises(InvalidRequest):
            await logs.cas(log.row.rewritten(two, new.ledger_id, 9))
    row = log.row.rewritten(two, fit.ledger_id, 9)
    monkeypatch.setattr(stored, "REPLACED_MAX", 1)
    with pytest.raises(InvalidRequest):
        await logs.cas(row)
    monkeypatch.setattr(stored, "REPLACED_MAX", REPLACED_MAX)

    assert (await logs.cas(row))[0]
    assert await logs.orphans(older_than_s=0) == (
        *(one.ledger_id for one in log.rows[:2]),
        still_open.ledger_id,
        elsewhere.ledger_id,
    )


async def test_a_ledger_that_may_lack_entries_is_kept(service: Service, stores: Stores) -> None:
    log, logs = await Written.of(service, 3), LogClient(service.client)
    new = await closed(service, await create(service, log="events"))
    await sql(
        stores,
        "UPDATE ledgers SET body = jsonb_set(body, '{may_lack_entries}', 'true')"
        f" WHERE ledger_id = {log.rows[1].ledger_id}",
    )

    with pytest.raises(InvalidRequest):
        await logs.cas(log.row.rewritten(log.row.items[:2], new.ledger_id, 9))

    assert (await logs.get("events")).items == log.row.items


async def test_a_ledger_that_a_fork_names_outlives_its_rewrite(service: Service) -> None:
    log, logs = await Written.of(service, 4), LogClient(service.client)
    ids = [one.ledger_id for one in log.rows]
    fork, _ = await logs.fork(replace(LOG, name="fork"), log.row, 15)

    row, new = await rewrite(service, log.row, 0, 3)

    assert await logs.orphans(older_than_s=0) == (ids[2],)
    assert await logs.shared_among(ids) == {*ids[:2]}
    with pytest.raises(OwnedByLog):
        await logs.delete_unnamed(ids[0])
    later, _ = await logs.fork(replace(LOG, name="later"), row, 15)
    assert places(later) == [(new.ledger_id, 0, 14)]
    await logs.delete(fork)
    assert await logs.orphans(older_than_s=0) == (*ids[:3],)
    await logs.delete_unnamed(ids[0])


async def test_a_deleted_log_takes_the_replaced_ledgers_along(service: Service) -> None:
    log, logs = await Written.of(service, 4), LogClient(service.client)
    fork, _ = await logs.fork(replace(LOG, name="fork"), log.row, 5)
    row, new = await rewrite(service, log.row, 0, 3)
    shared, *old = (one.ledger_id for one in log.rows[:3])

    await logs.delete(row)

    for ledger_id in (*old, new.ledger_id, log.rows[3].ledger_id):
        with pytest.raises(NoSuchLedger):
            await service.client.get(ledger_id)
    assert (await service.client.get(shared)).ledger_id == shared, "a fork names it"
    assert await logs.orphans(older_than_s=0) == ()
    await logs.delete(fork)
    assert await logs.orphans(older_than_s=0) == (shared,)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "restored"])
async def test_a_deleted_log_stays_deleted_whatever_the_ids_of_its_ledgers(
    stores: Stores, bookies: Bookies, *, is_lost: bool
) -> None:
    """The ledger of a rewrite has a higher id than the log's later ledgers."""
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        log = await Written.of(service, 4)
        row, new = await rewrite(service, log.row, 0, 3)
        file = await dump(stores, bookies.folder / "dump")
        last = log.rows[3].deleted(deletion=Deletion.WITH_LOG)
        await keep(running["b1"], *log.rows[:3], new, last)
        await LogClient(service.client).delete(row)
    if is_lost:
        await lose_database(stores)
    else:
        await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await rebuilt(service, bookies, running)
        found, _ = await LogClient(service.client).list()

    assert found == []


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "restored"])
@pytest.mark.parametrize("are_deleted", [True, False], ids=["deleted", "kept"])
async def test_a_rebuilt_log_names_the_rewrite_and_not_what_it_replaced(
    stores: Stores, bookies: Bookies, *, is_lost: bool, are_deleted: bool
) -> None:
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        log = await Written.of(service, 4)
        file = await dump(stores, bookies.folder / "dump")
        row, new = await rewrite(service, log.row, 1, 2)
        await keep(running["b1"], *log.rows, new)
        if are_deleted:
            for one in log.rows[1:3]:
                await LogClient(service.client).delete_unnamed(one.ledger_id)
                forget(running["b1"], one.ledger_id)
    if is_lost:
        await lose_database(stores)
    else:
        await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        found = await LogClient(service.client).get("events")
        again = await rebuilt(service, bookies, running)
        ledger = await service.client.get(new.ledger_id)

    last = None if is_lost else 39
    assert places(found) == [*places(row)[:2], (log.rows[3].ledger_id, 30, last)]
    assert (report.logs, again.logs) == ({"write": 1}, {"same": 1})
    assert (ledger.first_offset, ledger.lineage) == (10, new.lineage)


async def test_a_rewritten_transaction_was_committed(stores: Stores, bookies: Bookies) -> None:
    """Else the application would publish its version again. The database is of before the commit."""
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        row, _ = await logs.create(LOG)
        begun, _ = await transactions.begin("events", app="job", version=7, expires_in_s=3600)
        tags = ((TRANSACTION_TAG, begun.id),)
        ledgers = [
            await closed(service, await create(service, log="events", extra=tags), last=9)
            for _ in range(2)
        ]
        ids = [one.ledger_id for one in ledgers]
        behind = await create(service, log="events")
        file = await dump(stores, bookies.folder / "dump")
        row = row.with_published([(one, 10, 50) for one in ids], now_ms=1, published_ms=7)
        row = row.with_ledger(behind.ledger_id).with_ends({}, producers=(), now_ms=1)
        _, published = await transactions.commit(begun.id, tuple(map(Sealed, ids)), row)
        assert published is not None
        _, new = await rewrite(service, published, 0, 2)
        last = await service.client.get(behind.ledger_id)
        for one in ids:
            await logs.delete_unnamed(one)
            forget(running["b1"], one)
        await keep(running["b1"], new, last)
    await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await rebuilt(service, bookies, running)
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        await until(lambda: accepts(service), "the rest of the loss is accepted")
        found = await transactions.get(begun.id)
        again, _ = await transactions.begin("events", app="job", version=7, expires_in_s=60)
        log = await logs.get("events")

    assert (found.state, again.state) == ("COMMITTED", "COMMITTED")
    assert [(one.ledger_id, one.first_offset, one.last_offset) for one in found.ledgers] == [
        (ids[0], 0, 9),
        (ids[1], 10, 19),
    ]
    assert places(log)[0] == (new.ledger_id, 0, 19)


FORK = replace(LOG, name="fork")


async def forked(
    service: Service, source: LogMetadata, at: int
) -> tuple[LogMetadata, LedgerMetadata]:
    """A fork with a ledger of its own, and that ledger's row."""
    logs = LogClient(service.client)
    fork, _ = await logs.fork(FORK, source, at)
    own = await closed(service, await create(service, log="fork"))
    named = fork.with_ledger(own.ledger_id).with_ends({}, producers=(), now_ms=1)
    done, fork = await logs.cas(named)
    assert done
    return fork, await service.client.get(own.ledger_id)


async def delete(service: Service, bookie: BookieRuntime, log: LogMetadata) -> None:
    """Delete a log, whose ledgers' members hear of what is deleted with it."""
    logs = LogClient(service.client)
    rows = [await service.client.get(item.ledger_id) for item in log.own]
    await logs.delete(log)
    kept = await logs.shared_among([row.ledger_id for row in rows])
    for row in rows:
        deletion = Deletion.OF_LOG if row.ledger_id in kept else Deletion.WITH_LOG
        await keep(bookie, row.deleted(deletion=deletion))


async def test_a_fork_returns_without_its_source(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        source = await Written.of(service, 3)
        fork, own = await forked(service, source.row, 15)
        await keep(running["b1"], *source.rows, own)
        await delete(service, running["b1"], source.row)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("fork")
        again = await rebuilt(service, bookies, running)
        with pytest.raises(NoSuchLog) as missing:
            await logs.get("events")
        orphans = await logs.orphans(older_than_s=0)
        for row in source.rows[:2]:
            with pytest.raises(OwnedByLog):
                await logs.delete_unnamed(row.ledger_id)
        await logs.delete(found)
        after = await logs.orphans(older_than_s=0)
        for row in source.rows[:2]:
            await logs.delete_unnamed(row.ledger_id)

    assert places(found) == places(fork)
    assert (found.forked_at, found.created_at) == (15, fork.created_at)
    assert (report.logs, report.findings, again.logs) == ({"write": 1}, (), {"same": 1})
    assert not isinstance(missing.value, LogDeleted)
    assert orphans == ()
    assert set(after).isdisjoint(row.ledger_id for row in source.rows), "an operator decides"


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "older"])
async def test_a_source_whose_ledgers_are_all_shared_stays_deleted(
    stores: Stores, bookies: Bookies, *, is_empty: bool
) -> None:
    """In an empty database, and in an older one that has the source and knows nothing of the fork."""
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        source = await Written.of(service, 2)
        await keep(running["b1"], *source.rows)
        file = await dump(stores, bookies.folder / "dump")
        fork, own = await forked(service, source.row, 20)
        await keep(running["b1"], own)
        await delete(service, running["b1"], source.row)
    if is_empty:
        await lose_database(stores)
    else:
        await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("fork")
        with pytest.raises(NoSuchLog):
            await logs.get("events")
        rows = [await service.client.get(item.ledger_id) for item in found.items]

    assert places(found) == places(fork)
    assert [row.ledger_id for row in rows] == [item.ledger_id for item in fork.items]
    assert [row.deletion for row in rows] == [None] * 3
    assert report.findings == ()


async def test_a_source_deleted_again_leaves_a_lost_fork(stores: Stores, bookies: Bookies) -> None:
    """The database has the source, and knows nothing of the fork, when the source is judged."""
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        source = await Written.of(service, 3)
        await keep(running["b1"], *source.rows)
        file = await dump(stores, bookies.folder / "dump")
        fork, own = await forked(service, source.row, 20)
        await keep(running["b1"], own)
        await delete(service, running["b1"], source.row)
    await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("fork")
        rows = [await service.client.get(item.ledger_id) for item in found.items]
        with pytest.raises(NoSuchLog):
            await logs.get("events")

    assert report.logs == {"tombstone": 1, "write": 1}
    assert places(found) == places(fork)
    assert [row.ledger_id for row in rows] == [item.ledger_id for item in fork.items]


async def test_a_shared_ledger_proven_deleted_goes_again(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        source = await Written.of(service, 2)
        fork, own = await forked(service, source.row, 20)
        await keep(running["b1"], *source.rows, own)
        file = await dump(stores, bookies.folder / "dump")
        logs = LogClient(service.client)
        await logs.cas(source.row.truncated(10))
        _, fork = await logs.cas(fork.truncated(10))
        await logs.delete_unnamed(source.rows[0].ledger_id)
        await keep(running["b1"], source.rows[0].deleted())
    await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = [await logs.get(name) for name in ("events", "fork")]

    assert report.ledgers[Action.TOMBSTONE] == 1
    assert report.logs == {"write": 2}
    assert [places(log) for log in found] == [places(source.row)[1:], places(fork)]
