"""Compressed appends and reads by the SDK and the command line, on a cluster of processes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Record

pytestmark = pytest.mark.asyncio(loop_scope="package")
coded = pytest.mark.parametrize("compression", ["gzip", "zstd", None])


def order(number: int) -> bytes:
    return json.dumps(
        {
            "order": number,
            "customer": f"customer-{number % 97}",
            "state": "accepted",
            "items": [1] * 9,
        }
    ).encode()


class Wire:
    """Counts what crosses the network to and from a gateway."""

    def __init__(self, url: str) -> None:
        self.url, self.sent, self.received = url, 0, 0


@contextlib.asynccontextmanager
async def counted(url: str) -> AsyncIterator[Wire]:
    """A way to the gateway that counts its bytes."""
    host, port = url.removeprefix("http://").split(":")
    wire = Wire("")

    async def carry(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if is_sent:
                    wire.sent += len(data)
                else:
                    wire.received += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, back, is_sent=True), carry(there, writer, is_sent=False))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield wire
    finally:
        server.close()


@coded
async def test_what_was_appended_is_read_again_and_crosses_the_network_once_compressed(
    cluster: Cluster, compression: str | None
) -> None:
    payloads = [order(number) for number in range(2000)]
    plain = sum(map(len, payloads))
    async with counted(cluster.gateways[0]) as wire:
        async with Client(wire.url, compression=compression) as client:
            ledger = await client.create_ledger()
            await ledger.append_batch(payloads)
            log = await client.create_log(f"compressed-{compression}")
            await log.producer("p").append(*payloads[:500])
            await log.append(*(Record(each, key=b"k") for each in payloads))
            sent = wire.sent
            entries = [entry.payload async for entry in ledger.entries()]
            records = [record.value async for record in log.records()]
        assert entries == payloads
        assert records == payloads[:500] + payloads
    if compression is None:
        assert sent > 2 * plain
        assert wire.received > 2 * plain
    else:
        assert sent < plain
        assert wire.received < plain


async def test_a_producer_repeats_a_request_in_another_coding(cluster: Cluster) -> None:
    """The digest of a request is that of its records: however they came, a repeat is known."""
    answers = []
    name = "repeated-otherwise"
    for compression in ("zstd", None, "gzip"):
        async with Client(*cluster.gateways, compression=compression) as client:
            log = await client.create_log(name)
            producer = log.producer("p", epoch=7, since=0)
            answers.append(await producer.append(*map(order, range(100))))
    assert [answer.is_duplicate for answer in answers] == [False, True, True]
    assert {(answer.first_offset, answer.last_offset) for answer in answers} == {(0, 99)}


async def test_what_has_a_secret_is_never_compressed(cluster: Cluster) -> None:
    asks: dict[str, Any] = {"Accept-Encoding": "gzip, zstd, identity;q=0"}
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        url = cluster.gateways[0]
        for number in range(20):
            wanted = {"name": f"token {number} " + "x" * 80, "grants": ["read:*"]}
            async with session.post(f"{url}/v1/tokens", json=wanted, headers=asks) as made:
                assert made.status == 201, await made.text()
                assert "Content-Encoding" not in made.headers
                assert (await made.json())["token"]
        async with session.get(f"{url}/v1/tokens", headers=asks) as listed:
            assert "Content-Encoding" not in listed.headers
            assert "Accept-Encoding" not in listed.headers.get("Vary", "")
            assert len(await listed.read()) > 4096
        async with session.get(f"{url}/openapi.json", headers=asks) as described:
            assert described.headers["Content-Encoding"] == "zstd"


async def test_the_sdk_asks_for_nothing_compressed_unless_it_is_told_to() -> None:
    seen: list[str | None] = []

    async def noted(request: aiohttp.web.Request) -> aiohttp.web.Response:
        seen.append(request.headers.get("Accept-Encoding"))
        return aiohttp.web.json_response({"bookies": []}, headers={"X-Request-Id": "a"})

    app = aiohttp.web.Application()
    app.router.add_get("/v1/bookies", noted)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    try:
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for compression in (None, "gzip", "zstd"):
            async with Client(url, compression=compression) as client:
                assert await client.bookies() == []
    finally:
        await runner.cleanup()
    assert seen == ["identity", "gzip", "zstd"]


async def test_an_unavailable_compression_is_refused_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="gzip or zstd, not 'br'"):
        Client("http://127.0.0.1:1", compression="br")
    with pytest.raises(TypeError):
        Client("http://127.0.0.1:1", compression=7)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "quorumlog.zstd", None)
    with pytest.raises(ValueError, match=r"pip install 'quorumlog\[zstd\]'"):
        Client("http://127.0.0.1:1", compression="zstd")
