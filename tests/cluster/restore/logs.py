"""A log with producers, transactions and truncations in a storm, logs that are deleted, and the judge of them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from quorumlog.client import Client, Producer, Transaction
from quorumlog.errors import NoSuchTransaction, QuorumLogError, TransactionAborted
from tests.cluster.restore.found import PAUSE_S, Found, answered
from tests.support.waiting import SETTLED_S, until

LOG: Final = "storm"
ROLL_ENTRIES: Final = 25
TRUNCATED_EVERY: Final = 80
"""Records between two truncations, which leave as many."""
SETTLES: Final = 20
"""How often a producer asks what became of a request."""


@dataclass(slots=True)
class Begun:
    """A transaction, its sealed ledger, and the records in it."""

    transaction: str
    ledger_id: int
    values: list[bytes] = field(default_factory=list)


class LogClients:
    """Who writes the log, and what was acknowledged."""

    def __init__(self, client: Callable[[random.Random], Client], seed: int, deleters: int) -> None:
        """`client` makes a client that asks the gateways in an order of its own; `deleters` delete logs of theirs."""
        self._client, self._seed, self._deleters = client, seed, deleters
        self._records: dict[int, bytes] = {}
        """By offset: the acknowledged records."""
        self._aborted: set[bytes] = set()
        """Records of transactions whose abort was told."""
        self._first_offset = 0
        """What is below was truncated, by an acknowledged request."""
        self._doubtful_below = 0
        """What is below may have been truncated, by a request whose outcome nobody knows."""
        self._deleted: list[str] = []
        """Logs whose deletion was acknowledged."""
        self._appended = {LOG}
        """Logs with an acknowledged record."""
        self._count = 0
        self.committed = 0

    async def create(self) -> None:
        """Make the log."""
        async with self._client(random.Random(self._seed)) as client:
            await client.create_log(LOG, roll_entries=ROLL_ENTRIES)

    def tasks(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Write until cancelled."""
        works = [self._produce(0), self._produce(1), self._publish(), self._truncate()]
        works += map(self._delete_logs, range(self._deleters))
        return [group.create_task(work) for work in works]

    def _value(self) -> bytes:
        self._count += 1
        return b"%d:%d" % (self._seed, self._count)

    # --- producers -------------------------------------------------------------------------------

    async def _produce(self, number: int) -> None:
        dice = random.Random(f"producer-{self._seed}-{number}")
        while True:
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    producer = client.log(LOG).producer()
                    is_known = True
                    while is_known:
                        is_known = await self._send(producer)
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    async def _send(self, producer: Producer) -> bool:
        """Append one record; False if nobody knows what became of it."""
        value = self._value()
        try:
            done = await producer.append(value)
        except QuorumLogError:
            return await self._settle(producer, value)
        self._records[done.first_offset] = value
        return True

    async def _settle(self, producer: Producer, value: bytes) -> bool:
        """Repeat the request, as a producer does that wants to know."""
        for _ in range(SETTLES):
            with contextlib.suppress(QuorumLogError):
                done = await producer.settle()
                if done is not None:
                    self._records[done.first_offset] = value
                return True
            await asyncio.sleep(PAUSE_S)
        return False

    # --- transactions ----------------------------------------------------------------------------

    async def _publish(self) -> None:
        dice = random.Random(f"publisher-{self._seed}")
        while True:
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    begun = await self._begin(client)
                    await asyncio.sleep(PAUSE_S)
                    end = self._abort if dice.random() < 0.3 else self._commit
                    await end(client.transaction(begun.transaction), begun)
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def spanning(self) -> AsyncIterator[None]:
        """Of two transactions that are open in the block, one is committed behind it, and the other aborted."""
        async with self._client(random.Random(self._seed)) as client:

            async def begun() -> Begun:
                return await self._begin(client)

            passing = (QuorumLogError,)
            one = await until(begun, "a transaction is begun", SETTLED_S, passing=passing)
            two = await until(begun, "a transaction is begun", SETTLED_S, passing=passing)
            yield
            for end, each in ((self._commit, one), (self._abort, two)):

                async def ended(end: Any = end, each: Begun = each) -> bool:
                    await end(client.transaction(each.transaction), each)
                    return True

                await until(ended, "a transaction is ended", SETTLED_S, passing=passing)

    async def _begin(self, client: Client) -> Begun:
        transaction = await client.begin(LOG, expires_in_s=60)
        ledger = await transaction.ledger()
        begun = Begun(transaction.transaction_id, ledger.ledger_id)
        for _ in range(3):
            begun.values.append(self._value())
            await ledger.append(begun.values[-1])
        await ledger.close()
        return begun

    async def _commit(self, transaction: Transaction, begun: Begun) -> None:
        try:
            done = await transaction.commit(begun.ledger_id)
        except TransactionAborted:
            self._aborted |= set(begun.values)
            return
        first = int(done["first_offset"])
        self._records |= dict(enumerate(begun.values, start=first))
        self.committed += 1

    async def _abort(self, transaction: Transaction, begun: Begun) -> None:
        # A repeat may come after the tidying of what ended long ago.
        with contextlib.suppress(NoSuchTransaction):
            await transaction.abort()
        self._aborted |= set(begun.values)

    # --- what goes -------------------------------------------------------------------------------

    async def _truncate(self) -> None:
        dice = random.Random(f"truncater-{self._seed}")
        while True:
            await asyncio.sleep(PAUSE_S)
            end = max(self._records, default=-1)
            if end - self._first_offset < 2 * TRUNCATED_EVERY:
                continue
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    self._doubtful_below = end - TRUNCATED_EVERY
                    shown = await client.log(LOG).truncate(self._doubtful_below)
                    self._first_offset = max(self._first_offset, int(shown["first_offset"]))
                    self._doubtful_below = self._first_offset

    async def _delete_logs(self, deleter: int) -> None:
        dice = random.Random(f"log-deleter-{self._seed}-{deleter}")
        number = 0
        while True:
            number += 1
            async with self._client(dice) as client:
                with contextlib.suppress(QuorumLogError):
                    await self._delete_log(client, f"gone-{deleter}-{number}")
            await asyncio.sleep(PAUSE_S)

    async def _delete_log(self, client: Client, name: str) -> None:
        log = await client.create_log(name, roll_entries=2)
        for _ in range(5):
            await log.append(self._value())
            self._appended.add(name)
        await log.delete()
        self._deleted.append(name)

    def is_empty(self, name: str) -> bool:
        """Whether nothing was acknowledged of a log but its creation."""
        return name not in self._appended

    async def is_deleted_again(self, name: str) -> bool:
        """Delete a log whose deletion was acknowledged and got lost; False if it was not."""
        if name not in self._deleted:
            return False
        async with self._client(random.Random(self._seed)) as client:
            await answered(client.log(name).delete, f"log {name} is deleted again")
        return True

    # --- the judge -------------------------------------------------------------------------------

    async def judge(self, found: Found) -> None:
        """Read the whole log."""
        async with self._client(random.Random(self._seed)) as client:
            for name in self._deleted:
                if await answered(client.log(name).info, f"log {name} is there or gone"):
                    found.note_resurrected(f"log {name}")
            shown = await answered(client.log(LOG).info, "the log is there")
            stored = {} if shown is None else await self._stored(client)
        found.ledgers += 0 if shown is None else len(shown["ledgers"])
        first, end = min(stored, default=0), max(stored, default=-1)
        if first < self._first_offset:
            found.note_resurrected(f"records from {first} on, below {self._first_offset}")
        kept = {at: value for at, value in self._records.items() if at >= self._doubtful_below}
        if max(kept, default=-1) > end:
            found.note_truncated("the log", end, max(kept))
        lost = sorted(at for at, value in kept.items() if stored.get(at) != value)
        if lost:
            found.note_lost("the log", len(lost), lost[0])
        for value in self._aborted.intersection(stored.values()):
            found.note_resurrected(f"record {value!r} of an aborted transaction")
        if len(set(stored.values())) < len(stored):
            found.note_resurrected(f"{len(stored) - len(set(stored.values()))} records, twice")

    async def _stored(self, client: Client) -> dict[int, bytes]:
        """The records by offset."""
        stored: dict[int, bytes] = {}
        while True:
            start = max(stored) + 1 if stored else "earliest"

            async def read(start: Any = start) -> Any:
                return await client.log(LOG).read(start, limit=1000)

            page = await answered(read, f"the log is read from {start} on")
            if page is None or not page.records:
                return stored
            stored |= {record.offset: record.value for record in page.records}
