"""Programs of examples and guides as processes, web pages for them, and what they say over HTTP."""

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.local.process import Program, start
from tests.support.waiting import until

ROOT: Final = Path(__file__).resolve().parents[3]


class Running:
    """A program that runs until it is killed; it can be started again."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self._program = Program(name=name, argv=tuple(argv), env=os.environ)
        self._log = folder / f"{name}.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, for the first time or again."""
        self.process = start(self._program, self._log)
        return self.process

    def kill(self) -> None:
        """End it at once (kill -9)."""
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")

    def check(self) -> None:
        """Fail where it has ended by itself."""
        assert self.process.poll() is None, self.said


async def up(session: aiohttp.ClientSession, program: Running, url: str) -> None:
    """Wait until a program answers at a URL, whatever it answers."""

    async def answers() -> bool:
        program.check()
        async with session.get(url) as answer:
            return answer.status < 500

    await until(answers, f"{url} answers", passing=(aiohttp.ClientError, OSError))


@contextlib.asynccontextmanager
async def site(files: Mapping[str, str]) -> AsyncIterator[str]:
    """A web server for files by their paths; gives its origin."""
    types = {"js": "text/javascript"}

    async def get(request: web.Request) -> web.Response:
        if request.path not in files:
            raise web.HTTPNotFound
        kind = types.get(request.path.rpartition(".")[2], "text/html")
        return web.Response(text=files[request.path], content_type=kind)

    app = web.Application()
    app.router.add_get("/{path:.*}", get)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


@contextlib.asynccontextmanager
async def losing_answers(session: aiohttp.ClientSession, gateway: str) -> AsyncIterator[str]:
    """A way to a gateway on which each answer to a POST is lost, after the gateway has done what was asked."""

    async def forward(request: web.Request) -> web.Response:
        skipped = ("Host", "Connection", "Content-Length", "Transfer-Encoding", "Accept-Encoding")
        headers = {name: text for name, text in request.headers.items() if name not in skipped}
        body = await request.read()
        async with session.request(
            request.method, gateway + request.path_qs, data=body, headers=headers
        ) as answer:
            reported = await answer.read()
            if request.method == "POST":
                assert request.transport is not None
                request.transport.abort()
            kept = {name: text for name, text in answer.headers.items() if name not in skipped}
            return web.Response(status=answer.status, body=reported, headers=kept)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")
