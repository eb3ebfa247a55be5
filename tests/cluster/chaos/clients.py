"""The clients of a storm: they write and read ledgers and logs, and note all that they see."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from loadtest.cluster import Cluster
from quorumlog.client import Client, Ledger
from quorumlog.client.log import Log
from quorumlog.errors import NoSuchLedger, QuorumLogError
from tests.cluster.chaos.report import Report
from tests.cluster.chaos.returners import Returners
from tests.support.history import History
from tests.support.log_history import LogHistory
from tests.support.waiting import DeadlineMissed, until

JUDGE_S: Final = 120.0
"""Until a ledger is recovered and read once everything is well again."""

BATCHES: Final = (1, 1, 2, 4)
SIZES: Final = (0, 0, 0, 0, 100, 4000)
"""Bytes around a payload: mostly none, and sometimes enough to fill a segment soon."""

READ_MAX: Final = 50
LEDGER_APPENDS: Final = (30, 150)
"""A ledger gets so many appends and is closed, if nothing ends it before."""

QUORUMS: Final = ((3, 3, 2), (3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3))
PACE_S: Final = 0.02
"""A client's pause between requests: the storm wants faults, not entries."""

JUDGES: Final = 6
LOGS: Final = 2
RETURNERS: Final = 2
"""Clients that come back to what was deleted: so many to ledgers, and so many to logs."""
KEPT: Final = 12
"""Of the newest ledgers; readers ask the last ones. Older ones are judged and deleted, so that bookies
collect garbage while it storms."""
DELETE_S: Final = 10.0
"""For how long each step of that is tried in the storm: what is not done then is judged at the end."""


class Clients:
    """Everybody who uses the cluster. `report.acknowledged` tells that they get on."""

    def __init__(self, cluster: Cluster, seed: int, report: Report) -> None:
        self.history = History()
        self.log_history = LogHistory()
        self._cluster = cluster
        self._seed = seed
        self._report = report
        self._payloads = 0
        self._is_over = False
        self._ledgers: list[int] = []
        """Those that are there, the oldest first."""
        self._written: set[int] = set()
        self._deleted: list[int] = []
        """Nothing of these comes back."""
        self._logs: list[str] = []
        self._returners = Returners(
            cluster,
            seed,
            report,
            (self.history, self.log_history),
            payload=self._payload,
            learn=self._learn_ledger,
            is_over=lambda: self._is_over,
        )

    async def run(self, storm: Callable[[], Awaitable[None]], *, writers: int) -> None:
        """Use the cluster while it storms."""
        async with asyncio.TaskGroup() as clients:
            for number in range(writers):
                clients.create_task(self._write(number))
            for number in range(LOGS):
                clients.create_task(self._produce(number))
            clients.create_task(self._read())
            clients.create_task(self._delete())
            for number in range(RETURNERS):
                clients.create_task(self._returners.ledgers(number))
                clients.create_task(self._returners.logs(number))
            try:
                await storm()
            finally:
                self._is_over = True

    def _client(self, dice: random.Random, deadline_s: float) -> Client:
        urls = list(self._cluster.gateways)
        dice.shuffle(urls)
        return Client(*urls, deadline_s=deadline_s)

    def _payload(self, dice: random.Random) -> bytes:
        self._payloads += 1
        return b"%d:%d:" % (self._seed, self._payloads) + b"." * dice.choice(SIZES)

    # --- ledgers -------------------------------------------------------------------------------

    async def _write(self, number: int) -> None:
        dice = random.Random(f"writer-{self._seed}-{number}")
        while not self._is_over:
            ensemble, write, ack = dice.choice(QUORUMS)
            async with self._client(dice, 20) as client:
                try:
                    ledger = await client.create_ledger(
                        ensemble_size=ensemble, write_quorum=write, ack_quorum=ack
                    )
                except QuorumLogError:
                    await asyncio.sleep(0.1)  # a pause between tries, as a client makes it
                    continue
                self._ledgers.append(ledger.ledger_id)
                self._report.ledgers += 1
                self._written.add(ledger.ledger_id)
                await self._fill(ledger, dice)
                self._written.remove(ledger.ledger_id)

    async def _fill(self, ledger: Ledger, dice: random.Random) -> None:
        history, report = self.history, self._report
        for _ in range(dice.randint(*LEDGER_APPENDS)):
            if self._is_over:
                return
            payloads = [self._payload(dice) for _ in range(dice.choice(BATCHES))]
            op = history.append(ledger.ledger_id, *payloads)
            try:
                done = await ledger.append_batch(payloads)
            except QuorumLogError as error:
                if error.outcome == "not-done":
                    history.failed(op)
                else:
                    report.unknown += len(payloads)
                return
            history.acked(op, done.first_entry)
            history.lac(ledger.ledger_id, done.last_add_confirmed)
            report.acknowledged += len(payloads)
            await asyncio.sleep(PACE_S)
        try:
            row = await ledger.close()
        except QuorumLogError:
            return
        history.closed(ledger.ledger_id, int(row["last_entry"]))

    async def _delete(self) -> None:
        """Judge ledgers that nobody writes any more, and delete them."""
        dice = random.Random(f"deleter-{self._seed}")
        while not self._is_over:
            await asyncio.sleep(PACE_S)
            old = [number for number in self._ledgers[:-KEPT] if number not in self._written]
            if not old:
                continue
            number = dice.choice(old)
            async with self._client(dice, DELETE_S) as client:
                try:
                    await self._learn_ledger(client.ledger(number), DELETE_S)
                except DeadlineMissed:
                    continue
                # Whether a deletion came through is known only once it is answered.
                self._ledgers.remove(number)
                self._deleted.append(number)
                self._report.deleted += 1
                with contextlib.suppress(QuorumLogError):
                    await client.delete_ledger(number)

    # --- logs ----------------------------------------------------------------------------------

    async def _produce(self, number: int) -> None:
        """Append to a log exactly once: what is unknown is sent again until it is known."""
        dice = random.Random(f"producer-{self._seed}-{number}")
        name = f"storm-{number}"
        async with self._client(dice, 20) as client:
            log = await self._created(client, name)
            if log is None:
                return
            self._logs.append(name)
            self._report.logs += 1
            producer = log.producer(name, epoch=1)
            history, seq = self.log_history, 0
            while not self._is_over:
                payloads = [self._payload(dice) for _ in range(dice.choice(BATCHES))]
                op = history.produce(number, *payloads, producer=(name, 1), seq=seq)
                seq += 1
                is_unknown = False
                while not self._is_over:
                    try:
                        done = await producer.append(*payloads)
                    except QuorumLogError as error:
                        if error.outcome == "not-done" and not error.retryable:
                            if not is_unknown:
                                history.refused(op)
                            self._report.stuck.append(f"log {name}: {error}")
                            return
                        is_unknown |= error.outcome != "not-done"
                        await asyncio.sleep(PACE_S)
                        continue
                    history.produced(op, done.first_offset)
                    self._report.acknowledged += len(payloads)
                    break
                else:
                    self._report.unknown += len(payloads)
                await asyncio.sleep(PACE_S)

    async def _created(self, client: Client, name: str) -> Log | None:
        while not self._is_over:
            try:
                return await client.create_log(name)
            except QuorumLogError:
                await asyncio.sleep(PACE_S)
        return None

    # --- readers -------------------------------------------------------------------------------

    async def _read(self) -> None:
        dice = random.Random(f"reader-{self._seed}")
        while not self._is_over:
            await asyncio.sleep(PACE_S)
            async with self._client(dice, 10) as client:
                try:
                    if dice.random() < 0.2 and self._logs:
                        await self._read_log(client, dice)
                    elif self._ledgers:
                        await self._read_ledger(client, dice)
                except QuorumLogError:
                    continue

    async def _read_ledger(self, client: Client, dice: random.Random) -> None:
        ledger = client.ledger(dice.choice(self._ledgers[-6:]))
        op = self.history.read(ledger.ledger_id)
        page = await ledger.read(dice.randint(0, 40), limit=READ_MAX)
        self.history.found(op, *((e.entry_id, e.payload) for e in page.entries))
        self.history.lac(ledger.ledger_id, page.last_add_confirmed)
        self._report.read += len(page.entries)

    async def _read_log(self, client: Client, dice: random.Random) -> None:
        name = dice.choice(self._logs)
        number, log = _number_of(name), client.log(name)
        if dice.random() < 0.2:
            self.log_history.end(number, int((await log.info())["next_offset"]))
            return
        first, acknowledged = dice.randint(0, 400), self.log_history.acknowledged(number)
        page = await log.read(first, limit=READ_MAX)
        found = ((r.offset, r.value) for r in page.records)
        self.log_history.fetched(number, first, *found, acknowledged=acknowledged)
        self._report.read += len(page.records)

    # --- the end -------------------------------------------------------------------------------

    async def learn(self) -> None:
        """Recover every ledger and read all that is there; the cluster must be well again."""
        self._ledgers += self._returners.left
        self._deleted += self._returners.deleted
        left = list(reversed(self._ledgers))

        async def judge() -> None:
            async with Client(*self._cluster.gateways, deadline_s=60) as client:
                while left:
                    await self._tried(self._learn_ledger(client.ledger(left.pop())))

        async with asyncio.TaskGroup() as group:
            for _ in range(JUDGES):
                group.create_task(judge())
        await self._check_deleted()
        async with Client(*self._cluster.gateways, deadline_s=60) as client:
            for name in self._logs:
                await self._tried(self._learn_log(client.log(name)))

    async def _check_deleted(self) -> None:
        """What was deleted goes, and is gone for who reads it."""

        def is_told_gone(ask: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[bool]]:
            async def asked() -> bool:
                try:
                    await ask()
                except NoSuchLedger:
                    return True
                return False

            return asked

        async with Client(*self._cluster.gateways, deadline_s=60) as client:
            for number in self._deleted:
                for ask in (partial(client.delete_ledger, number), client.ledger(number).read):
                    what = f"ledger {number} is gone"
                    await self._tried(
                        until(is_told_gone(ask), what, JUDGE_S, passing=(QuorumLogError,))
                    )

    async def _tried(self, work: Awaitable[object]) -> None:
        try:
            await work
        except DeadlineMissed as error:
            self._report.stuck.append(str(error))

    async def _learn_ledger(self, ledger: Ledger, deadline_s: float = JUDGE_S) -> None:
        what = f"ledger {ledger.ledger_id} is "
        row = await until(ledger.recover, what + "closed", deadline_s, passing=(QuorumLogError,))
        last = int(row["last_entry"])

        async def content() -> list[tuple[int, bytes]] | None:
            found: list[tuple[int, bytes]] = []
            while len(found) <= last:
                page = await ledger.read(len(found), limit=1000)
                if not page.entries:
                    return None
                found.extend((entry.entry_id, entry.payload) for entry in page.entries)
            return found

        stored: list[tuple[int, bytes]] | None = []
        if last >= 0:
            stored = await until(content, what + "read", deadline_s, passing=(QuorumLogError,))
        self.history.closed(ledger.ledger_id, last)
        self.history.content(ledger.ledger_id, *stored or ())

    async def _learn_log(self, log: Log) -> None:
        async def content() -> tuple[list[tuple[int, bytes]]]:
            # A record that nobody else writes comes after all others: then the end is known.
            return ([(r.offset, r.value) async for r in log.records()],)

        found = await until(content, f"log {log.name} is read", JUDGE_S, passing=(QuorumLogError,))
        self.log_history.content(_number_of(log.name), 0, *found[0])


def _number_of(name: str) -> int:
    """A log's number in the history."""
    return int(name.rpartition("-")[2])
