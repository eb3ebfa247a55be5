"""Indexes of keys in the database: which ledgers a log may name as one, and when they are released (rule 27e)."""

from dataclasses import replace

import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, NoSuchLedger, OwnedByLog
from quorumlog.net.gateway_clients import LogClient
from quorumlog.protocol.log import NO_KEYS, LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata
from tests.support.database import sql
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import Service, serving
from tests.unit.metadata.test_rebuild import Bookies, bookies, closed, create, keep, until_ready
from tests.unit.metadata.test_rebuilt_logs import LOG, Written, places, rebuilt

__all__ = ("bookies",)


async def index(
    service: Service, row: LogMetadata, at: int, *, number: int | None = None
) -> tuple[LogMetadata, LedgerMetadata]:
    """The log names a new ledger, or the ledger `number`, as the index of its ledger at a place."""
    new = await closed(service, await create(service, log=row.name), last=0)
    ledger_id = new.ledger_id if number is None else number
    wanted = row.indexed(row.items[at].ledger_id, ledger_id)
    assert wanted is not None
    done, now = await LogClient(service.client).cas(wanted)
    assert done
    return now, new


async def test_an_index_is_named_until_its_ledger_goes(service: Service) -> None:
    log, logs = await Written.of(service, 4), LogClient(service.client)
    row, first = await index(service, log.row, 0)
    row, second = await index(service, row, 1)
    row, third = await index(service, row, 2)

    assert await logs.orphans(older_than_s=0) == ()
    with pytest.raises(OwnedByLog):
        await logs.delete_unnamed(first.ledger_id)
    assert (await service.client.get(first.ledger_id)).first_offset is None, "it has no place"

    done, row = await logs.cas(row.truncated(10))
    assert done
    assert await logs.orphans(older_than_s=0) == (log.rows[0].ledger_id, first.ledger_id)
    await logs.delete_unnamed(first.ledger_id)
    dropped = row.indexed(log.rows[1].ledger_id, None, before=second.ledger_id)
    assert dropped is not None
    done, row = await logs.cas(dropped)
    assert done
    assert second.ledger_id in await logs.orphans(older_than_s=0)
    merged = await closed(service, await create(service, log="events"))
    done, row = await logs.cas(row.rewritten(row.items[:2], merged.ledger_id, 60))
    assert done
    assert third.ledger_id in await logs.orphans(older_than_s=0)


async def test_a_deleted_log_takes_its_indexes_along(service: Service) -> None:
    log = await Written.of(service, 2)
    row, new = await index(service, log.row, 0)

    await LogClient(service.client).delete(row)

    with pytest.raises(NoSuchLedger):
        await service.client.get(log.rows[0].ledger_id)
    logs = LogClient(service.client)
    assert await logs.orphans(older_than_s=0) == (new.ledger_id,)
    await logs.delete_unnamed(new.ledger_id)


async def test_a_fork_needs_no_index(service: Service, stores: Stores) -> None:
    """A rebuild may have found that it was deleted."""
    log, logs = await Written.of(service, 3), LogClient(service.client)
    row, new = await index(service, log.row, 0)
    await sql(stores, f"UPDATE ledgers SET body = NULL WHERE ledger_id = {new.ledger_id}")

    fork, _ = await logs.fork(replace(LOG, name="fork"), row, 5)

    assert [item.index for item in fork.items] == [None]
    assert await logs.shared_among([log.rows[0].ledger_id, new.ledger_id]) == {
        log.rows[0].ledger_id
    }


async def test_only_a_closed_unnamed_ledger_of_the_log_is_an_index(service: Service) -> None:
    log, logs = await Written.of(service, 3), LogClient(service.client)
    still_open = await create(service, log="events")
    elsewhere = await closed(service, await create(service, log="other"))
    row, taken = await index(service, log.row, 0)

    for wrong in (still_open.ledger_id, elsewhere.ledger_id, 999):
        with pytest.raises(InvalidRequest):
            await index(service, row, 1, number=wrong)
    for named in (taken.ledger_id, log.rows[2].ledger_id):
        with pytest.raises(ValueError, match="only once"):
            await index(service, row, 1, number=named)
    row, _ = await index(service, row, 1, number=NO_KEYS)
    assert [item.index for item in (await logs.get("events")).items] == [
        taken.ledger_id,
        NO_KEYS,
        None,
    ]


async def test_an_index_that_a_fork_names_outlives_its_log(service: Service) -> None:
    log, logs = await Written.of(service, 3), LogClient(service.client)
    row, new = await index(service, log.row, 0)
    fork, _ = await logs.fork(replace(LOG, name="fork"), row, 5)
    assert fork.items[0].index == new.ledger_id
    shared = [log.rows[0].ledger_id, new.ledger_id]
    assert await logs.shared_among(shared) == {*shared}

    await logs.delete(row)
    for ledger_id in shared:
        assert (await service.client.get(ledger_id)).ledger_id == ledger_id
        with pytest.raises(OwnedByLog):
            await logs.delete_unnamed(ledger_id)
    with pytest.raises(InvalidRequest):
        await logs.cas(replace(fork, items=(replace(fork.items[0], index=77),)))

    dropped = fork.indexed(fork.items[0].ledger_id, None, before=new.ledger_id)
    assert dropped is not None
    done, fork = await logs.cas(dropped)
    assert done
    assert await logs.orphans(older_than_s=0) == (new.ledger_id,)
    await logs.delete(fork)
    assert await logs.orphans(older_than_s=0) == tuple(shared)


async def test_a_rebuilt_log_has_no_indexes(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        log = await Written.of(service, 2)
        row, new = await index(service, log.row, 0)
        file = await dump(stores, bookies.folder / "dump")
        log.row = row
        await log.add()
        await keep(running["b1"], *log.rows, new)
    await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("events")
        await logs.delete_unnamed(new.ledger_id)

    assert [each[:2] for each in places(found)] == [each[:2] for each in places(log.row)]
    assert [item.index for item in found.items] == [None, None, None]
