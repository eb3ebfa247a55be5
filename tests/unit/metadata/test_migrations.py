"""Processes of two releases work on the same tables, as far as migrations say that they may."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtest.stores import Stores
from services.metadata import app
from services.metadata import migrate as module
from services.metadata.database import Connection
from services.metadata.migrate import Kind, TablesTooNew, kind_of, migrate, migration_files
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, PATIENT_S, WAITING, is_ready, serving

pytestmark = pytest.mark.without_tables

TAKES_AWAY = re.compile(r"\b(DROP|RENAME|SET NOT NULL|ALTER COLUMN \w+ TYPE)\b", re.IGNORECASE)

EXPAND = "0090_later.sql"
CONTRACT = "0091_less.contract.sql"


@pytest.fixture
async def connection(stores: Stores) -> AsyncIterator[Connection]:
    async with connected(stores) as opened:
        yield opened


@pytest.fixture
def later_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_later(tmp_path, monkeypatch)


def become_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is of a release that expands the tables, and takes away what the one before it added."""
    for path in migration_files():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / EXPAND).write_text("ALTER TABLE ledgers ADD COLUMN later text;")
    (tmp_path / CONTRACT).write_text("ALTER TABLE ledgers DROP COLUMN later;")
    monkeypatch.setattr(module, "_FOLDER", tmp_path)


async def columns(connection: Connection) -> set[str]:
    rows = await connection.fetch(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'ledgers'"
    )
    return {row["column_name"] for row in rows}


def test_a_migration_that_takes_something_away_is_named_as_a_contracting_one() -> None:
    expanding = [path for path in migration_files() if kind_of(path) is Kind.EXPAND]

    assert [path.name for path in expanding if TAKES_AWAY.search(path.read_text())] == []


async def test_an_older_process_serves_tables_that_a_later_release_has_expanded(
    stores: Stores, connection: Connection
) -> None:
    await migrate(connection)
    await connection.execute("ALTER TABLE ledgers ADD COLUMN later text")
    await connection.execute(
        "INSERT INTO migrations (number, name, kind) VALUES (9998, 'expands', 'expand')"
    )

    async with serving(stores) as service:
        row = await service.client.create(DRAFT)
        assert await service.client.get(row.ledger_id) == row


@pytest.mark.parametrize("kind", ["contract", "rewrite"])
async def test_an_older_process_leaves_unknown_tables(connection: Connection, kind: str) -> None:
    await migrate(connection)
    await connection.execute(
        "INSERT INTO migrations (number, name, kind) VALUES (9999, '9999_newer.sql', $1)", kind
    )

    with pytest.raises(TablesTooNew, match=r"a later release applied 9999_newer\.sql:"):
        await migrate(connection)


@pytest.mark.usefixtures("later_release")
async def test_a_contracting_migration_waits_for_the_operators_word(connection: Connection) -> None:
    first = await migrate(connection)
    second = await migrate(connection, contract_through=90)

    assert EXPAND in first.applied
    assert (first.waiting, second.applied, second.waiting) == ((CONTRACT,), (), (CONTRACT,))
    assert "later" in await columns(connection)

    assert await migrate(connection, contract_through=91) == module.Migrated((CONTRACT,), ())
    assert "later" not in await columns(connection)


async def test_a_migration_that_waits_for_a_table_lets_others_read_it(
    stores: Stores,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A dump holds the tables for as long as it runs, and who asks for a table waits behind a waiting migration."""
    await migrate(connection)
    become_later(tmp_path, monkeypatch)
    monkeypatch.setattr(app, "_LOCKED_RETRY_S", 0.1)
    async with connected(stores) as reader:
        dump = connection.transaction()
        await dump.start()
        await connection.execute("LOCK TABLE ledgers IN ACCESS SHARE MODE")

        async def waits() -> bool:
            return bool(await reader.fetchval(WAITING))

        async def is_reported() -> bool:
            return any(record.msg == "migration-waits" for record in caplog.records)

        async with serving(stores, wait=False) as service:
            await until(waits, "the migration waits for the table")
            async with asyncio.timeout(PATIENT_S):
                assert await reader.fetchval("SELECT count(*) FROM ledgers") == 0
            await until(is_reported, "the service says so")
            assert "later" not in await columns(connection)
            await dump.rollback()
            await until(lambda: is_ready(service), "the migration is made")
            assert "later" in await columns(connection)


async def test_a_service_starts_during_a_dump(stores: Stores, connection: Connection) -> None:
    await migrate(connection)
    tables = await connection.fetchval(
        "SELECT string_agg(tablename, ', ') FROM pg_tables WHERE schemaname = 'public'"
    )
    async with connection.transaction():
        await connection.execute(f"LOCK TABLE {tables} IN ACCESS SHARE MODE")

        async with serving(stores) as service:
            row = await service.client.create(DRAFT)
            assert await service.client.get(row.ledger_id) == row


@pytest.mark.usefixtures("later_release")
async def test_each_migrations_kind_is_stored_for_older_processes(connection: Connection) -> None:
    await migrate(connection, contract_through=91)

    rows = await connection.fetch("SELECT name, kind FROM migrations WHERE number >= 90")

    assert {row["name"]: row["kind"] for row in rows} == {EXPAND: "expand", CONTRACT: "contract"}
