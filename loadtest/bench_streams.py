"""`make bench-streams`: what many small streams of the Durable Streams protocol cost, of one message each.

The streams are opened, appended to, and closed, each step for all of them before the next: rates, the memory (RSS) that each
step adds to the gateways, the bookies and the metadata service for a stream, and the CPU of an idle second after it. The client runs
on the same machine.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp
import uvloop

from loadtest.bench_idle import WATCHED, Watch, opened, say
from loadtest.cluster import running

_DONE: Final = (200, 201, 204)
_AGAIN: Final = (429, 503, 504)
"""A machine that others use may refuse a request, which is then sent again."""
_PAUSE_S: Final = 0.1
_TYPE: Final = {"Content-Type": "application/json"}
_MESSAGE: Final = b'{"user":42,"text":"a small message of some hundred bytes, as a chat or the answer of a model has them"}'


async def run(streams: int, seconds: float) -> None:
    """Do all steps, and say what each costs."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running(None, bookies=3, gateways=2))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        watch = Watch(cluster, seconds)

        async def ask(method: str, number: int, **more: Any) -> None:
            # Streams are spread over the gateways, and each stays at one.
            gateway = cluster.gateways[number % len(cluster.gateways)]
            url = f"{gateway}/v1/stream/bench/{number}"
            while True:
                async with session.request(method, url, **more) as answer:
                    if answer.status in _DONE:
                        return
                    assert answer.status in _AGAIN, (answer.status, await answer.text())
                await asyncio.sleep(_PAUSE_S)

        async def create(number: int) -> None:
            await ask("PUT", number, headers=_TYPE)

        async def append(number: int) -> None:
            await ask("POST", number, headers=_TYPE, data=_MESSAGE)

        async def close(number: int) -> None:
            await ask("POST", number, headers={"Stream-Closed": "true"})

        async def read(number: int) -> None:
            await ask("GET", number)

        await create(streams)
        await append(streams)
        say(f"nothing is there: {_shown(watch)}; idle: {await watch.idle()}")
        for what, step in (
            ("opened", create),
            ("appended to once", append),
            ("closed", close),
            ("read", read),
        ):
            await _step(streams, what, step, watch)


async def _step(
    streams: int, what: str, step: Callable[[int], Awaitable[None]], watch: Watch
) -> None:
    before = {kind: watch.memory(kind) for kind in WATCHED}
    began_s = time.perf_counter()
    await opened(streams, step)
    rate = streams / (time.perf_counter() - began_s)
    idle = await watch.idle()
    each = ", ".join(
        f"{kind} {(watch.memory(kind) - before[kind]) / streams / 1e3:.1f} KB" for kind in WATCHED
    )
    say(
        f"{streams:,} streams {what}: {rate:.0f}/s; each adds {each}; {_shown(watch)}; idle: {idle}"
    )


def _shown(watch: Watch) -> str:
    return ", ".join(f"{kind} {watch.memory(kind) / 1e6:.0f} MB" for kind in WATCHED)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(prog="make bench-streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--time", type=float, default=10.0, help="seconds of an idle time")
    given = parser.parse_args()
    uvloop.run(run(given.streams, given.time))


if __name__ == "__main__":
    main()
