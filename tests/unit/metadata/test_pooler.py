"""Behind a pooler that drops settings of the connection, as PgBouncer does with `ignore_startup_parameters`."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest

from loadtest.stores import Stores
from services.metadata.database import Database, SettingsDropped
from tests.unit.metadata.support import PATIENT_S


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


async def test_a_connection_whose_settings_are_dropped_is_refused_and_they_are_named(
    stores: Stores,
) -> None:
    dropped = ("synchronous_commit", "statement_timeout")
    admin = Database(stores.postgres_dsn, connections_max=1, deadline_s=PATIENT_S)
    direct = await admin.connect()
    name = urlsplit(stores.postgres_dsn).path[1:]
    await direct.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await direct.close()

    async with pooler(stores.postgres_dsn, *dropped) as dsn:
        database = Database(dsn, connections_max=1, deadline_s=PATIENT_S)
        with pytest.raises(SettingsDropped, match="lacks statement_timeout, synchronous_commit:"):
            await database.connect()
    async with pooler(stores.postgres_dsn) as dsn:
        connection = await Database(dsn, connections_max=1, deadline_s=PATIENT_S).connect()
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
        await connection.close()
