"""A log that is deleted and created again under readers, writers and closers (rule 27b).

Each record says by which log of the name its request was judged. A writer reads the log's row, as a stream's append does,
and appends later; a closer closes later what it has looked at; a follower goes on where it was. What is judged: no record
of a request that judged one log is in another one, no close of one closes another one, no follower gets or passes over
records of another one, no offset that a reader was given is told to be beyond the end, and no read that begins more than
RECENT_S after the answer to a deletion gets the deleted log.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

from quorumlog.errors import (
    NOT_DONE,
    LogReplaced,
    NoSuchLog,
    OffsetBeyondEnd,
    QuorumLogError,
)
from quorumlog.net.operations import Operation
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.messages import Append
from services.gateway.logs.store import RECENT_S
from tests.model.logs.demands import APPEND, CLOSE, DELETE, PATIENCE_S, PUT, READ, ROLL, judge_error
from tests.model.logs.judge import Violation, values_of
from tests.model.logs.model import Cluster, Gateway

T = TypeVar("T")

BY_NAME: Final = "whichever"
"""In place of a creation: the request is for whichever log has the name."""
GENERATIONS: Final = 4
ASKED_S: Final = 20.0
"""How long a client waits for an answer."""
FAR: Final = 1000
"""More records than a log gets here."""


class Replaced:
    """The clients of such a log."""

    NAME: Final = "replaced"

    def __init__(
        self,
        cluster: Cluster,
        pick: Callable[[], Gateway],
        settings: LogSettings,
        *,
        violated: Callable[[str], NoReturn],
        seed: int,
    ) -> None:
        self.cluster, self._pick, self.settings, self.violated = cluster, pick, settings, violated
        self.random = random.Random(f"replaced-{seed}")
        self.creations: dict[int, str] = {}
        """When the log was created that names, or named, a ledger."""
        self.closed: set[str] = set()
        """Creations that somebody asked to close."""
        self.given_up: dict[str, str] = {}
        """Values of requests by name that were given up, with the last creation that there was by then."""
        self.deleted_s: dict[str, float] = {}
        """When a deletion was answered, by creation of the log."""
        self.is_over = False
        self.sent = 0

    # --- what happens to the cluster ---------------------------------------------------------------

    def saw(self, row: LogMetadata) -> None:
        """A log's row was changed."""
        if row.name != self.NAME:
            return
        self.creations |= {item.ledger_id: row.created_at for item in row.items}
        if row.state is LogState.CLOSED and row.created_at not in self.closed:
            self.violated(
                f"rule 27b: the log of {row.created_at} is closed, which nobody asked for"
            )

    def judge(self) -> None:
        """Every record is in the log that its request was judged by, deleted ones too."""
        ledgers = {**self.cluster.deleted, **self.cluster.ledgers}
        for ledger_id, created_at in self.creations.items():
            ledger = ledgers.get(ledger_id)
            for value in () if ledger is None else values_of(ledger.entries):
                self._judge_value(value, created_at)

    def _judge_value(self, value: str, created_at: str) -> None:
        meant = value.partition("|")[0]
        if meant not in (BY_NAME, created_at):
            raise Violation(f"rule 27b: {value} is in the log of {created_at}")
        if created_at > self.given_up.get(value, created_at):
            raise Violation(f"rule 27b: {value} was given up before the log of {created_at} was")

    # --- clients -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """All of them, until the log was replaced a few times; the last one is deleted."""
        await self._insist(PUT, self._created)
        async with asyncio.TaskGroup() as clients:
            for _ in range(2):
                clients.create_task(self._repeated(self._write))
                clients.create_task(self._follow())
            clients.create_task(self._repeated(self._give_up))
            clients.create_task(self._repeated(self._close))
            clients.create_task(self._repeated(self._read_again))
            clients.create_task(self._repeated(self._roll))
            for _ in range(GENERATIONS):
                await asyncio.sleep(self.random.random() * 0.4)
                await self._insist(DELETE, self._deleted)
                await self._insist(PUT, self._created)
            self.is_over = True
        await self._insist(DELETE, self._deleted)
        self.judge()

    async def _created(self, gateway: Gateway) -> None:
        await gateway.logs.put(self.NAME, self.settings)

    async def _deleted(self, gateway: Gateway) -> None:
        row = self.cluster.logs.get(self.NAME)
        with contextlib.suppress(NoSuchLog):
            await gateway.logs.delete(self.NAME)
        if row is not None:
            self.deleted_s.setdefault(row.created_at, self.cluster.now())

    async def _insist(self, asked: Operation, work: Callable[[Gateway], Awaitable[None]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self._tried(asked, work):
                    return
                await asyncio.sleep(0.02)

    async def _tried(self, asked: Operation, work: Callable[[Gateway], Awaitable[None]]) -> bool:
        """Whether a request was answered without an error."""
        gateway = self._pick()
        try:
            await gateway.while_it_lives(work(gateway), ASKED_S)
        except ConnectionResetError:
            return False
        except LogReplaced as error:
            if error.outcome != NOT_DONE:
                raise Violation(f"rule 27b: {error!r} was perhaps done") from error
            return False
        except QuorumLogError as error:
            judge_error(asked, error)
            return False
        return True

    async def _repeated(self, client: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            await asyncio.sleep(self.random.random() * 0.1)
            await client()

    def _value(self, meant: str) -> str:
        self.sent += 1
        return f"{meant}|{self.sent}"

    async def _write(self) -> None:
        """Judge the log, and append to it later, perhaps its last record."""
        late_s = self.random.choice((0.0, 0.1, 0.5)) * self.random.random()
        is_end = self.random.random() < 0.1

        async def write(gateway: Gateway) -> None:
            row = await gateway.logs.rows.row(self.NAME)
            await asyncio.sleep(late_s)
            if is_end:
                self.closed.add(row.created_at)
            record = Record(self._value(row.created_at).encode())
            call = Append.of((record,), is_end=is_end, created_at=row.created_at)
            await gateway.logs.append(self.NAME, call)
            if is_end:
                await gateway.logs.finish(self.NAME, row.created_at)

        await self._tried(APPEND, write)

    async def _give_up(self) -> None:
        """Append by name, and mostly give it up."""
        value = self._value(BY_NAME)
        patience_s = self.random.choice((0.005, 0.05, 1.0))

        async def write(gateway: Gateway) -> None:
            try:
                async with asyncio.timeout(patience_s):
                    await gateway.logs.append(self.NAME, Append.of((Record(value.encode()),)))
            except TimeoutError:
                row = self.cluster.logs.get(self.NAME)
                last = max(self.creations.values(), default="") if row is None else row.created_at
                self.given_up[value] = last

        await self._tried(APPEND, write)

    async def _close(self) -> None:
        await asyncio.sleep(self.random.random() * 0.4)
        late_s = self.random.random() * 0.3

        async def close(gateway: Gateway) -> None:
            row = await gateway.logs.rows.row(self.NAME)
            await asyncio.sleep(late_s)
            self.closed.add(row.created_at)
            await gateway.logs.close(self.NAME, created_at=row.created_at)

        await self._tried(CLOSE, close)

    # --- readers -----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Go on where the last page has ended, by whichever gateway, and begin anew where the log is another one."""
        at, created_at = 0, None
        while not self.is_over:
            await asyncio.sleep(self.random.random() * 0.03)
            gateway, wait_s = self._pick(), self.random.choice((0.0, 0.5))
            if created_at is not None and self.random.random() < 0.2:
                await self._ask_beyond(gateway, at + FAR, created_at, wait_s)
            read = gateway.logs.reader.read(
                self.NAME, at, limit=3, wait_s=wait_s, created_at=created_at
            )
            try:
                page = await gateway.while_it_lives(read, ASKED_S)
            except ConnectionResetError:
                continue
            except OffsetBeyondEnd as error:
                raise Violation(f"rule 27b: {at} was given out, and is told: {error!r}") from error
            except (LogReplaced, NoSuchLog):
                at, created_at = 0, None
                continue
            except QuorumLogError as error:
                judge_error(READ, error)
                continue
            if created_at not in (None, page.created_at):
                raise Violation(f"rule 27b: a reader of {created_at} got {page.created_at}")
            if [found.offset for found in page.records] != list(range(at, page.next)):
                raise Violation(f"I33: a page from {at} on has {page.records}")
            for found in page.records:
                self._judge_value(found.record.value.decode(), page.created_at)
            at, created_at = page.next, page.created_at

    async def _read_again(self) -> None:
        """Read a page again, which may lie in a closed ledger: of a log that was deleted only for a moment."""
        created_at = self.random.choice((None, *sorted(set(self.creations.values()))))
        began_s = self.cluster.now()

        async def read(gateway: Gateway) -> None:
            page = await gateway.logs.reader.read(self.NAME, 0, limit=1, created_at=created_at)
            if began_s > self.deleted_s.get(page.created_at, began_s) + RECENT_S:
                self.violated(f"rule 27b: the log of {page.created_at} is read after its deletion")

        await self._tried(READ, read)

    async def _roll(self) -> None:
        async def roll(gateway: Gateway) -> None:
            await gateway.logs.roll(self.NAME)

        await self._tried(ROLL, roll)

    async def _ask_beyond(self, gateway: Gateway, at: int, created_at: str, wait_s: float) -> None:
        """An offset that nobody was given is an error, whether the reader waits or not."""
        read = gateway.logs.reader.read(self.NAME, at, wait_s=wait_s, created_at=created_at)
        try:
            page = await gateway.while_it_lives(read, ASKED_S)
        except (ConnectionResetError, NoSuchLog):
            return
        except QuorumLogError as error:
            judge_error(READ, error)
            return
        raise Violation(f"rule 27b: nothing is said of {at}, which is beyond the end: {page}")
