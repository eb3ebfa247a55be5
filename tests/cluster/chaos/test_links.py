"""A gateway's way to metadata, as the storm cuts it: bytes of a direction wait, or are gone with their
connection.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadtest.ports import free_ports
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import turns


class _Echo:
    """A server that tells what it hears."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        try:
            data = await reader.read(100)
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.heard.put_nowait(data)
            writer.close()


@asynccontextmanager
async def _linked() -> AsyncIterator[tuple[_Echo, Proxy]]:
    echo, port = _Echo(), free_ports(1)[0]
    server = await asyncio.start_server(echo.serve, "127.0.0.1", port)
    async with server, proxy_to(f"http://127.0.0.1:{port}") as proxy:
        yield echo, proxy


async def _asked(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"asked")
    await writer.drain()
    return reader, writer


async def test_an_answer_that_is_held_comes_when_the_link_is_whole_again() -> None:
    async with _linked() as (echo, proxy):
        proxy.hold("down")
        reader, writer = await _asked(proxy)

        assert await echo.heard.get() == b"asked"
        proxy.hold()
        assert await reader.read(100) == b"asked"
        writer.close()


async def test_a_request_that_is_held_is_gone_with_its_connection() -> None:
    async with _linked() as (echo, proxy):
        proxy.hold("up")
        _, writer = await _asked(proxy)
        while echo.heard.empty():  # the connection may not be there yet
            proxy.cut_all()
            await turns()

        assert await echo.heard.get() == b""
        writer.close()


async def test_what_is_held_at_the_end_holds_nothing_up() -> None:
    async with _linked() as (_, proxy):
        proxy.hold("up", "down")
        _, writer = await _asked(proxy)
        writer.close()
