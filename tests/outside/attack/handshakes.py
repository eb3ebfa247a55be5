"""Handshakes of TLS that lead nowhere, at an internal listener with certificates: unfinished ones, and wrong certificates."""

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from loadtest.ports import free_ports
from loadtest.waiting import DeadlineMissed, until
from quorumlog.certificates import create_authority, issue, key_file, revoke
from services.local.process import Become, in_child
from tests.outside.attack import raw
from tests.outside.attack.arena import ROOT, Arena
from tests.outside.attack.meters import fault_of_line
from tests.outside.attack.report import Kind
from tests.support.certificates import expired

HELD: Final = 100
"""Connections of each kind whose handshake does not end."""
TRIED: Final = 10
"""Handshakes with each wrong certificate."""
HANDSHAKE_S: Final = 45.0
"""For a handshake that does not end: 10 s are promised."""
ANSWER_S: Final = 20.0
ASKING: Final = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


async def handshakes(arena: Arena) -> None:
    """Handshakes that stop at each point, and certificates that don't count; who has a right one is answered."""
    async with fortress() as target, AsyncExitStack() as stack:
        await until(partial(_is_let_in, target, target.right), "the service lives", arena.hang_s)
        for first in unfinished():
            for _ in range(HELD):
                await _hold(arena, stack, target, first)
        for who, context in target.wrong.items():
            for _ in range(TRIED):
                arena.report.requests += 1
                if await _is_let_in(target, context):
                    arena.find(Kind.ANSWER, f"a certificate that is {who} is let in")
        if not await _is_let_in(target, target.right):
            arena.find(Kind.LOST, "a right certificate is not let in beside unfinished handshakes")
        try:
            await until(lambda: not target.held(), "handshakes end", min(HANDSHAKE_S, arena.hang_s))
        except DeadlineMissed:
            arena.find(Kind.HANG, f"{target.held()} handshakes that do not end are kept")
        if not await _is_let_in(target, target.right):
            arena.find(Kind.LOST, "a right certificate is not let in after unfinished handshakes")
        for line in target.log.read_text().splitlines():
            # Nothing is behind this service, which it says.
            fault = fault_of_line(line)
            if fault is not None:
                arena.find(Kind.LOG, fault)


def unfinished() -> list[bytes]:
    """The first bytes of handshakes that do not go on: nothing, a piece, the whole greeting, no TLS at all."""
    hello = ssl.MemoryBIO()
    context = ssl.create_default_context()
    client = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    greeting = hello.read()
    return [b"", greeting[:3], greeting[:-1], greeting, b"\x16\x03\x01\xff\xff", ASKING]


async def _hold(arena: Arena, stack: AsyncExitStack, target: "Fortress", first: bytes) -> None:
    arena.report.requests += 1
    with contextlib.suppress(OSError):
        connecting = raw.connected(target.address, arena.peer())
        _, writer = await stack.enter_async_context(connecting)
        writer.write(first)


async def _is_let_in(target: "Fortress", context: ssl.SSLContext) -> bool:
    """Whether a request over TLS is answered with what it asks for."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, ssl=context)
            try:
                writer.write(ASKING)
                answer = await raw.answer_of(reader)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False
    return answer is not None and answer.status == 200


@dataclass(frozen=True, slots=True)
class Fortress:
    """A service with certificates, and those of its visitors."""

    process: asyncio.subprocess.Process
    port: int
    right: ssl.SSLContext
    wrong: dict[str, ssl.SSLContext]
    log: Path

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def held(self) -> int:
        """How many connections it has."""
        found = psutil.Process(self.process.pid).net_connections("inet")
        return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def _context(authority: Path, certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    if certificate is not None:
        context.load_cert_chain(certificate, key_file(certificate))
    return context


@contextlib.asynccontextmanager
async def fortress() -> AsyncIterator[Fortress]:
    """The internal listener of a service, which all services have, with nothing behind it."""
    with tempfile.TemporaryDirectory(prefix="ql-fortress-") as made:
        folder = Path(made)
        authority = create_authority(folder / "ours", "ours")
        stranger = create_authority(folder / "theirs", "ours")
        ours = partial(issue, authority.parent)
        mine = ours("autorecovery", "autorecovery-1", ["127.0.0.1"])
        old = expired(authority.parent, "gateway", "expired", ["127.0.0.1"])
        lost = ours("gateway", "lost", ["127.0.0.1"])
        revoke(authority.parent, "gateway", "lost")
        theirs = issue(stranger.parent, "gateway", "gateway-1", ["127.0.0.1"])
        visitors = {
            "none": None,
            "expired": old,
            "another authority's": theirs,
            "revoked": lost,
        }
        port = free_ports(1)[0]
        log = folder / "log"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.autorecovery"),
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT / "shared"), str(ROOT))),
                "PORT": str(port),
                "METADATA_URLS": f"https://127.0.0.1:{free_ports(1)[0]}",
                "TLS_CERT_FILE": str(mine),
                "TLS_KEY_FILE": str(key_file(mine)),
                "TLS_CA_FILE": str(authority),
            },
            stderr=log.open("wb"),
            preexec_fn=in_child(Become.SELF, signal.SIGKILL),
        )
        try:
            yield Fortress(
                process,
                port,
                _context(authority, ours("monitor", "monitor")),
                {who: _context(authority, file) for who, file in visitors.items()},
                log,
            )
        finally:
            process.kill()
            await process.wait()
