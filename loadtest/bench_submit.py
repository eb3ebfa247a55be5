"""Compare `submit` of the SDK's two faces against a gateway that answers at once.

`make bench-submit COUNT=50000`: both faces submit COUNT records of 100 bytes to a server in
another process, which only counts frames; the figures are the SDK's own cost.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from multiprocessing import get_context
from multiprocessing.connection import Connection

from aiohttp import web

from loadtest.ports import free_ports
from quorumlog import client
from quorumlog.client import sync

_PAYLOAD = b"x" * 100


def main() -> None:
    """Print what both faces reach, the best of three runs each."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    url = ours.recv()
    faces: dict[str, Callable[[str, int], tuple[float, float]]] = {
        "async": lambda url, count: asyncio.run(_async(url, count)),
        "sync": _sync,
    }
    for name, face in faces.items():
        submitted_s, done_s = min(face(url, count) for _ in range(3))
        print(
            f"{name}: {count / submitted_s:,.0f} submits/s, {count / done_s:,.0f} durable/s,"
            f" {1e6 * submitted_s / count:.1f} us a submit"
        )
    server.terminate()


async def _async(url: str, count: int) -> tuple[float, float]:
    async with client.Client(url) as opened:
        log = opened.log("bench")
        begun = time.perf_counter()
        futures = [await log.submit(_PAYLOAD) for _ in range(count)]
        submitted = time.perf_counter()
        await asyncio.wait(futures)
        futures[-1].result()
        return submitted - begun, time.perf_counter() - begun


def _sync(url: str, count: int) -> tuple[float, float]:
    with sync.Client(url) as opened:
        log = opened.log("bench")
        begun = time.perf_counter()
        futures = [log.submit(_PAYLOAD) for _ in range(count)]
        submitted = time.perf_counter()
        wait(futures)
        futures[-1].result()
        return submitted - begun, time.perf_counter() - begun


def _serve(parent: Connection) -> None:
    async def append(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(
            {"first_offset": 0, "last_offset": 0, "ledger_id": 0, "entry_id": 0}
        )

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/logs/bench/entries", append)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        parent.send(f"http://127.0.0.1:{port}")
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
