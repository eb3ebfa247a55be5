"""What a page of a stranger, in a browser that reaches the cluster, gets from any of its processes."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from loadtest.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")

SERVICES = ["gateway-1", "metadata-1", "bookie-1", "autorecovery-1"]
POSTS = {
    "gateway-1": ("/v1/ledgers", "/nothing"),
    "metadata-1": ("/v1/ledger-heads", "/v1/witnesses"),
    "bookie-1": ("/v1/nothing",),
    "autorecovery-1": ("/v1/audit",),
}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> object:
        return orjson.loads(self.body)["code"]


async def sent(url: str, head: str) -> Answer:
    """The answer to raw bytes, until the process hangs up."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        top = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in top[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(top[0].split()[1]), headers, body)
    finally:
        writer.close()


@pytest.mark.parametrize("name", SERVICES)
async def test_a_rebound_name_reads_and_changes_nothing(cluster: Cluster, name: str) -> None:
    url = cluster.url(name)
    port = urlsplit(url).port
    for path in ("/metrics", "/docs", "/v1/ledgers", "/internal/instance", "/nothing"):
        for host in (
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost.evil",
            "[::1",
            "",
        ):
            answer = await sent(url, f"GET {path} HTTP/1.1\nHost: {host}")
            assert (answer.status, answer.code) == (421, "foreign-host"), (path, host)
    for path in POSTS[name]:
        head = f"POST {path} HTTP/1.1\nHost: evil.example\nOrigin: http://evil.example"
        answer = await sent(url, f"{head}\nContent-Length: 0")
        assert (answer.status, answer.code) == (421, "foreign-host"), path


@pytest.mark.parametrize("name", SERVICES)
async def test_another_origins_page_changes_and_opens_nothing(cluster: Cluster, name: str) -> None:
    url = cluster.url(name)
    host = urlsplit(url).netloc
    for origin in ("http://evil.example", f"https://{host}", "null"):
        for path in POSTS[name]:
            head = f"POST {path} HTTP/1.1\nHost: {host}\nOrigin: {origin}\nContent-Length: 0"
            answer = await sent(url, head)
            assert (answer.status, answer.code) == (403, "forbidden"), (path, origin)
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/channel", "/v1/ledgers/1/ws"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(url + path, origin="http://evil.example")
            assert refused.value.status == 403


@pytest.mark.parametrize("name", SERVICES)
async def test_names_of_loopback_and_addresses_are_answered(cluster: Cluster, name: str) -> None:
    url = cluster.url(name)
    for host in (
        "localhost",
        "LOCALHOST.:80",
        "a.localhost:1",
        "127.0.0.1",
        "10.1.2.3:8080",
        "[::1]:8080",
    ):
        answer = await sent(url, f"GET /health/live HTTP/1.1\nHost: {host}")
        assert answer.status == 200, host


@pytest.mark.parametrize("name", SERVICES)
async def test_a_page_runs_nothing_and_is_framed_by_none(cluster: Cluster, name: str) -> None:
    url = cluster.url(name)
    paths = ["/docs", *(["/problems/too-large"] if name == "gateway-1" else [])]
    for path in paths:
        shown = "".join(f"\n{name}: {value}" for name, value in cluster.headers.items())
        head = f"GET {path} HTTP/1.1\nHost: localhost\nAccept: text/html{shown}"
        answer = await sent(url, head)
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy)
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", SERVICES)
async def test_no_answer_tells_what_the_service_is_made_of(cluster: Cluster, name: str) -> None:
    url = cluster.url(name)
    for head in (
        "GET /health/live HTTP/1.1\nHost: localhost",
        "GET /nothing HTTP/1.1\nHost: localhost",
        "GET / HTTP/1.1\nHost: evil.example",
        "GET / HTTP/1.1\nHost: localhost\nbad header",
        "BROKEN",
        f"GET /{'x' * 9000} HTTP/1.1\nHost: localhost",
    ):
        answer = await sent(url, head)
        reported = f"{answer.headers}{answer.body.decode()}".lower()
        assert "aiohttp" not in reported, head
        assert "python" not in reported, head
        assert answer.headers["server"] == "quorumlog"
