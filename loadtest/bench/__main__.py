"""`make bench`: what quorumlog does in a second, beside its peers in the same run.

Measurements take turns: each round runs all of them, ours and the peers', on one machine, and medians of rounds count.
Entries are of 1 KiB where nothing else is said, have three copies, and are acknowledged by a majority after fsync; the
data lies in the repository's build folder, on the disk that the clone is on. What is not on this machine is left out
and named; what a peer does not measure in a round is left out of that round. Ctrl-C, or SIGTERM, ends the run with what
was measured until then.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop
from rich.console import Console

from loadtest.bench.disk import Disk
from loadtest.bench.measure import Absent, Failed
from loadtest.bench.ours import Ours
from loadtest.bench.report import Report, facts
from loadtest.bench.works import PEERS, WORKS, Work
from loadtest.bookkeeper.peer import BookKeeper
from loadtest.jetstream import JetStream
from services.local.config import ROOT

Start = Callable[[Path, float], AbstractAsyncContextManager[Any]]
_WIDTH: Final = 160
"""Columns of tables that no terminal bounds."""
_BUILD: Final = ROOT / "build"


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--time", type=float, default=3.0, help="seconds of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", default=[], help="measurements whose names contain this; repeatable"
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the measurements")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, help="a folder for a JSON file and an SVG")
    parser.add_argument(
        "--tls",
        action="store_true",
        default=os.environ.get("TLS", "") not in ("", "0"),
        help="mutual TLS between the gateways and the bookies; this program talks to the gateway without",
    )
    return parser.parse_args(given)


async def measure(
    report: Report, starts: Mapping[str, Start], folder: Path, console: Console
) -> None:
    """Run all rounds; what one gave is in the report at once. SIGTERM cancels it, as Ctrl-C does.

    A run in the background of a shell ignores SIGINT.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = asyncio.Event()

    def end() -> None:
        is_over.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    async with AsyncExitStack() as stack:
        systems: dict[str, Any] = {}
        for name in dict.fromkeys(work.system for work in report.works):
            console.print(f"starting {name}")
            running = starts[name](folder, report.seconds)
            try:
                systems[name] = await stack.enter_async_context(running)
            except Absent as absent:
                report.left_out[name] = str(absent)
                console.print(f"{name} is left out: {absent}")
        for number in range(report.rounds):
            for work in report.works:
                if work.system in systems and work.name not in report.left_out:
                    with console.status(work.name):
                        await _measure(work, systems[work.system], report)
                    if is_over.is_set():  # a peer's library may have swallowed the cancellation
                        raise asyncio.CancelledError
                    line = f"round {number + 1} of {report.rounds}: {report.line(work)}"
                    console.print(line, soft_wrap=True)


async def _measure(work: Work, system: Any, report: Report) -> None:
    try:
        report.add(work, await work.run(system))
    except Absent as absent:
        report.left_out[work.name] = str(absent)
    except Failed as failed:
        report.fail(work, str(failed))
    except Exception as error:
        if work.system not in PEERS:  # ours must not fail; a peer's library may raise anything
            raise
        report.fail(work, repr(error))


def main(given: list[str] | None = None) -> int:
    """Measure and report; status 130 after Ctrl-C, 143 after SIGTERM."""
    asked = _arguments(given)
    words = [word.casefold() for word in asked.only]
    works = [
        work
        for work in WORKS
        if not words or any(word in work.name.casefold() for word in words)
    ]  # fmt: skip
    if asked.list:
        print("\n".join(work.name for work in works))
        return 0
    if not works:
        raise SystemExit(f"no measurement is named by {', '.join(asked.only)}; --list names all")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    # Progress stays apart from figures that another program reads.
    progress = Console(highlight=False, stderr=asked.json)
    starts: dict[str, Start] = {
        "disk": Disk.running,
        "quorumlog": partial(Ours.running, tls=asked.tls),
        "JetStream": JetStream.running,
        "BookKeeper": BookKeeper.running,
    }
    _BUILD.mkdir(exist_ok=True)
    report = Report(facts(_BUILD), works, asked.time, asked.rounds, is_tls=asked.tls)
    status = 0
    try:
        with (
            TemporaryDirectory(prefix="bench-", dir=_BUILD, ignore_cleanup_errors=True) as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(measure(report, starts, Path(folder), progress))
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except asyncio.CancelledError:
        status = 128 + signal.SIGTERM
    finally:
        report.show(console, is_json=asked.json)
        if asked.out is not None:
            report.write(asked.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
