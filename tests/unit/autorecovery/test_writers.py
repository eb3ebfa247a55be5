"""What a probe of a writer proves, and when an open ledger may be recovered (rule 21)."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.net.connections import ListenLimits
from quorumlog.net.listen import listening
from quorumlog.net.ports import Ports
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Writer
from quorumlog.protocol.quorum import Quorum
from services.autorecovery.auditor import Auditor
from services.autorecovery.config import Config
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


class Bookies:
    """Count who is fenced, and end the recovery by it."""

    def __init__(self) -> None:
        self.fenced: list[str] = []

    def fence(self, member: str, *_args: Any) -> None:
        self.fenced.append(member)
        raise RuntimeError("nobody is to be fenced")


async def test_a_writer_that_answers_again_is_not_fenced_by_a_recovery_that_waited() -> None:
    bookies, port = Bookies(), free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    row = LedgerMetadata(
        7, Quorum(1, 1, 1), DigestKind.CRC32C, (Fragment(0, ("b1@1",)),), writer=Writer("w", url)
    )

    async def instance(_request: web.Request) -> web.Response:
        return web.json_response({"id": "w"})

    async def get(_ledger_id: int) -> LedgerMetadata:
        return row

    async def cas(changed: LedgerMetadata, *_args: Any, **_how: Any) -> Any:
        return CasStatus.OK, changed

    app = web.Application()
    app.router.add_get("/internal/instance", instance)
    tasks = Tasks()
    metadata = SimpleNamespace(get=get, cas=cas)
    ports = Ports(
        cast(Any, bookies),
        cast(Any, metadata),
        cast(Any, None),
        Timers(asyncio.get_running_loop()),
        tasks,
    )
    async with (
        listening(app, host="127.0.0.1", port=port, limits=ListenLimits(drain_timeout_s=0.1)),
        aiohttp.ClientSession() as session,
    ):
        auditor = Auditor(
            "auditor",
            Config.model_validate({"port": port, "metadata_urls": (url,)}),
            cast(Any, metadata),
            cast(Any, None),
            ports,
            Writers(session),
            cast(Any, SimpleNamespace(lost_bookie_delay_s=1.0)),
        )

        await auditor._recover(row.ledger_id, is_silence_enough=True)

    await tasks.close()
    assert bookies.fenced == []
