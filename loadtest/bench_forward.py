"""`make bench-forward`: what an append to a log costs that comes to another gateway than the log's owner.

The same requests go to the owner and to the other one of two gateways by turns; CPU is of both gateways together, and the
bookies' besides, since forwarded appends are batched differently. It says whether several processes behind one port, of
which most requests reach the wrong one, would gain anything.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import aiohttp
import uvloop

from loadtest.bench.measure import KIB, Figures, Meter, appends, payload_of
from loadtest.cluster import running
from quorumlog.client.records import FRAMES, frames

_FIGURES: Final = ("entries/s", "p50 ms", "owner us", "other us", "bookies us")
_BATCH: Final = 100
_WORKS: Final = ((1, 1), (64, 1), (4, _BATCH))
"""Calls in flight, and the entries of a call."""


async def run(rounds: int, seconds: float) -> None:
    """Measure each way of writing at both gateways, round by round."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        running(None, bookies=3, gateways=2) as cluster,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        pids = {
            "owner": [cluster.pid("gateway-1")],
            "other": [cluster.pid("gateway-2")],
            "bookies": [cluster.pid(name) for name in cluster.names if name.startswith("bookie")],
        }
        log = f"/v1/logs/forward-{os.urandom(4).hex()}"
        payload = payload_of(KIB)

        async def ask(method: str, url: str, body: bytes, media: str) -> None:
            headers = {"Content-Type": media}
            async with session.request(method, url, data=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()

        owner = cluster.gateways[0] + log
        await ask("PUT", owner, b"{}", "application/json")
        await ask("POST", f"{owner}/records", payload, "application/octet-stream")
        for in_flight, count in _WORKS:
            media = FRAMES if count > 1 else "application/octet-stream"
            body = frames([payload] * count) if count > 1 else payload
            found: dict[str, list[Figures]] = {"owner": [], "other": []}
            for _ in range(rounds):
                for name, gateway in zip(found, cluster.gateways, strict=True):
                    url = f"{gateway}{log}/records"
                    found[name].append(
                        await appends(
                            Meter(pids),
                            partial(ask, "POST", url, body, media),
                            in_flight=in_flight,
                            seconds=seconds,
                            size=KIB,
                            count=count,
                        )
                    )
            for name, figures in found.items():
                what = "at its owner" if name == "owner" else "forwarded"
                _say(f"{in_flight} in flight, {count} a call, {what}: {_shown(figures)}")


def _shown(rounds: Sequence[Figures]) -> str:
    medians = {name: statistics.median(each[name] for each in rounds) for name in _FIGURES}
    return ", ".join(f"{value:,.4g} {name}" for name, value in medians.items())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(prog="make bench-forward", description=__doc__)
    parser.add_argument("--time", type=float, default=3.0, help="seconds of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    uvloop.run(run(given.rounds, given.time))


if __name__ == "__main__":
    main()
