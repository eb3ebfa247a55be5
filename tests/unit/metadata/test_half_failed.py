"""A Postgres that is slow, read-only or full: a change that it can't make is refused and never made, reads go on where they
can, and afterwards everything works without a restart.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from loadtest.stores import Stores
from quorumlog.errors import NOT_DONE, UNKNOWN, MetadataUnavailable
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.bodies import document_of
from services.metadata.database import Database
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, is_ready, serving

CREATE: Final = "/v1/ledgers"
IS_FULL: Final = """
CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER no_room BEFORE INSERT OR UPDATE ON ledgers FOR EACH ROW EXECUTE FUNCTION no_room();
"""
"""Make Postgres answer each change of a ledger as it does when its disk is full."""
HAS_ROOM: Final = "DROP TRIGGER no_room ON ledgers; DROP FUNCTION no_room()"


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    """Its deadline is the shipped one."""
    async with serving(stores, database_deadline_s=1.8) as started:
        yield started


async def create(service: Service) -> tuple[int, Any]:
    """Send one request to create a ledger, without retries."""
    draft = document_of(DRAFT)
    return await service.send("POST", CREATE, {"row": draft, "attempt": new_attempt()})


async def is_refused(service: Service) -> bool:
    return bool((await create(service))[1]["outcome"] == NOT_DONE)


async def is_created(service: Service) -> bool:
    return (await create(service))[0] == 201


async def count(service: Service) -> int:
    return len((await service.client.list())[0])


async def test_a_full_postgres_refuses_changes_and_is_read(
    stores: Stores, service: Service
) -> None:
    row = await service.client.create(DRAFT)
    async with connected(stores) as connection:
        await connection.execute(IS_FULL)

        for _ in range(3):
            status, problem = await create(service)
            assert (status, problem["code"]) == (503, "metadata-unavailable")
            assert (problem["retryable"], problem["outcome"]) == (True, "not-done")
        assert await service.client.get(row.ledger_id) == row

        await connection.execute(HAS_ROOM)
    assert (await create(service))[0] == 201
    assert await count(service) == 2


async def test_a_read_only_postgres_is_not_ready_and_is_read(
    stores: Stores, service: Service
) -> None:
    row = await service.client.create(DRAFT)
    async with connected(stores) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        await connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        # If the service sends a request on a session that Postgres has just ended, the outcome is unknown. Retry until it reconnects.
        await until(lambda: is_refused(service), "the service has reconnected")

        for _ in range(3):
            status, problem = await create(service)
            assert (status, problem["code"]) == (503, "metadata-unavailable")
            assert (problem["retryable"], problem["outcome"]) == (True, "not-done")
        assert not await is_ready(service)
        assert await service.client.get(row.ledger_id) == row

        await connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
    await until(lambda: is_ready(service), "the service is ready again")
    # A session that began while the database was read-only stays read-only, so one more request may be refused.
    await until(lambda: is_created(service), "a ledger is created")
    assert await count(service) == 2


async def test_changes_that_wait_too_long_are_refused_and_reads_go_on(
    stores: Stores, service: Service
) -> None:
    row = await service.client.create(DRAFT)
    async with connected(stores) as connection, connection.transaction():
        await connection.execute("LOCK TABLE ledgers IN EXCLUSIVE MODE")

        status, problem = await create(service)
        assert (status, problem["code"]) == (503, "metadata-unavailable")
        assert (problem["retryable"], problem["outcome"]) == (True, "not-done")
        assert await service.client.get(row.ledger_id) == row

    assert (await create(service))[0] == 201
    assert await count(service) == 2


@pytest.mark.parametrize(
    ("function", "outcome"), [("pg_cancel_backend", NOT_DONE), ("pg_terminate_backend", UNKNOWN)]
)
async def test_the_outcome_is_known_only_where_the_session_outlives_the_error(
    stores: Stores, function: str, outcome: str
) -> None:
    """An administrator can end a session while its commit waits for a standby. Then the service can't know whether Postgres kept
    the change.
    """
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=60)
    database.is_open = True
    try:
        with pytest.raises(MetadataUnavailable) as caught:
            await database.run(lambda it: it.execute(f"SELECT {function}(pg_backend_pid())"))
        assert caught.value.outcome == outcome
        assert await database.run(lambda it: it.fetchval("SELECT 1")) == 1
    finally:
        await database.close()
