"""Databases that go back: dumps of the real server's tools, put back into the live database."""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from loadtest.stores import Stores
from services.local.embedded import _environment, _postgres_folders

_TABLES = (
    "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'migrations'"
    " ORDER BY tablename"
)
_COLUMNS = (
    "SELECT string_agg(quote_ident(column_name), ', ') FROM information_schema.columns"
    " WHERE table_schema = 'public' AND table_name = $1 AND is_generated = 'NEVER'"
)


_DEADLOCK_TIMEOUT = "deadlock_timeout=600000"
"""A restore locks tables in an order of its own (`app_versions` before `transactions`, say, which the
service's expiry locks the other way round), as any order of the service's would be wrong for some two
tables. Postgres ends the session that notices the deadlock: with this it is the service's, which repeats
its work. The runbook has the services stopped first."""


def _run(tool: str, *arguments: str) -> None:
    folder = next(folder for folder in _postgres_folders() if (folder / tool).exists())
    environment = {
        **_environment(),
        "HOME": os.environ.get("HOME", "/"),
        "PGOPTIONS": f"-c {_DEADLOCK_TIMEOUT}",
    }
    done = subprocess.run(
        [folder / tool, *arguments], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


async def dump(stores: Stores, path: Path) -> Path:
    """The database as it is now, as an operator's backup takes it."""
    await asyncio.to_thread(
        _run, "pg_dump", "--format=custom", f"--file={path}", stores.postgres_dsn
    )
    return path


async def restore(stores: Stores, path: Path) -> None:
    """Put a dump back into the live database."""
    await asyncio.to_thread(
        _run, "pg_restore", "--clean", "--if-exists", f"--dbname={stores.postgres_dsn}", str(path)
    )


class Copy:
    """The same by SQL, at a moment that a test chooses: what a restore of data does, in one go."""

    def __init__(
        self, connection: "asyncpg.Connection[asyncpg.Record]", tables: Sequence[str]
    ) -> None:
        self._connection = connection
        self._tables = tables

    @classmethod
    async def of(cls, connection: "asyncpg.Connection[asyncpg.Record]") -> "Copy":
        """The database as it is now."""
        tables = [record["tablename"] for record in await connection.fetch(_TABLES)]
        await connection.execute("DROP SCHEMA IF EXISTS copied CASCADE; CREATE SCHEMA copied")
        for table in tables:
            await connection.execute(f"CREATE TABLE copied.{table} AS TABLE public.{table}")
        return cls(connection, tables)

    async def put_back(self, *, by_rows: bool = False) -> None:
        """In the transaction that the caller has begun. By rows it waits for nobody who only reads."""
        execute = self._connection.execute
        await execute(f"SET LOCAL {_DEADLOCK_TIMEOUT}")
        await execute("SET LOCAL session_replication_role = replica")
        if by_rows:
            for table in self._tables:
                await execute(f"DELETE FROM {table}")
        else:
            await execute(f"TRUNCATE {', '.join(self._tables)}")
        for table in self._tables:
            columns = await self._connection.fetchval(_COLUMNS, table)
            await execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM copied.{table}")
