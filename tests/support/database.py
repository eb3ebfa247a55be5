"""The database of a test's stores, beside the connections of the service."""

import contextlib
from collections.abc import AsyncIterator

import asyncpg

from loadtest.stores import Stores
from services.metadata.database import Connection


@contextlib.asynccontextmanager
async def connected(stores: Stores) -> AsyncIterator[Connection]:
    """A connection, until the end of the block."""
    connection = await asyncpg.connect(stores.postgres_dsn, connection_class=Connection)
    try:
        yield connection
    finally:
        await connection.close()


async def sql(stores: Stores, text: str, *values: object) -> str:
    """Run statements on a connection of their own."""
    async with connected(stores) as connection:
        return str(await connection.execute(text, *values))
