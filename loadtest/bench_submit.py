"""What an append costs in the SDK, against a gateway that answers at once.

`make bench-submit COUNT=50000`: both faces submit COUNT records of 100 bytes to a server in
another process, and tasks that wait for each of their appends send as many of 1 KiB. The figures
are the SDK's own cost; the CPU holds on a busy machine too.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from itertools import repeat
from multiprocessing import get_context
from multiprocessing.connection import Connection

from aiohttp import web

from loadtest.ports import free_ports
from quorumlog import client, header
from quorumlog.client import sync

_PAYLOAD = b"x" * 100
_LARGER = b"x" * 1024
_IN_FLIGHT = (1, 64, 256, 2000)
_SLOWER = 10
"""One append at a time takes so many times longer: it sends so many times less."""


def main() -> None:
    """Print what both faces and the waiting tasks reach, the best of three runs each."""
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
        submitted_s, done_s, cpu_s = min(_with_cpu(face, url, count) for _ in range(3))
        print(
            f"{name}: {count / submitted_s:,.0f} submits/s, {count / done_s:,.0f} durable/s,"
            f" {1e6 * submitted_s / count:.1f} us a submit, {1e6 * cpu_s / count:.1f} us of CPU"
        )
    for tasks in _IN_FLIGHT:
        sent = count if tasks > 1 else count // _SLOWER
        done_s, cpu_s = min(asyncio.run(_waiting(url, sent, tasks)) for _ in range(3))
        print(
            f"append, {tasks} in flight: {sent / done_s:,.0f}/s, {1e6 * cpu_s / sent:.1f} us of CPU"
        )
    server.terminate()


def _with_cpu(
    face: Callable[[str, int], tuple[float, float]], url: str, count: int
) -> tuple[float, float, float]:
    begun = time.process_time()
    return *face(url, count), time.process_time() - begun


async def _async(url: str, count: int) -> tuple[float, float]:
    async with client.Client(url) as opened:
        log = opened.log("bench")
        begun = time.perf_counter()
        futures = [await log.submit(_PAYLOAD) for _ in range(count)]
        submitted = time.perf_counter()
        await asyncio.wait(futures)
        futures[-1].result()
        return submitted - begun, time.perf_counter() - begun


async def _waiting(url: str, count: int, tasks: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of `append` by tasks that wait for one before the next."""
    async with client.Client(url) as opened:
        log, left = opened.log("bench"), repeat(_LARGER, count)

        async def work() -> None:
            for payload in left:
                await log.append(payload)

        begun, begun_cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(work())
        return time.perf_counter() - begun, time.process_time() - begun_cpu


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
    answer = '{"first_offset":0,"last_offset":0,"ledger_id":0,"entry_id":0}'

    async def append(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text=answer, content_type="application/json")

    async def socket(request: web.Request) -> web.WebSocketResponse:
        opened = web.WebSocketResponse(compress=False, protocols=(header.APPENDS_PROTOCOL,))
        await opened.prepare(request)
        async for _ in opened:
            await opened.send_str(answer)
        return opened

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/logs/bench/records", append)
        app.router.add_get("/v1/logs/bench/ws", socket)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        parent.send(f"http://127.0.0.1:{port}")
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
