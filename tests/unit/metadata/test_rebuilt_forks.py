"""What a rebuild from the bookies makes of forks, and of the ledgers that they share (rules 18f and 27a)."""

from dataclasses import replace

import pytest

from loadtest.stores import Stores
from quorumlog.errors import LogDeleted, NoSuchLog, OwnedByLog
from quorumlog.net.gateway_clients import LogClient
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import Deletion, LedgerMetadata
from quorumlog.protocol.rebuild import Action
from services.bookie.runtime import BookieRuntime
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import Service, serving
from tests.unit.metadata.test_rebuild import (
    Bookies,
    bookies,
    closed,
    create,
    keep,
    lose_database,
    lost_after,
    until_ready,
)
from tests.unit.metadata.test_rebuilt_logs import LOG, Written, places, rebuilt

__all__ = ("bookies",)

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


async def test_a_fork_comes_back_with_what_it_shares_and_its_deleted_source_does_not(
    stores: Stores, bookies: Bookies
) -> None:
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


async def test_a_source_that_is_deleted_again_leaves_what_a_fork_of_the_lost_history_names(
    stores: Stores, bookies: Bookies
) -> None:
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


async def test_a_shared_ledger_whose_deletion_bookies_prove_is_deleted_again(
    stores: Stores, bookies: Bookies
) -> None:
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
