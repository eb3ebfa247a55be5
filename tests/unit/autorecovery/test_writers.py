"""When a ledger's writer counts as gone, and when as silent (rule 21a): real sockets and processes."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.protocol.metadata import Writer
from services.autorecovery.writers import WriterPresence, Writers, refuses_everywhere
from tests.support.answering import answering

HOST = "127.0.0.1"
NOWHERE = "255.255.255.255"
"""An address to which no connection can even be begun."""


@contextlib.asynccontextmanager
async def asked() -> AsyncIterator[Writers]:
    async with aiohttp.ClientSession() as session:
        yield Writers(session)


def saying(answer: Any, status: int = 200) -> AbstractAsyncContextManager[str]:
    """A server that says this of its instance; its URL."""

    async def instance(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    return answering(instance, "/internal/instance")


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """A process that hangs: connections come to be, and nobody answers."""
    with socket.socket() as listener:
        listener.bind((HOST, free_ports(1)[0]))
        listener.listen()
        yield f"http://{HOST}:{listener.getsockname()[1]}"


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name that is looked up stands for these addresses."""

    async def look_up(_loop: Any, _host: Any, port: int, **_how: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)


async def reported(answer: Any, status: int = 200) -> WriterPresence:
    async with saying(answer, status) as url, asked() as writers:
        return await writers.presence_of(Writer("me", url))


async def test_a_writer_that_refuses_or_was_replaced_is_gone() -> None:
    async with asked() as writers:
        assert (
            await writers.presence_of(Writer("me", f"http://{HOST}:{free_ports(1)[0]}"))
            is WriterPresence.GONE
        )
    assert await reported({"id": "another"}) is WriterPresence.GONE
    assert await reported({"id": "me"}) is WriterPresence.ALIVE


async def test_an_answer_without_an_id_is_silence() -> None:
    """A proxy's, or of something else that got the port."""
    answers: tuple[Any, ...] = ({}, {"id": None}, {"id": ""}, {"id": 7}, {"status": "ok"}, [], "me")
    for answer in (*answers, None):
        assert await reported(answer) is WriterPresence.SILENT, answer
    assert await reported({"id": "another"}, 502) is WriterPresence.SILENT
    assert await reported({"id": "another"}, 404) is WriterPresence.SILENT


async def test_an_unknown_host_name_is_silence() -> None:
    """A stopped container has no name any more; one of which the name server is down has none either."""
    async with asked() as writers:
        assert (
            await writers.presence_of(Writer("me", "http://writer.invalid:1"))
            is WriterPresence.SILENT
        )
    assert not await refuses_everywhere("http://writer.invalid:1")


async def test_an_unreachable_host_is_silence() -> None:
    async with asked() as writers:
        assert (
            await writers.presence_of(Writer("me", f"http://{NOWHERE}:1")) is WriterPresence.SILENT
        )


async def test_a_timeout_is_silence() -> None:
    with mute() as url:
        async with asked() as writers:
            assert await writers.presence_of(Writer("me", url)) is WriterPresence.SILENT


async def test_a_name_with_several_addresses_refuses_only_if_all_of_them_do() -> None:
    port = free_ports(1)[0]
    url = f"http://writers:{port}"
    with pytest.MonkeyPatch.context() as patch:
        async with asked() as writers:
            for addresses in ((NOWHERE, HOST), (HOST, NOWHERE)):
                named(patch, *addresses)
                assert await writers.presence_of(Writer("me", url)) is WriterPresence.SILENT, (
                    addresses
                )
            named(patch, HOST, "127.0.0.2")
            assert await writers.presence_of(Writer("me", url)) is WriterPresence.GONE
        with socket.socket() as listener:
            listener.bind(("127.0.0.2", port))
            listener.listen()
            assert not await refuses_everywhere(url)


OUT_OF_DESCRIPTORS = """
import asyncio, os, resource, sys
import aiohttp
from quorumlog.protocol.metadata import Writer
from services.autorecovery.writers import Writers, refuses_everywhere

async def main():
    async with aiohttp.ClientSession() as session:
        writers = Writers(session)
        used = len(os.listdir("/proc/self/fd")) - 1
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        there = await writers.presence_of(Writer("me", sys.argv[1]))
        refuses = await refuses_everywhere(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
        return there.value, refuses, (await writers.presence_of(Writer("me", sys.argv[1]))).value

print(*asyncio.run(main()))
"""


async def test_without_a_free_descriptor_a_probe_proves_nothing() -> None:
    url = f"http://{HOST}:{free_ports(1)[0]}"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", OUT_OF_DESCRIPTORS, url],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == ["silent", "False", "gone"], done.stderr
