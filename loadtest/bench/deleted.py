"""The cost of deleted ledgers' ids at a bookie, which keeps these ids (rule 16a). IDS= sets their
number.

Callers may choose ids, so the ids here are random and form no ranges. Each step opens the directory
in its own process, whose memory is then that of a bookie's store after a start. The last ids are
deleted one by one, as a collector does, and then compacted. All other ids are written as
compactions write them. On a machine with other work, CPU times are more reliable than other times.
"""

import argparse
import asyncio
import multiprocessing
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import quantiles
from time import perf_counter as clock
from time import process_time
from typing import Final

import psutil

from loadtest.bench.measure import Figures
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.program import Teller
from services.bookie.config import StoreOptions
from services.bookie.records import IDS_MAX
from services.bookie.space import Space
from services.bookie.store import Store

ONE_BY_ONE: Final = 100_000
LOOKUPS: Final = 20_001
"""Lookups of more ledgers than the store keeps in memory, so that it evicts them again."""
_ME: Final = "b1@1"
_MB: Final = 1_000_000


def ids(count: int) -> Iterator[int]:
    """Pseudo-random ids that form no ranges. Each call yields the same ids."""
    chance = random.Random(1)
    return (chance.getrandbits(62) for _ in range(count))


def _rss() -> float:
    return psutil.Process().memory_info().rss / _MB


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _sizes(directory: Path) -> Figures:
    """The sizes of the log and the index of a store that was shut down cleanly."""
    return {
        "log MB": _bytes_of(directory / "log") / _MB,
        "index MB": _bytes_of(directory / "index") / _MB,
    }


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[Store, float, float]]:
    """Open a store. Yields the store, the seconds of opening, and the additional memory in MB."""
    before, began = _rss(), clock()
    store = Store(directory, _ME, StoreOptions())
    yield store, clock() - began, _rss() - before


def _fatal(error: BaseException) -> None:
    raise SystemExit(f"the log can't be written: {error}")


def fill(directory: Path, count: int) -> Figures:
    """Write all ids but the last ones, as compactions write them."""

    async def write() -> None:
        store = Store(directory, _ME, StoreOptions())
        store.start(_fatal)
        left = ids(count)
        while some := list(islice(left, IDS_MAX)):
            await store.rewrite_deleted(some)
            await asyncio.to_thread(store.index.write, None, (), some)
        await store.stop()

    began = clock()
    asyncio.run(write())
    return {"filled in s": clock() - began} | _sizes(directory)


def restart(directory: Path, _count: int) -> Figures:
    """Measure a start, and the lookup of a new ledger's id at the first add to the ledger."""
    with _opened(directory) as (store, took, memory):
        memory_at_start = _rss()
        began = clock()
        assert not list(store.holdings.ledgers()), "the list of ledgers contains no deleted ledger"
        listing = clock() - began
        chance = random.Random(2)
        times = []
        cpu = process_time()
        for _ in range(LOOKUPS):
            ledger_id = chance.getrandbits(62)
            began = clock()
            store.ledger(ledger_id)
            times.append((clock() - began) * 1e6)
        cpu = process_time() - cpu
        store.holdings.evict_idle()
        cuts = quantiles(times, n=100)
        made = {
            "start s": took,
            "start, MB more": memory,
            "RSS after the start, MB": memory_at_start,
            "RSS after the lookups, MB": _rss(),
            "new ledger, µs p50": cuts[49],
            "new ledger, µs p99": cuts[98],
            "new ledger, CPU µs": cpu / LOOKUPS * 1e6,
            "list of ledgers ms": listing * 1e3,
        }
        store.close()
        return made


def delete(directory: Path, _count: int) -> Figures:
    """Measure the deletion of further ledgers one by one, and two compactions after it."""

    async def work() -> Figures:
        store = Store(directory, _ME, StoreOptions())
        store.start(_fatal)
        before = _bytes_of(directory / "log") - StoreOptions().segment_bytes
        chance = random.Random(3)
        began = clock()
        for number in range(ONE_BY_ONE):
            store.drop(chance.getrandbits(62), keep_stub=False)
            if number % 1000 == 999:
                await store.checkpoint()
        took = clock() - began
        await store.stop()
        made: Figures = {
            "deleted one by one, µs each": took / ONE_BY_ONE * 1e6,
            "deleted one by one, bytes of log each": (_bytes_of(directory / "log") - before)
            / ONE_BY_ONE,
        }
        for name in ("first", "second"):
            store = Store(directory, _ME, StoreOptions())
            store.start(_fatal)
            space = Space(store, bytes_per_s=1 << 40)
            began = clock()
            await space.free()
            made[f"{name} compaction s"] = clock() - began
            made[f"{name} compaction, MB written"] = store.counters["log_bytes"] / _MB
            began = clock()
            await space.free()
            made[f"{name} compaction again ms"] = (clock() - began) * 1e3
            made[f"{name} compaction, RSS MB"] = _rss()
            await store.stop()
        return made

    return asyncio.run(work())


def rebuild(directory: Path, _count: int) -> Figures:
    """Measure a rebuild of the index from the log."""
    shutil.rmtree(directory / "index")
    with _opened(directory) as (store, took, _):
        began = clock()
        store.holdings.write_index(store.position)
        made = {
            "rebuild s": took + clock() - began,
            "rebuild, CPU s": process_time(),
            "rebuild RSS MB": _rss(),
            "deleted": sum(1 for _ in store.index.deleted()),
        }
        store.close()
        return made


async def _steps(system: tuple[Path, int], teller: Teller) -> Figures:
    """Run all steps, each in its own process."""
    found: Figures = {}
    for step in (fill, restart, delete, rebuild):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found |= await asyncio.to_thread(pool.apply, step, system)
        teller.say(f"{system[1]:,}: {step.__name__} is done")
    return found


@asynccontextmanager
async def _directory(
    _folder: Path, _seconds: float, *, count: int
) -> AsyncIterator[tuple[Path, int]]:
    with tempfile.TemporaryDirectory(prefix="ql-deleted-") as folder:
        yield Path(folder), count


OPTIONS: Final = {"ids": (10_000_000, "number of deleted ledgers")}


def plan(asked: argparse.Namespace, teller: Teller) -> Plan:
    """Plan all steps without ids, and again with all ids."""
    counts = {"none": 0, "all": asked.ids}
    return Plan(
        [Work(name, "ids", _steps, (teller,)) for name in counts],
        {name: partial(_directory, count=count) for name, count in counts.items()},
        [Columns(f"{asked.ids:,} ids of deleted ledgers", is_turned=True)],
        is_apart=True,
    )
