"""A Postgres that half works, or is out of reach: what is refused, what goes on, and what is logged."""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from loadtest.stores import Stores
from quorumlog.errors import NOT_DONE, UNKNOWN, MetadataUnavailable
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.bodies import document_of
from services.metadata.database import Database, SettingsDropped
from services.metadata.servers import Reach
from tests.support.database import connected
from tests.support.proxy import proxy_to
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, is_ready, serving

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


async def test_a_full_postgres_is_read_and_not_changed(stores: Stores, service: Service) -> None:
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


async def test_a_read_only_postgres_is_unready_and_read(stores: Stores, service: Service) -> None:
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


async def test_changes_that_wait_too_long_are_refused(stores: Stores, service: Service) -> None:
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


def reported(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    return [(record.message, getattr(record, "error", None)) for record in caplog.records]


def test_each_outage_is_told_once_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reach = Reach(away="toy-away", there="toy-there", deadline_s=0.5)

    for error in (TimeoutError(), TimeoutError(), RedisConnectionError("Error 111"), None, None):
        if error is None:
            reach.found()
        else:
            reach.lost(error)

    assert reported(caplog) == [
        ("toy-away", "no response within 0.5 s"),
        ("toy-away", "ConnectionError: Error 111"),
        ("toy-there", None),
    ]
    assert reach.is_up


def test_an_outage_of_alternating_errors_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    reach = Reach(away="toy-away", there="toy-there", deadline_s=0.5)

    for number in range(1000):
        reach.lost(OSError("refused"))
        reach.lost(OSError(f"reset {number % 100}"))

    texts = [error for _, error in reported(caplog)]
    assert texts[:2] == ["OSError: refused", "OSError: reset 0"]
    assert len(texts) == len(set(texts)) <= 10


@pytest.mark.parametrize(
    ("store", "event"), [("redis", "redis-away"), ("postgres", "database-away")]
)
async def test_a_database_that_was_never_there_and_one_that_goes_away_are_told_with_their_errors(
    stores: Stores, caplog: pytest.LogCaptureFixture, store: str, event: str
) -> None:
    name = {"redis": "redis_url", "postgres": "postgres_dsn"}[store]
    caplog.set_level(logging.INFO, "services.metadata")

    def tellings(event: str) -> list[str | None]:
        return [error for told_event, error in reported(caplog) if told_event == event]

    async with proxy_to(getattr(stores, name)) as proxy:
        proxy.is_down = True
        through = replace(stores, **{name: proxy.url(getattr(stores, name))})
        async with serving(through, wait=False, redis_deadline_s=0.5):
            await until(lambda: tellings(event), f"{event} is logged")
            proxy.is_down = False
            back = event.replace("away", "there")
            await until(lambda: tellings(back), f"{back} is logged")
            first = len(tellings(event))
            proxy.is_down = True
            proxy.cut_all()
            await until(lambda: len(tellings(event)) > first, f"{event} is logged again")

    assert all(tellings(event))


@asynccontextmanager
async def pooler(dsn: str, *dropped: str) -> AsyncIterator[str]:
    """A way to a database on which the first message of each connection lacks some parameters: its DSN."""
    parts = urlsplit(dsn)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(parts.hostname, parts.port)
        while (head := await reader.readexactly(8))[4:] == struct.pack("!I", 80877103):
            writer.write(b"N")  # no TLS
        (size,) = struct.unpack("!I", head[:4])
        words = (await reader.readexactly(size - 8)).rstrip(b"\0").split(b"\0")
        pairs = zip(words[::2], words[1::2], strict=True)
        kept = [b"%b\0%b\0" % pair for pair in pairs if pair[0].decode() not in dropped]
        body = head[4:] + b"".join(kept) + b"\0"
        up_writer.write(struct.pack("!I", len(body) + 4) + body)
        await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{port}").geturl()
    finally:
        server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_a_connection_without_its_settings_is_refused_by_name(stores: Stores) -> None:
    dropped = ("synchronous_commit", "statement_timeout")
    admin = Database(stores.postgres_dsn, connections_max=1, deadline_s=PATIENT_S)
    direct = await admin.connect()
    name = urlsplit(stores.postgres_dsn).path[1:]
    await direct.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await direct.close()

    async with pooler(stores.postgres_dsn, *dropped) as dsn:
        database = Database(dsn, connections_max=1, deadline_s=PATIENT_S)
        with pytest.raises(
            SettingsDropped, match="lacks the settings statement_timeout, synchronous_commit"
        ):
            await database.connect()
    async with pooler(stores.postgres_dsn) as dsn:
        connection = await Database(dsn, connections_max=1, deadline_s=PATIENT_S).connect()
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
        await connection.close()
