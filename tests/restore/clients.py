"""Clients of a cluster whose database goes back, and the judge of what was acknowledged to them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from quorumlog.client import Client, Ledger
from quorumlog.errors import NoSuchLedger, QuorumLogError
from tests.support.waiting import SETTLED_S, DeadlineMissed, until

T = TypeVar("T")

WRITERS: Final = 3
APPENDS: Final = (5, 60)
"""A writer's ledger gets so many appends and is closed."""
KEPT: Final = 10
"""Of the newest ledgers; older ones are deleted."""
PAUSE_S: Final = 0.02
"""Between requests: the storm wants restores, not entries."""
DEADLINE_S: Final = 20.0


@dataclass(slots=True)
class Found:
    """What the judge found."""

    ledgers: int = 0
    lost: int = 0
    """Acknowledged entries that cannot be read, or are others."""
    truncated: int = 0
    """Ledgers that end before an acknowledged entry."""
    resurrected: int = 0
    """Ledgers that were deleted, and are there."""
    details: list[str] = field(default_factory=list)


class Clients:
    """Who writes, and what was acknowledged. `acknowledged` and `kept` tell that they get on."""

    def __init__(self, gateways: Sequence[str], seed: int) -> None:
        self._gateways, self._seed = tuple(gateways), seed
        self._entries: dict[int, dict[int, bytes]] = {}
        """By ledger: its acknowledged entries."""
        self._closed: list[int] = []
        """Those that are closed and not deleted, the oldest first."""
        self._deleted: set[int] = set()
        """Those whose deletion was acknowledged."""
        self._doubtful: set[int] = set()
        """Those that somebody tried to delete."""
        self._count = 0
        self.acknowledged = 0
        self.kept = 0
        """Entries of the one ledger that stays open throughout."""

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write until the end of the block."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._write(number)) for number in range(WRITERS)]
            tasks += [group.create_task(self._keep()), group.create_task(self._delete())]
            yield
            for task in tasks:
                task.cancel()

    def client(self, dice: random.Random) -> Client:
        """A client that asks the gateways in an order of its own."""
        return Client(*dice.sample(self._gateways, len(self._gateways)), deadline_s=DEADLINE_S)

    async def made(self) -> None:
        """A ledger is made, written and closed: changes that only the newest database has."""

        async def is_made() -> bool:
            async with self.client(random.Random(self._seed)) as client:
                await self._fill(await client.create_ledger(), 2)
            return True

        await until(is_made, "a ledger is made", SETTLED_S, passing=(QuorumLogError,))

    async def _write(self, number: int) -> None:
        dice = random.Random(f"writer-{self._seed}-{number}")
        while True:
            async with self.client(dice) as client:
                # Refusals are what a database that went back is for.
                with contextlib.suppress(QuorumLogError):
                    await self._fill(await client.create_ledger(), dice.randint(*APPENDS))
            await asyncio.sleep(PAUSE_S)

    async def _fill(self, ledger: Ledger, appends: int) -> None:
        self._entries.setdefault(ledger.ledger_id, {})
        for _ in range(appends):
            await self._append(ledger)
            await asyncio.sleep(PAUSE_S)
        await ledger.close()
        self._closed.append(ledger.ledger_id)

    async def _append(self, ledger: Ledger) -> None:
        self._count += 1
        payload = b"%d:%d" % (self._seed, self._count)
        done = await ledger.append(payload)
        self._entries.setdefault(ledger.ledger_id, {})[done] = payload
        self.acknowledged += 1

    async def _keep(self) -> None:
        """Append to one ledger for as long as it is open."""
        dice = random.Random(f"keeper-{self._seed}")
        while True:
            async with self.client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    ledger = await client.create_ledger()
                    while True:
                        await self._append(ledger)
                        self.kept += 1
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    async def _delete(self) -> None:
        dice = random.Random(f"deleter-{self._seed}")
        while True:
            await asyncio.sleep(PAUSE_S)
            if len(self._closed) <= KEPT:
                continue
            number = self._closed.pop(0)
            self._doubtful.add(number)
            async with self.client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    await client.delete_ledger(number)
                    self._deleted.add(number)

    async def judged(self) -> Found:
        """Recover and read everything."""
        found = Found(ledgers=len(self._entries))
        async with self.client(random.Random(self._seed)) as client:
            for number, entries in sorted(self._entries.items()):
                if number in self._deleted:
                    await _judge_deleted(client.ledger(number), found)
                elif number not in self._doubtful:
                    await _judge(client.ledger(number), entries, found)
        return found


async def _judge_deleted(ledger: Ledger, found: Found) -> None:
    if await _answer(ledger.info, f"ledger {ledger.ledger_id} is there or gone") is not None:
        found.resurrected += 1
        found.details.append(f"resurrected: ledger {ledger.ledger_id}")


async def _judge(ledger: Ledger, entries: dict[int, bytes], found: Found) -> None:
    what = f"ledger {ledger.ledger_id}"
    row = await _answer(ledger.recover, f"{what} is closed")
    last = -1 if row is None else int(row["last_entry"])
    if row is not None and max(entries, default=-1) > last:
        found.truncated += 1
        found.details.append(f"truncated: {what} at {last}, {max(entries)} was acknowledged")
    stored: dict[int, bytes] = {}
    with contextlib.suppress(DeadlineMissed):
        while len(stored) <= last:
            page = await _answer(partial(ledger.read, len(stored), limit=1000), f"{what} is read")
            if page is None or not page.entries:
                break
            stored |= {entry.entry_id: entry.payload for entry in page.entries}
    lost = [number for number in entries if stored.get(number) != entries[number]]
    found.lost += len(lost)
    if lost:
        found.details.append(f"lost: {what}, {len(lost)} entries, {lost[0]} is the first")


async def _answer(ask: Callable[[], Awaitable[T]], what: str) -> T | None:
    """What is answered in the end; None where there is no such ledger."""

    async def answered() -> tuple[T | None]:
        try:
            return (await ask(),)
        except NoSuchLedger:
            return (None,)

    return (await until(answered, what, passing=(QuorumLogError,)))[0]
