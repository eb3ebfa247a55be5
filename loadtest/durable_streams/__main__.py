"""`make bench-durable-streams`: streams of a gateway with three synced copies, beside the Durable Streams server of npm
with one, in one run.

Both get the same requests of the same client, in turns: each round runs every measurement of both, and medians of rounds
count. Times in seconds say little on a shared machine; the CPU that the servers take for a record is disturbed least. Where
there is no Node, or no way to npm, theirs is left out.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
import uvloop

from loadtest.bench.measure import Absent, Failed, Figures
from loadtest.bench.report import facts
from loadtest.durable_streams.systems import ours, theirs
from loadtest.durable_streams.works import WORKS, Load, Scale, Work
from services.local.config import ROOT

_BUILD: Final = ROOT / "build"
_COLUMNS: Final = (
    "servers", "records/s", "MB/s", "p50 ms", "p99 ms", "gateway us", "servers us", "others us", "all but client us",
    "RSS of the first MB",
)  # fmt: skip
Results = dict[tuple[str, str], list[Figures]]


async def run(scale: Scale, rounds: int, works: Sequence[Work], folder: Path) -> Results:
    """Run all rounds."""
    results: Results = {}
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        )
        loads = []
        for begin in (ours, theirs):
            try:
                system = await stack.enter_async_context(begin(folder))
            except Absent as absent:
                print(f"theirs is left out: {absent}")
            else:
                loads.append(Load(system, session, scale))
        for number in range(rounds):
            for work in works:
                for load in loads if number % 2 == 0 else loads[::-1]:
                    try:
                        figures = await work.run(load)
                    except (Failed, aiohttp.ClientError, OSError, ExceptionGroup) as error:
                        print(f"{work.name}, {load.system.name}: left out of a round: {error!r}")
                        continue
                    results.setdefault((work.name, load.system.name), []).append(figures)
                    shown = f"{figures[work.rate]:.0f} {work.rate}"
                    print(
                        f"round {number + 1}: {work.name}, {load.system.name}: {shown}", flush=True
                    )
            # What there is until now, for a run that is broken off.
            print(table(results), flush=True)
    return results


def table(results: Results) -> str:
    """Medians of rounds, as a table for a page."""
    rows = [["", *_COLUMNS], ["---"] * (len(_COLUMNS) + 1)]
    for (work, system), rounds in results.items():
        rows.append([work, system, *_cells(rounds)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(rounds: Sequence[Figures]) -> list[str]:
    def of(*names: str) -> str:
        given = [sum(figures.get(name, 0.0) for name in names) for figures in rounds]
        found = statistics.median(given)
        return f"{found:,.0f}" if found >= 10 else f"{found:.1f}" if found else ""

    first = "gateway RSS" if "gateway RSS" in rounds[0] else "servers RSS"
    servers = ("gateway us", "servers us", "others us")
    return [of("entries/s"), of("MB/s"), of("p50 ms"), of("p99 ms"), *map(of, servers), of(*servers), of(first)]  # fmt: skip


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="make bench-durable-streams", description=__doc__)
    parser.add_argument("--time", type=float, default=3.0, help="seconds of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-mib", type=int, default=32, help="of the streams that are read")
    parser.add_argument("--readers", type=int, default=500, help="that follow one stream")
    parser.add_argument("--records", type=int, default=60, help="that each of them gets")
    parser.add_argument("--rate", type=float, default=20.0, help="of those, a second")
    parser.add_argument("--only", default="", help="measurements whose names contain this")
    given = parser.parse_args()
    works = [work for work in WORKS if given.only in work.name]
    scale = Scale(given.time, given.read_mib << 20, given.readers, given.records, given.rate)
    _BUILD.mkdir(exist_ok=True)
    print(", ".join(f"{name} {fact}" for name, fact in facts(_BUILD).items()))
    with (
        TemporaryDirectory(prefix="bench-", dir=_BUILD, ignore_cleanup_errors=True) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        results = runner.run(run(scale, given.rounds, works, Path(folder)))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
