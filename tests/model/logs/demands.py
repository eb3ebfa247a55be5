"""Requests that every gateway must do once nothing fails any more; and the check that an error is one
that the operation's description names.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from quorumlog.errors import UNKNOWN, NoSuchLog, QuorumLogError, ReadOnly
from quorumlog.net.operations import Operation
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from services.gateway.edge.log_records import RecordRoutes
from services.gateway.edge.logs import LogRoutes
from services.gateway.edge.transactions import TransactionRoutes
from tests.model.logs.attempts import write
from tests.model.logs.judge import Violation
from tests.model.logs.model import Cluster, Gateway

ENDS_IN_S: Final = 60.0
"""Virtual: a request to a gateway of a cluster in which nothing fails, with its repeats."""
PATIENCE_S: Final = 200.0
"""The same while gateways die, hang and leave, of several gateways."""

Work = Callable[[], Awaitable[Any]]

_LOGS: Final = LogRoutes.operations
APPEND = RecordRoutes.operations["append_records"]
READ = RecordRoutes.operations["read_records"]
LIST, PUT, GET = _LOGS["list_logs"], _LOGS["put_log"], _LOGS["get_log"]
PATCH, DELETE, OPEN = _LOGS["patch_log"], _LOGS["delete_log"], _LOGS["open_log"]
ROLL, TRUNCATE, ARCHIVED = _LOGS["roll_log"], _LOGS["truncate_log"], _LOGS["mark_log_archived"]
CLOSE = _LOGS["close_log"]
COMMIT = TransactionRoutes.operations["commit_transaction"]
ABORT = TransactionRoutes.operations["abort_transaction"]


def judge_error(asked: Operation, error: QuorumLogError) -> None:
    """Raise Violation where a request gets an error that its description does not name."""
    # The middleware says ReadOnly of a gateway that is about to end, whatever is asked.
    if not isinstance(error, (*asked.errors, ReadOnly)):
        raise Violation(f"{asked.name} is answered {error!r}") from error


async def insist(asked: Operation, work: Work) -> Any:
    """The answer to a request that is repeated until it succeeds, where all gateways live."""
    try:
        async with asyncio.timeout(ENDS_IN_S):
            while True:
                try:
                    return await work()
                except QuorumLogError as error:
                    judge_error(asked, error)
                    if not error.retryable and error.outcome != UNKNOWN:
                        raise Violation(f"{asked.name} is refused: {error!r}") from error
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise Violation(f"liveness: {asked.name} never comes to an end") from error


class Demands:
    """One client that makes every kind of request to each gateway in turn. Only this client writes to
    the log by then; what happened before has set the scene.
    """

    def __init__(self, name: str, settings: LogSettings) -> None:
        self.name, self.settings = name, settings
        self.sent = 0

    async def append(self, gateway: Gateway, token: int | None = None) -> int:
        """The offset at which a record was appended through a gateway, by a new producer."""
        since = (await insist(GET, lambda: gateway.logs.get(self.name))).next_offset
        self.sent += 1
        producer = ProducerSeq(f"last-{self.sent}", 0, 0)
        record = Record(f"last-{self.sent}".encode(), b"key")  # the owner may still compact the log
        call = Append.of((record,), producer, token=token, since=since)
        done = await insist(APPEND, lambda: gateway.logs.append(self.name, call))
        return int(done.first_offset)

    async def woken(self, reader: Gateway, at: int, append: Awaitable[int]) -> None:
        """A tail at the end is woken by an append, through whichever gateways."""

        async def tail() -> Any:
            while True:
                page = await reader.logs.reader.read(self.name, at, wait_s=30)
                if page.records:
                    return page

        tailing = asyncio.ensure_future(insist(READ, tail))
        await asyncio.sleep(0.01)
        offset = await append
        page = await tailing
        if page.records[0].offset != at or offset != at:
            raise Violation(f"the tail at {at} got {page.records[0].offset}, appended at {offset}")

    async def all_of(
        self,
        gateways: list[Gateway],
        token: int | None = None,
    ) -> None:
        """Everything, of each gateway, in the order given; `token` is what the log is open for."""
        for gateway in gateways:
            token = await self.whole(gateway, gateways, token)
        await self.ended(gateways)

    async def whole(
        self,
        gateway: Gateway,
        gateways: list[Gateway],
        token: int | None,
    ) -> int:
        """Everything that leaves the log open; gives the writer token that it needs then."""
        name, logs = self.name, gateway.logs
        end = (await insist(READ, lambda: logs.reader.read(name, "latest"))).next
        await self.woken(gateways[-1], end, self.append(gateway, token))
        view = await insist(ROLL, lambda: logs.roll(name))
        if view.log.items[-1].first_offset != end + 1 or view.next_offset != end + 1:
            raise Violation(f"a roll at {end + 1} gives {view.log.items[-1]}")
        # Another one drops what was before, and this one goes on.
        await insist(TRUNCATE, lambda: gateways[0].logs.truncate(name, end + 1))
        if await self.append(gateway, token) != end + 1:
            raise Violation(f"nothing is appended at {end + 1}")
        await self.commit(gateway, token, end + 2)
        new_token, at = await insist(OPEN, lambda: logs.open(name, "who asks"))
        if at != end + 3:
            raise Violation(f"opened at {at}, which is not {end + 3}")
        for asked in gateways:
            page = partial(asked.logs.views.page, after=None, limit=10)
            views, _ = await insist(LIST, page)
            if name not in {view.log.name for view in views}:
                raise Violation(f"{asked.writer.id} lists no {name}")
        return int(new_token)

    async def commit(
        self,
        gateway: Gateway,
        token: int | None,
        at: int,
    ) -> None:
        """A transaction of one record comes onto the log."""
        served, begun = gateway.transactions, gateway.cluster.begin(self.name)
        ledgers = (write(gateway.cluster, begun, [["of a transaction"]]),)
        done = await insist(COMMIT, lambda: served.commit(begun, ledgers, token=token))
        if (done.first_offset, done.last_offset) != (at, at):
            raise Violation(f"{begun} is at {done.first_offset}, which is not {at}")

    async def ended(self, gateways: list[Gateway]) -> None:
        """Closed through one, deleted through another one, made again, and known to all."""
        name = self.name
        first, last = gateways[0].logs, gateways[-1].logs
        if (await insist(CLOSE, lambda: first.close(name))).log.end_offset is None:
            raise Violation("a closed log has no end")
        await insist(DELETE, lambda: last.delete(name))
        for gateway in gateways:
            try:
                await gateway.logs.get(name)
            except NoSuchLog:
                continue
            raise Violation(f"{gateway.writer.id} knows a log that is deleted")
        await insist(PUT, lambda: first.put(name, self.settings))
        for at, gateway in enumerate(gateways):
            if await self.append(gateway) != at:
                raise Violation(f"{gateway.writer.id} appends elsewhere than at {at}")


def members_know_of_its_end(cluster: Cluster, name: str) -> None:
    """Rule 18e: a deletion is told once members have copies that say so. Source: CI, a log that was there again after a
    rebuild, since nobody could be asked which of its ledgers forks name.
    """
    unreported = cluster.deleted_with[name] - cluster.told_deleted
    if unreported:
        raise Violation(f"rule 18e: nobody was told that ledgers {sorted(unreported)} are deleted")


class Namesakes:
    """One client that makes a log, writes it, reads it and deletes it, again and again under one name.
    It does one thing after the other, so it knows what each must find.
    """

    NAME: Final = "again"
    REPEATED: Final = 3
    """Requests that are the same in each log: same producer, same numbers, same bytes."""

    def __init__(
        self, cluster: Cluster, pick: Callable[[], Gateway], settings: LogSettings, count: int
    ) -> None:
        self.cluster, self.pick, self.settings, self.count = cluster, pick, settings, count

    async def insist(self, asked: Operation, work: Callable[[Gateway], Awaitable[Any]]) -> Any:
        """The answer through any gateway, another one if one dies; and whether the request was repeated."""
        is_again = False
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while asyncio.get_running_loop().time() < end:
            gateway = self.pick()
            try:
                return await gateway.while_it_lives(work(gateway)), is_again
            except ConnectionResetError:
                pass
            except QuorumLogError as error:
                judge_error(asked, error)
                if isinstance(error, NoSuchLog) and asked is DELETE and is_again:
                    return None, True
                if not error.retryable and error.outcome != UNKNOWN:
                    raise Violation(f"{asked.name} of a namesake is refused: {error!r}") from error
            is_again = True
            await asyncio.sleep(0.02)
        raise Violation(f"liveness: {asked.name} of a namesake never comes to an end")

    async def run(self) -> None:
        """All of them, one after the other; the last one stays deleted."""
        for generation in range(self.count):
            await self.insist(PUT, lambda gateway: gateway.logs.put(self.NAME, self.settings))
            wanted: list[str] = []
            for seq in range(self.REPEATED):
                await self.append("again", seq, f"{seq}", len(wanted))
                wanted.append(f"{seq}")
                if seq == 1:
                    await self.insist(ROLL, lambda gateway: gateway.logs.roll(self.NAME))
            await self.append(f"g{generation}", 0, f"g{generation}", len(wanted))
            wanted.append(f"g{generation}")
            for _ in range(3):
                found, _ = await self.insist(
                    READ, lambda gateway: gateway.logs.reader.read(self.NAME, 0, limit=10)
                )
                values = [record.record.value.decode() for record in found.records]
                if values != wanted[: len(values)] or (found.next < 3):
                    raise Violation(f"generation {generation} of a log holds {values}")
            _, is_again = await self.insist(DELETE, lambda gateway: gateway.logs.delete(self.NAME))
            if not is_again:
                members_know_of_its_end(self.cluster, self.NAME)

    async def append(self, producer: str, seq: int, value: str, offset: int) -> None:
        """One record, which must be at an offset."""
        call = Append.of((Record(value.encode()),), ProducerSeq(producer, 0, seq))
        done, _ = await self.insist(APPEND, lambda gateway: gateway.logs.append(self.NAME, call))
        if done.first_offset != offset:
            raise Violation(f"{value} of a namesake is told to be at {done.first_offset}")
