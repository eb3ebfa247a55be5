"""`make bench`: one program for all benchmarks. `--list` prints their names. Without ONLY= it runs
`compare`.

A benchmark starts its systems, runs its measurements in rounds, and reports the medians as tables,
JSON and SVG. By default, the data is in the clone's build folder, and so on the clone's disk.
Systems that this machine lacks are left out, and the report names them. Ctrl-C or SIGTERM ends the
run with a report of the measurements until then.
"""

import argparse
import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console

from loadtest.bench.measure import Absent, Failed
from loadtest.bench.plan import Plan, Work
from loadtest.bench.report import Report, facts
from loadtest.program import Teller, arguments, build_folder

BENCHMARKS: Final = {
    "compare": ("loadtest.bench.compare", "quorumlog, JetStream and BookKeeper: rates, latencies, CPU, memory, goals"),
    "bookie": ("loadtest.bench.bookie", "one bookie while it is filled: rate, memory, restart, reads relative to the disk"),
    "compaction": ("loadtest.bench.compaction", "compaction of a log by key: bytes per CPU second, and concurrent appends"),
    "compression": ("loadtest.bench.compression", "bytes and CPU of compressed requests, responses and batches"),
    "consumers": ("loadtest.bench.consumers", "commits of consumers, and acks of JetStream; the cost of 10,000 consumers"),
    "deleted": ("loadtest.bench.deleted", "the cost of deleted ledgers' ids at a bookie: memory, restart, disk, compaction"),
    "durable-streams": ("loadtest.bench.durable_streams", "streams of quorumlog and of the Durable Streams server from npm"),
    "forward": ("loadtest.bench.forward", "the cost of an append that a gateway forwards to the log's owner"),
    "idle": ("loadtest.bench.idle", "memory and CPU of one gateway for open ledgers, logs and connections"),
    "keys": ("loadtest.bench.keys", "the newest record of a key, and of JetStream's subject; bytes of a read of one key"),
    "many": ("loadtest.bench.many", "the cost of an audit and of cluster status with 10,000 and 100,000 ledgers"),
    "metadata": ("loadtest.bench.metadata", "requests per second of the metadata service with few and with many ledgers"),
    "queues": ("loadtest.bench.queues", "claims and acknowledgements of work queues, and of JetStream's pull consumers"),
    "rebuild": ("loadtest.bench.rebuild", "the cost of rebuilding the metadata from the bookies with many ledgers"),
    "spark": ("loadtest.bench.spark", "rows per second that Spark writes to a log and reads back"),
    "streams": ("loadtest.bench.streams", "many Durable Streams that are opened, appended to once and closed"),
    "submit": ("loadtest.bench.submit", "the CPU of an append in the SDK, async and sync"),
    "tail": ("loadtest.bench.tail", "many readers that follow one ledger or log: completeness, latency, memory"),
    "tokens": ("loadtest.bench.tokens", "the cost of checking an access token per request at a gateway"),
}  # fmt: skip
"""Module and description of each benchmark. Modules are imported only when they run, to save memory."""
_WIDTH: Final = 160
"""Width of tables if the output is not a terminal."""
_COMMON: Final = {
    "list": (False, "print the names of the measurements, and end"),
    "json": (False, "print the figures as JSON"),
    "out": ("", "a folder for a JSON file and an SVG"),
}


async def measure(report: Report, folder: Path, teller: Teller) -> None:
    """Run all rounds, and add each result to the report at once.

    SIGTERM cancels the run like Ctrl-C, because a run in the background of a shell ignores SIGINT.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = asyncio.Event()

    def end() -> None:
        is_over.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    plan = report.plan
    names = list(dict.fromkeys(work.system for work in plan.works))
    for group in [[name] for name in names] if plan.is_apart else [names]:
        async with AsyncExitStack() as stack:
            systems: dict[str, Any] = {}
            for name in group:
                teller.say(f"starting {name}")
                running = plan.starts[name](folder, plan.seconds)
                try:
                    systems[name] = await stack.enter_async_context(running)
                except Absent as absent:
                    report.left_out[name] = str(absent)
                    teller.say(f"{name} is left out: {absent}")
            for number in range(plan.rounds):
                for work in in_order(plan, number):
                    if work.system in systems and work.name not in report.left_out:
                        teller.show(work.name)
                        await _measure(work, systems[work.system], report)
                        if is_over.is_set():  # a peer's library may have swallowed the cancellation
                            raise asyncio.CancelledError
                        teller.say(f"round {number + 1} of {plan.rounds}: {report.line(work)}")


def in_order(plan: Plan, number: int) -> list[Work]:
    """The measurements of a round, in order."""
    is_last = number == plan.rounds - 1
    works = [work for work in plan.works if is_last or not work.is_once]
    if not plan.takes_turns or number % 2 == 0:
        return works
    groups = (list(own) for _, own in groupby(works, lambda work: work.what))
    return [work for own in groups for work in reversed(own)]


async def _measure(work: Work, system: Any, report: Report) -> None:
    try:
        report.add(work, await work.run(system))
    except Absent as absent:
        report.left_out[work.name] = str(absent)
    except Failed as failed:
        report.fail(work, str(failed))
    except Exception as error:
        if work.system not in report.plan.may_fail:  # a peer's library may raise anything
            raise
        report.fail(work, repr(error))


def _chosen(given: list[str] | None) -> tuple[str, list[str], list[str]]:
    """Returns the benchmark in --only (or ""), the other words in --only, and other arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", action="append", default=[])
    asked, rest = parser.parse_known_args(given)
    names = [word for word in asked.only if word in BENCHMARKS]
    if len(names) > 1:
        raise SystemExit(f"one benchmark at a time, not {' and '.join(names)}")
    words = [word for word in asked.only if word not in BENCHMARKS]
    return (*names, "compare" if words else "")[0], words, rest


def _listed() -> str:
    width = max(map(len, BENCHMARKS))
    lines = (f"{name:{width}}  {about}" for name, (_, about) in BENCHMARKS.items())
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Run a benchmark. Returns the status: 130 for Ctrl-C, 143 for SIGTERM, 1 without results."""
    name, words, rest = _chosen(given)
    if not name and rest == ["--list"]:
        print(_listed())
        return 0
    name = name or "compare"
    module = import_module(BENCHMARKS[name][0])
    about = f"{module.__doc__}\n\n--only NAME: run only measurements whose names contain NAME; repeatable"
    asked = arguments(f"make bench ONLY={name}", about, {**module.OPTIONS, **_COMMON}, rest)
    console, progress = Console(highlight=False), Console(highlight=False, stderr=asked.json)
    if not console.is_terminal:
        console.width = _WIDTH
    with Teller(progress) as teller:
        plan: Plan = module.plan(asked, teller)
        works = [
            work
            for work in plan.works
            if not words or any(word.casefold() in work.name.casefold() for word in words)
        ]
        if asked.list:
            print("\n".join(work.name for work in works))
            return 0
        if not works:
            raise SystemExit(
                f"no measurement matches {', '.join(words)}: --list prints all benchmarks,"
                f" --only {name} --list prints the measurements of this one"
            )
        report = Report(name, facts(build_folder()), replace(plan, works=works))
        try:
            status = _run(report, teller)
        finally:
            report.show(console, is_json=asked.json)
            if asked.out:
                report.write(Path(asked.out))
    return status


def _run(report: Report, teller: Teller) -> int:
    build = build_folder()
    try:
        with (
            TemporaryDirectory(prefix="bench-", dir=build, ignore_cleanup_errors=True) as folder,
            asyncio.Runner(loop_factory=report.plan.loop) as runner,
        ):
            runner.run(measure(report, Path(folder), teller))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0 if report.results else 1


if __name__ == "__main__":
    sys.exit(main())
