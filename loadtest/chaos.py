"""`make chaos TIME=<seconds> SEED=<n>`: kill and pause processes at random under writers.

Each writer appends to a ledger of its own until it meets an error that ends the ledger; then the
ledger is recovered, through whichever gateway lives, and judged:
  - each acknowledged entry is there, under the id of its acknowledgement, byte for byte;
  - each entry that is there was sent to this ledger, and is there once.
At the end everything is healed and every ledger is judged again. Exit status 0 only if all held.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from loadtest.cluster import Cluster, running
from loadtest.waiting import until
from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError

_WRITERS: Final = 4
_HEALED_S: Final = 180.0
"""For the cluster to serve everything again after the last fault."""


class Violation(Exception):
    """What was acknowledged is not there, or what is there was never sent."""


@dataclass(slots=True)
class History:
    """What one ledger's writer sent and was told."""

    ledger_id: int
    sent: set[bytes] = field(default_factory=set)
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    end: int | None = None
    """The last entry, once somebody was told it; it never changes."""

    def judge(self, entries: list[tuple[int, bytes]], end: int) -> None:
        """Raise Violation where the rules above do not hold."""
        found = dict(entries)
        for entry_id, payload in self.acknowledged.items():
            if found.get(entry_id) != payload:
                raise Violation(f"ledger {self.ledger_id}: acknowledged entry {entry_id} is lost")
        if [entry_id for entry_id, _ in entries] != [*range(end + 1)]:
            raise Violation(f"ledger {self.ledger_id}: entries are not 0 to {end}, in order")
        counts = Counter(payload for _, payload in entries)
        for payload, count in counts.items():
            if payload not in self.sent or count > 1:
                raise Violation(f"ledger {self.ledger_id}: {payload!r} is there {count} times")
        if self.end not in (None, end):
            raise Violation(f"ledger {self.ledger_id} ended at {self.end}, and now at {end}")
        self.end = end


class Chaos:
    """Writers, faults, and the judgement."""

    def __init__(self, cluster: Cluster, seed: int, console: Console) -> None:
        self._cluster = cluster
        self._seed = seed
        self._random = random.Random(seed)
        self._console = console
        self._histories: list[History] = []
        self._over = asyncio.Event()
        self.acknowledged = 0
        self.faults: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Hurt the cluster for some time, heal it, judge."""
        async with asyncio.TaskGroup() as group:
            for number in range(_WRITERS):
                group.create_task(self._write(number))
            await self._hurt(seconds)
            self._over.set()
        for history in self._histories:
            await self._judge(history)
        self._console.print(
            f"{len(self._histories)} ledgers, {self.acknowledged:,} acknowledged entries, "
            f"faults: {dict(self.faults)}: everything acknowledged is there"
        )

    # --- faults ----------------------------------------------------------------------------------

    async def _hurt(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        victims = [name for name in self._cluster.names if name != "autorecovery-1"]
        while time.monotonic() < end:
            await asyncio.sleep(self._random.uniform(0.5, 3))
            name = self._random.choice(victims)
            is_store = name in ("postgres", "redis")
            kind = "kill" if is_store else self._random.choice(("kill", "pause", "terminate"))
            self.faults[f"{kind} {name.partition('-')[0]}"] += 1
            self._console.print(f"{kind} {name}")
            pause_s = self._random.uniform(0, 4)
            if kind == "pause":
                self._cluster.pause(name)
                await asyncio.sleep(pause_s)
                self._cluster.resume(name)
                continue
            if kind == "terminate":
                self._cluster.terminate(name)
            else:
                await self._cluster.kill(name)
            await asyncio.sleep(pause_s)
            await self._cluster.ended(name)
            await self._cluster.restart(name)

    # --- writers ---------------------------------------------------------------------------------

    async def _write(self, number: int) -> None:
        choice = random.Random(f"{self._seed} {number}")
        serial = 0
        while not self._over.is_set():
            async with self._client(choice) as client:
                try:
                    ledger = await client.create_ledger()
                except QuorumLogError:
                    continue
                history = History(ledger.ledger_id)
                self._histories.append(history)
                try:
                    while not self._over.is_set() and choice.random() > 0.01:
                        payloads = [
                            b"%d:%d:%d" % (number, serial + step, choice.getrandbits(64))
                            for step in range(choice.randrange(1, 50))
                        ]
                        serial += len(payloads)
                        await self._append(ledger, history, payloads)
                except QuorumLogError as error:
                    self._console.print(f"  ledger {ledger.ledger_id}: {error.code}")
            await self._judge(history)

    async def _append(self, ledger: Ledger, history: History, payloads: list[bytes]) -> None:
        history.sent.update(payloads)
        done = await ledger.append_batch(payloads)
        history.acknowledged |= dict(enumerate(payloads, done.first_entry))
        self.acknowledged += len(payloads)

    async def _judge(self, history: History) -> None:
        """Recover a ledger, read it, and compare; as often as it takes while things are down."""
        choice = random.Random(history.ledger_id)

        async def read() -> tuple[list[tuple[int, bytes]], int]:
            async with self._client(choice) as client:
                ledger = client.ledger(history.ledger_id)
                end = int((await ledger.recover())["last_entry"])
                return [(e.entry_id, e.payload) async for e in ledger.entries()], end

        what = f"ledger {history.ledger_id} is recovered and read"
        entries, end = await until(read, what, _HEALED_S, passing=(QuorumLogError,))
        history.judge(entries, end)

    @asynccontextmanager
    async def _client(self, choice: random.Random) -> AsyncIterator[Client]:
        gateways = choice.sample(self._cluster.gateways, len(self._cluster.gateways))
        async with Client(*gateways, deadline_s=10) as client:
            yield client


async def _run(seconds: float, seed: int, console: Console) -> None:
    async with running(None, bookies=5, gateways=2) as cluster:
        await Chaos(cluster, seed, console).run(seconds)


def main() -> None:
    """Run with SEED, or with one that is printed."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 32))
    seconds = float((os.environ.get("TIME") or "60").removesuffix("s"))
    console = Console(highlight=False)
    console.print(f"SEED={seed} (faults fall where they fell; what they meet differs)")
    asyncio.run(_run(seconds, seed, console))


if __name__ == "__main__":
    main()
