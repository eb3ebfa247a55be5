"""Ledgers that are written, closed and deleted in a storm, and the judge of them."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError
from tests.cluster.restore.found import PAUSE_S, Found, answered
from tests.support.waiting import SETTLED_S, DeadlineMissed, until

WRITERS: Final = 3
APPENDS: Final = (5, 60)
"""A writer's ledger gets so many appends and is closed."""
KEPT: Final = 10
"""Of the newest ledgers; older ones are deleted."""


class LedgerClients:
    """Who writes ledgers, and what was acknowledged."""

    def __init__(self, client: Callable[[random.Random], Client], seed: int) -> None:
        """`client` makes a client that asks the gateways in an order of its own."""
        self._client, self._seed = client, seed
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
        self.is_open = False
        """Whether that ledger takes entries now, as far as is known."""

    def tasks(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Write until cancelled."""
        works = [*(self._write(number) for number in range(WRITERS)), self._keep(), self._delete()]
        return [group.create_task(work) for work in works]

    async def make_one(self) -> None:
        """Make, write and close a ledger, and delete another one: changes that only the newest database has."""

        async def is_made() -> bool:
            async with self._client(random.Random(self._seed)) as client:
                await self._fill(await client.create_ledger(), 2)
                await self._fill(await client.create_ledger(), 1)
                await self._delete_one(client, self._closed.pop())
            return True

        await until(is_made, "a ledger is made", SETTLED_S, passing=(QuorumLogError,))

    async def _write(self, number: int) -> None:
        dice = random.Random(f"writer-{self._seed}-{number}")
        while True:
            async with self._client(dice) as client:
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
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    ledger = await client.create_ledger()
                    while True:
                        await self._append(ledger)
                        self.kept += 1
                        self.is_open = True
                        await asyncio.sleep(PAUSE_S)
            self.is_open = False
            await asyncio.sleep(PAUSE_S)

    async def _delete(self) -> None:
        dice = random.Random(f"deleter-{self._seed}")
        while True:
            await asyncio.sleep(PAUSE_S)
            if len(self._closed) <= KEPT:
                continue
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    await self._delete_one(client, self._closed.pop(0))

    async def _delete_one(self, client: Client, number: int) -> None:
        self._doubtful.add(number)
        await client.delete_ledger(number)
        self._deleted.add(number)

    async def judge(self, found: Found) -> None:
        """Recover and read everything."""
        found.ledgers += len(self._entries)
        async with self._client(random.Random(self._seed)) as client:
            for number, entries in sorted(self._entries.items()):
                if number in self._deleted:
                    await _judge_deleted(client.ledger(number), found)
                elif number not in self._doubtful:
                    await _judge(client.ledger(number), entries, found)


async def _judge_deleted(ledger: Ledger, found: Found) -> None:
    what = f"ledger {ledger.ledger_id}"
    if await answered(ledger.info, f"{what} is there or gone") is not None:
        found.note_resurrected(what)


async def _judge(ledger: Ledger, entries: dict[int, bytes], found: Found) -> None:
    what = f"ledger {ledger.ledger_id}"
    row = await answered(ledger.recover, f"{what} is closed")
    last = -1 if row is None else int(row["last_entry"])
    if row is not None and max(entries, default=-1) > last:
        found.note_truncated(what, last, max(entries))
    stored: dict[int, bytes] = {}
    with contextlib.suppress(DeadlineMissed):
        while len(stored) <= last:
            page = await answered(partial(ledger.read, len(stored), limit=1000), f"{what} is read")
            if page is None or not page.entries:
                break
            stored |= {entry.entry_id: entry.payload for entry in page.entries}
    lost = [number for number in entries if stored.get(number) != entries[number]]
    if lost:
        found.note_lost(what, len(lost), lost[0])
