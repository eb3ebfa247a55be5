"""Clients that come back to what others have let go of: ledgers that were deleted, logs that were opened
for another writer, truncated, or deleted and made again under their name (rules 16a, 17, 22).

Each acts through one gateway and lets the others do the rest, so that a gateway which hears nothing
of that is asked all the same. What is acknowledged then is in no ledger that is there: the histories
tell it as lost.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, TypeVar

from loadtest.cluster import Cluster
from quorumlog.client import Client, Ledger
from quorumlog.client.log import Log
from quorumlog.errors import NOT_DONE, NoSuchLog, QuorumLogError
from tests.cluster.chaos.report import Report
from tests.support.history import History, Violation
from tests.support.log_history import LogHistory
from tests.support.waiting import DeadlineMissed

T = TypeVar("T")

PATIENCE_S: Final = 10.0
"""Until a client takes an answer for lost."""
AWAY_S: Final = (0.2, 2.0, 5.0)
"""How long a client is away. Bookies drop what is deleted after about two seconds."""
PACE_S: Final = 0.05
GENERATIONS_MAX: Final = 10_000


class Over(Exception):
    """The storm has ended."""


class Returners:
    """What they do goes into the histories of the storm's clients."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        report: Report,
        histories: tuple[History, LogHistory],
        *,
        payload: Callable[[random.Random], bytes],
        learn: Callable[[Ledger, float], Awaitable[None]],
        is_over: Callable[[], bool],
    ) -> None:
        """`learn` recovers a ledger and notes all that it holds."""
        self._cluster, self._seed, self._report = cluster, seed, report
        self._history, self._log_history = histories
        self._payload, self._learn, self._is_over = payload, learn, is_over
        self.left: list[int] = []
        """Ledgers that are there still."""
        self.deleted: list[int] = []

    # --- ledgers -----------------------------------------------------------------------------------

    async def ledgers(self, number: int) -> None:
        """Write a ledger, let another client delete it, and come back to it."""
        dice = random.Random(f"returner-{self._seed}-{number}")
        while not self._is_over():
            await asyncio.sleep(PACE_S)
            mine, others = self._gateways(dice)
            async with (
                Client(mine, deadline_s=PATIENCE_S) as client,
                Client(*others, deadline_s=PATIENCE_S) as other,
            ):
                try:
                    ledger = await client.create_ledger(
                        ensemble_size=3, write_quorum=3, ack_quorum=2
                    )
                except QuorumLogError:
                    continue
                self._report.ledgers += 1
                for _ in range(dice.randint(1, 3)):
                    await self._append(ledger, dice)
                if not await self._deleted(other, ledger.ledger_id):
                    continue
                for _ in range(3):
                    await asyncio.sleep(dice.choice(AWAY_S))
                    if not await self._append(ledger, dice):
                        break

    def _gateways(self, dice: random.Random) -> tuple[str, list[str]]:
        """One, and the others."""
        mine, *others = dice.sample(self._cluster.gateways, len(self._cluster.gateways))
        return mine, others

    async def _append(self, ledger: Ledger, dice: random.Random) -> bool:
        """Whether an append was acknowledged."""
        payload = self._payload(dice)
        op = self._history.append(ledger.ledger_id, payload)
        try:
            entry_id = await ledger.append(payload)
        except QuorumLogError as error:
            if error.outcome == NOT_DONE:
                self._history.failed(op)
            return False
        self._history.acked(op, entry_id)
        self._report.acknowledged += 1
        return True

    async def _deleted(self, client: Client, ledger_id: int) -> bool:
        """Whether a deletion was answered; before it all that the ledger holds is noted."""
        try:
            await self._learn(client.ledger(ledger_id), PATIENCE_S)
        except DeadlineMissed:
            self.left.append(ledger_id)
            return False
        self.deleted.append(ledger_id)
        self._report.deleted += 1
        try:
            await client.delete_ledger(ledger_id)
        except QuorumLogError:
            return False
        return True

    # --- logs --------------------------------------------------------------------------------------

    async def logs(self, number: int) -> None:
        """Make a log, write it through all gateways, let go of it, and make it again."""
        dice = random.Random(f"remaker-{self._seed}-{number}")
        strays: set[bytes] = set()
        async with AsyncExitStack() as stack:
            ways = [
                await stack.enter_async_context(Client(url, deadline_s=PATIENCE_S))
                for url in self._cluster.gateways
            ]
            anyone = await stack.enter_async_context(
                Client(*self._cluster.gateways, deadline_s=PATIENCE_S)
            )
            for generation in range(GENERATIONS_MAX):
                life = (number + 1) * GENERATIONS_MAX + generation
                try:
                    await self._live(f"again-{number}", life, dice, anyone, ways, strays)
                except Over:
                    return

    async def _live(
        self,
        name: str,
        life: int,
        dice: random.Random,
        anyone: Client,
        ways: list[Client],
        strays: set[bytes],
    ) -> None:
        """One log, from its creation to its deletion; `life` is its number in the history. `strays` are
        requests of earlier ones that may still arrive.
        """
        log = await self._insist(lambda: anyone.create_log(name))
        token: int | None = None
        mine: set[bytes] = set()
        for step in range(dice.randint(4, 10)):
            await asyncio.sleep(dice.choice((PACE_S, PACE_S, PACE_S, *AWAY_S)))
            if step == 2 and dice.random() < 0.6:
                token = await self._displaced(log, dice)
            for way in dice.sample(ways, len(ways)) if step == 3 else [dice.choice(ways)]:
                is_stale = token is not None and dice.random() < 0.3
                await self._produce(
                    way.log(name, writer_token=None if is_stale else token),
                    life,
                    dice,
                    mine,
                    is_stale=is_stale,
                )
        start, found = await self._insist(lambda: self._content(log))
        if not strays.intersection(record for _, record in found):
            self._log_history.content(life, start, *found)
        strays |= mine

        async def delete() -> None:
            try:
                await log.delete()
            except NoSuchLog:
                return

        await self._insist(delete)
        self._report.remade += 1

    async def _displaced(self, log: Log, dice: random.Random) -> int:
        """Another writer opens the log, and may let go of what was before."""
        at = await self._insist(lambda: log.open("another"))
        if dice.random() < 0.7:
            await self._insist(lambda: log.truncate(at))
            await asyncio.sleep(dice.choice(AWAY_S))
        assert log.writer_token is not None
        return log.writer_token

    async def _produce(
        self, log: Log, life: int, dice: random.Random, mine: set[bytes], *, is_stale: bool
    ) -> None:
        payload = self._payload(dice)
        mine.add(payload)
        op = self._log_history.produce(life, payload)
        try:
            done = await log.append(payload)
        except QuorumLogError as error:
            if error.outcome == NOT_DONE:
                self._log_history.refused(op)
            return
        self._log_history.produced(op, done.first_offset)
        self._report.acknowledged += 1
        if is_stale:
            detail = f"{log.name}: appended without the writer token"
            self._report.violations.append(
                Violation("token", life, done.first_offset, detail, ("log", "offset"))
            )

    async def _content(self, log: Log) -> tuple[int, list[tuple[int, bytes]]]:
        start = int((await log.info())["first_offset"])
        return start, [(record.offset, record.value) async for record in log.records(start)]

    async def _insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Until it is answered. Raises: Over."""
        while not self._is_over():
            try:
                return await work()
            except QuorumLogError:
                await asyncio.sleep(PACE_S)
        raise Over
