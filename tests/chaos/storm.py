"""Processes of a real cluster are killed and stopped while clients write and read.

Everything that clients see goes into a history, and at the end every ledger is recovered, read
whole and judged (tests/support/history.py). What is killed, when and for how long comes from the
seed; what the machine makes of it does not. The storm goes on by what happens, not by the clock:
the next death comes when appends are acknowledged again, so that a slow machine only takes longer.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from loadtest.cluster import Cluster
from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError
from tests.support.history import History, Violation, check
from tests.support.waiting import DeadlineMissed, until

RESUME_S: Final = 90.0
"""How long appends may take to go on after a death; the cluster needs a few seconds."""

QUIET_ACKS: Final = 12
"""Acknowledgements between two deaths."""

BATCH_MAX: Final = 4
READ_MAX: Final = 50
LEDGER_APPENDS: Final = (30, 150)
"""A ledger gets so many appends and is closed, if nothing ends it before."""

PACE_S: Final = 0.01
"""A client's pause between requests: the storm wants deaths, not entries."""


@dataclass(slots=True)
class Report:
    """What a storm did and what was found."""

    kills: int = 0
    pauses: int = 0
    ledgers: int = 0
    acknowledged: int = 0
    unknown: int = 0
    read: int = 0
    skipped: int = 0
    """Ledgers that could not be recovered in time, so that nothing can be said of them."""
    violations: list[Violation] = field(default_factory=list)

    def count(self, *kinds: str) -> int:
        """How many violations are of these kinds."""
        return sum(violation.kind in kinds for violation in self.violations)

    def __str__(self) -> str:
        """The last line of `make chaos`."""
        lost = self.count("lost", "gone")
        others = len(self.violations) - lost - self.count("duplicate")
        return (
            f"chaos: {self.kills} kills, {self.pauses} pauses, {self.ledgers} ledgers,"
            f" {self.acknowledged} acknowledged, {self.unknown} unknown, {self.read} read,"
            f" {lost} lost, {self.count('duplicate')} duplicated, {others} other violations,"
            f" {self.skipped} skipped"
        )


class Storm:
    """One storm over one cluster."""

    def __init__(self, cluster: Cluster, seed: int, *, bookies: int = 4) -> None:
        self._cluster = cluster
        self._seed = seed
        self._names = [f"bookie-{number}" for number in range(1, bookies + 1)]
        self._gateways = [f"gateway-{number + 1}" for number in range(len(cluster.gateways))]
        self._payloads = 0
        self._is_over = False
        self._known: list[int] = []
        self.history = History()
        self.report = Report()

    async def run(self, is_enough: Callable[[Report], bool], *, writers: int = 3) -> Report:
        """Write and read under deaths until it is enough, then recover, read and judge it all."""
        async with asyncio.TaskGroup() as clients:
            for number in range(writers):
                clients.create_task(self._write(number))
            clients.create_task(self._read())
            try:
                await self._rage(is_enough)
            finally:
                self._is_over = True
        await self._judge()
        return self.report

    # --- clients -------------------------------------------------------------------------------

    async def _write(self, number: int) -> None:
        dice = random.Random(f"writer-{self._seed}-{number}")
        while not self._is_over:
            urls = list(self._cluster.gateways)
            dice.shuffle(urls)
            async with Client(*urls, deadline_s=20) as client:
                try:
                    ledger = await client.create_ledger()
                except QuorumLogError:
                    await asyncio.sleep(0.1)  # a pause between tries, as a client makes it
                    continue
                self._known.append(ledger.ledger_id)
                self.report.ledgers += 1
                await self._fill(ledger, dice)

    async def _fill(self, ledger: Ledger, dice: random.Random) -> None:
        history, report = self.history, self.report
        for _ in range(dice.randint(*LEDGER_APPENDS)):
            if self._is_over:
                return
            payloads = [self._payload() for _ in range(dice.choice((1, 1, 2, BATCH_MAX)))]
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

    def _payload(self) -> bytes:
        self._payloads += 1
        return b"%d:%d" % (self._seed, self._payloads)

    async def _read(self) -> None:
        dice = random.Random(f"reader-{self._seed}")
        while not self._is_over:
            urls = list(self._cluster.gateways)
            dice.shuffle(urls)
            if not self._known:
                await asyncio.sleep(0.05)
                continue
            async with Client(*urls, deadline_s=10) as client:
                ledger = client.ledger(dice.choice(self._known[-6:]))
                op = self.history.read(ledger.ledger_id)
                try:
                    page = await ledger.read(dice.randint(0, 40), limit=READ_MAX)
                except QuorumLogError:
                    await asyncio.sleep(0.05)
                    continue
                self.history.found(op, *((e.entry_id, e.payload) for e in page.entries))
                self.history.lac(ledger.ledger_id, page.last_add_confirmed)
                self.report.read += len(page.entries)
            await asyncio.sleep(PACE_S)

    # --- deaths --------------------------------------------------------------------------------

    async def _rage(self, is_enough: Callable[[Report], bool]) -> None:
        dice = random.Random(f"storm-{self._seed}")
        await self._until_going()
        while not is_enough(self.report):
            if dice.random() < 0.2:
                await self._pause(dice)
            else:
                await self._kill(dice)
            await self._until_going()

    async def _until_going(self) -> None:
        wanted = self.report.acknowledged + QUIET_ACKS
        await until(
            lambda: self.report.acknowledged >= wanted, "appends are acknowledged again", RESUME_S
        )

    async def _kill(self, dice: random.Random) -> None:
        """One process, or two at once; they come back after a while."""
        victims = [dice.choice(self._names)]
        chance = dice.random()
        if chance < 0.3:
            victims = [dice.choice(self._gateways)]
        elif chance < 0.45:
            victims.append(dice.choice(self._gateways))
        elif chance < 0.6:
            victims = dice.sample(self._names, 2)
        elif chance < 0.65:
            victims = [dice.choice(("metadata-1", "autorecovery-1"))]
        for name in victims:
            await self._cluster.kill(name)
            self.report.kills += 1
        await asyncio.sleep(dice.choice((0.0, 0.2, 1.0)))  # how long it is dead is the fault itself
        for name in victims:
            self._cluster.start(name)
        for name in victims:
            await self._cluster.until_up(name)

    async def _pause(self, dice: random.Random) -> None:
        name = dice.choice((*self._names, *self._gateways))
        self._cluster.pause(name)
        try:
            await asyncio.sleep(
                dice.choice((0.1, 0.5, 3.0))
            )  # the length of the pause is the fault
        finally:
            self._cluster.resume(name)
        self.report.pauses += 1

    # --- judgement -----------------------------------------------------------------------------

    async def _judge(self) -> None:
        async with Client(*self._cluster.gateways, deadline_s=60) as client:
            for ledger_id in self._known:
                try:
                    await self._learn(client.ledger(ledger_id))
                except DeadlineMissed:
                    self.report.skipped += 1
        self.report.violations = check(self.history)

    async def _learn(self, ledger: Ledger) -> None:
        """Recover a ledger and read all of it."""
        what = f"ledger {ledger.ledger_id} is "
        row = await until(ledger.recover, what + "closed", RESUME_S, passing=(QuorumLogError,))
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
            stored = await until(content, what + "read", RESUME_S, passing=(QuorumLogError,))
        self.history.closed(ledger.ledger_id, last)
        self.history.content(ledger.ledger_id, *stored or ())
