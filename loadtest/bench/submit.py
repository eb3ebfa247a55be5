"""The cost of an append in the SDK, with a server that responds at once instead of a gateway.

The async and the sync client submit COUNT records of 100 bytes to a server in another process. Then
tasks that wait for each append send COUNT records of 1 KiB. The figures show the SDK's own cost,
from the best of three runs. The CPU figures are valid on a busy machine too.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import wait
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from aiohttp import web

from loadtest.bench.measure import Figures, for_each
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.ports import free_ports
from loadtest.program import Teller
from quorumlog import client, header
from quorumlog.client import sync

_PAYLOAD = b"x" * 100
_LARGER = b"x" * 1024
_IN_FLIGHT = (1, 64, 256, 2000)
_SLOWER = 10
"""How many times fewer records a single task sends, because one append at a time takes longer."""
_TRIES: Final = 3


@asynccontextmanager
async def _server(_folder: Path, _seconds: float) -> AsyncIterator[str]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    yield ours.recv()
    server.terminate()


async def _submits(url: str, count: int, *, is_async: bool) -> Figures:
    """Measure `Log.submit` of the async or the sync client."""
    tries = []
    for _ in range(_TRIES):
        begun = time.process_time()
        taken = await _async(url, count) if is_async else await asyncio.to_thread(_sync, url, count)
        tries.append((*taken, time.process_time() - begun))
    submitted_s, done_s, cpu_s = min(tries)
    return {
        "submits/s": count / submitted_s,
        "durable/s": count / done_s,
        "us a submit": 1e6 * submitted_s / count,
        "CPU us": 1e6 * cpu_s / count,
    }


async def _appends(url: str, count: int, tasks: int) -> Figures:
    """Measure `Log.append` by a number of concurrent tasks, each with one call at a time."""
    done_s, cpu_s = min([await _waiting(url, count, tasks) for _ in range(_TRIES)])
    return {"durable/s": count / done_s, "CPU us": 1e6 * cpu_s / count}


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
    """Run tasks that wait for each append before the next. Returns seconds, and CPU seconds."""
    async with client.Client(url) as opened:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        await for_each(repeat(_LARGER, count), opened.log("bench").append, tasks)
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


OPTIONS: Final = {"count": (50_000, "number of records")}
_FIGURES: Final = ("submits/s", "durable/s", "us a submit", "CPU us")


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan `submit` of both clients, and `append` with several numbers of tasks."""
    count: int = asked.count
    works = [
        Work("SDK", "submit, async", partial(_submits, is_async=True), (count,)),
        Work("SDK", "submit, sync", partial(_submits, is_async=False), (count,)),
    ]
    for tasks in _IN_FLIGHT:
        sent = count if tasks > 1 else count // _SLOWER
        works.append(Work("SDK", f"append, {tasks} in flight", _appends, (sent, tasks)))
    return Plan(
        works,
        {"SDK": _server},
        (Columns("the best of three", _FIGURES),),
        conditions=f"{count:,} records",
        loop=asyncio.new_event_loop,
    )
