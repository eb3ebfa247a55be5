"""Requests that use a log for long (ADR 40): the accesses that are counted while they last, and what that costs."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import pytest

from quorumlog.errors import EntryUnavailable, NoSuchLog
from quorumlog.protocol.log import Expiry, LogMetadata, LogSettings
from quorumlog.protocol.metadata import Writer
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine.peers import Peers
from services.gateway.logs import peers
from services.gateway.logs.accesses import Accesses, Verdict
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.sweep import Sweep
from tests.model.logs.model import Cluster, Gateway, Store
from tests.support.virtual import VirtualLoop, in_virtual_time
from tests.support.waiting import until

SETTINGS: Final = LogSettings(Quorum(3, 3, 2))
IDLE_S: Final = 4
READERS: Final = 20


@dataclass
class Questions:
    """The questions that a gateway asks keepers, as they are under way."""

    gateway: Gateway
    asked: int = 0
    open: int = 0
    open_max: int = 0
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        accesses = self.gateway.logs.accesses
        self._ask, self._start = accesses._ask, accesses._start
        accesses._ask, accesses._start = self.ask, self.start

    async def ask(self, keeper: Writer, name: str, expiry: Expiry, is_access: bool) -> Verdict:
        self.asked += 1
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        try:
            async with asyncio.timeout(5.0):  # as LogPeers does
                return await self._ask(keeper, name, expiry, is_access)
        finally:
            self.open -= 1

    def start(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        self.tasks.append(task := self._start(work))
        return task

    def unsettled(self) -> int:
        """Tasks in the background that have not ended."""
        return sum(not task.done() for task in self.tasks)


@dataclass
class Pair:
    """A log with its keeper, another gateway that serves its readers, and what that one asks."""

    cluster: Cluster
    keeper: Gateway
    other: Gateway
    questions: Questions
    freed_s: list[float]

    async def row(self) -> LogMetadata:
        """As a request to the other gateway reads it, which counts as an access."""
        row = await self.other.logs.rows.row("log")
        assert await self.other.logs.accesses.lives(row, is_access=True)
        return row


@contextlib.asynccontextmanager
async def a_pair() -> AsyncIterator[Pair]:
    """Both sweep: a log that nobody uses goes. No task may fail unseen."""
    cluster = Cluster(1)
    keeper, other = cluster.gateway(), cluster.gateway()
    freed_s: list[float] = []
    cluster.on_freed = lambda _name, _gateway: freed_s.append(cluster.now())
    await keeper.logs.create("log", SETTINGS, idle_s=IDLE_S)
    sweeps = [
        asyncio.create_task(gateway.while_it_lives(Sweep(gateway.logs, Store(gateway)).run()))
        for gateway in (keeper, other)
    ]
    try:
        yield Pair(cluster, keeper, other, Questions(other), freed_s)
    finally:
        keeper.goes.set()
        for sweep in sweeps:
            sweep.cancel()
        await asyncio.gather(*sweeps, return_exceptions=True)
        for gateway in (keeper, other):
            await gateway.end()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    assert loop.failures == []


@in_virtual_time(seed=1)
async def test_readers_of_a_log_ask_its_silent_keeper_one_question_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_pair() as pair:
        # Another gateway is cut off too: nobody becomes the keeper in place of the silent one.
        row = await pair.row()
        pair.other.cut_off(60.0, asks=False, hears=True)
        with contextlib.ExitStack() as readers:
            for _ in range(READERS):
                readers.enter_context(pair.other.logs.accesses.during(row))
                await asyncio.sleep(0.01)
            pair.keeper.goes.clear()
            await asyncio.sleep(40.0)
            assert pair.questions.asked > 2
            assert pair.questions.open_max == 1
            assert pair.questions.unsettled() <= 1
            with pair.other.logs.accesses.during(row):
                pass  # a reader that comes and goes leaves no other question behind
            assert pair.questions.unsettled() <= 1
            asked = pair.questions.asked
        await asyncio.sleep(20.0)
        assert pair.questions.asked <= asked + 1
        assert pair.questions.unsettled() == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@in_virtual_time(seed=1)
async def test_readers_tell_a_keeper_that_answers_once_in_a_slack() -> None:
    async with a_pair() as pair:
        row = await pair.row()
        before = pair.questions.asked
        with contextlib.ExitStack() as readers:
            for _ in range(READERS):
                readers.enter_context(pair.other.logs.accesses.during(row))
                await asyncio.sleep(0.1)
            await asyncio.sleep(10 * IDLE_S)
            assert pair.freed_s == []
        seconds = READERS * 0.1 + 10 * IDLE_S
        assert 0 < pair.questions.asked - before <= seconds / (IDLE_S / 4)


@in_virtual_time(seed=1)
async def test_a_log_stays_as_long_as_one_of_its_readers_and_goes_after_the_last_one() -> None:
    async with a_pair() as pair:
        accesses = pair.other.logs.accesses
        row = await pair.row()
        with accesses.during(row):
            with accesses.during(row):
                await asyncio.sleep(2 * IDLE_S)
            await asyncio.sleep(2 * IDLE_S)
            with accesses.during(row):
                await asyncio.sleep(2 * IDLE_S)
            assert pair.freed_s == []
        await until(lambda: bool(pair.freed_s), "nobody uses it")
        assert pair.questions.unsettled() == 0


@in_virtual_time(seed=1)
async def test_a_log_that_is_read_for_long_outlives_its_keeper_and_the_next_one_is_told() -> None:
    async with a_pair() as pair:
        third = pair.cluster.gateway()
        row = await pair.row()
        with pair.other.logs.accesses.during(row):
            # Another process becomes the keeper of a log that is read, and the row of the reader's request names the first.
            pair.keeper.kill()
            await third.logs._appoint("log", row.expiry.term if row.expiry else "")
            await asyncio.sleep(6 * IDLE_S)
            now = await pair.other.logs.rows.row("log")
            assert now.expiry is not None
            assert now.expiry.keeper.id == third.writer.id
            assert pair.freed_s == []
            before = pair.questions.asked
            await asyncio.sleep(4 * IDLE_S)
            # The new keeper alone is asked: the dead one would have been asked once more each time.
            assert pair.questions.asked - before <= 4 * 4 + 1
        await third.end()


@in_virtual_time(seed=1)
async def test_a_log_that_was_deleted_under_its_readers_is_asked_for_no_more() -> None:
    async with a_pair() as pair:
        row = await pair.row()
        with pair.other.logs.accesses.during(row):
            await pair.keeper.logs.delete("log")
            # Its former keeper would remember it for long; a row is read where that one is gone.
            pair.keeper.kill()
            await asyncio.sleep(3 * IDLE_S)
            asked = pair.questions.asked
            await asyncio.sleep(10 * IDLE_S)
            assert pair.questions.asked == asked
            with pytest.raises(NoSuchLog):
                await pair.other.logs.rows.row("log")


@in_virtual_time(seed=1)
async def test_when_a_protection_is_lifted_the_time_without_use_begins_anew() -> None:
    async with a_pair() as pair:
        await pair.row()
        await pair.other.logs.change("log", {}, deletion_protection=True)
        await asyncio.sleep(5 * IDLE_S)
        lifted_s = pair.cluster.now()
        await pair.other.logs.change("log", {}, deletion_protection=False)
        await until(lambda: bool(pair.freed_s), "nobody uses it")
        assert pair.freed_s[0] >= lifted_s + IDLE_S


@in_virtual_time(seed=1)
async def test_a_reader_from_before_a_protection_was_lifted_is_counted_after_it() -> None:
    async with a_pair() as pair:
        await pair.other.logs.change("log", {}, deletion_protection=True)
        with pair.other.logs.accesses.during(await pair.row()):
            await asyncio.sleep(2 * IDLE_S)
            await pair.other.logs.change("log", {}, deletion_protection=False)
            await asyncio.sleep(10 * IDLE_S)
            assert pair.freed_s == []
        await until(lambda: bool(pair.freed_s), "nobody uses it")


async def test_over_http_a_keeper_that_answers_nothing_gets_one_request_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A keeper that stands still: its socket takes requests, and nobody answers them."""
    monkeypatch.setattr(peers, "_ACCESS_S", 0.6)
    monkeypatch.setattr(peers, "_ALIVE_S", 0.3)
    asked, under_way = list[str](), list[int]()
    waiting = 0

    async def begins(
        _session: Any, _context: Any, request: aiohttp.TraceRequestStartParams
    ) -> None:
        nonlocal waiting
        waiting += 1
        asked.append(request.url.path)
        under_way.append(waiting)

    async def ends(*_: Any) -> None:
        nonlocal waiting
        waiting -= 1

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begins)
    trace.on_request_end.append(ends)
    trace.on_request_exception.append(ends)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keeper = Writer("keeper", f"http://127.0.0.1:{silent.getsockname()[1]}")
        row = LogMetadata("log", SETTINGS, expiry=Expiry(1, keeper, "term"))
        async with aiohttp.ClientSession(trace_configs=[trace]) as session:
            others = LogPeers(Peers(session))
            background: set[asyncio.Task[Any]] = set()

            def start(work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
                background.add(task := asyncio.create_task(work))
                return task

            async def read(_name: str) -> LogMetadata:
                return row  # nobody else becomes the keeper

            async def nothing(*_: str) -> bool:
                return False

            accesses = Accesses(
                me=Writer("me", "http://me"),
                ask=others.access,
                is_alive=others.is_alive,
                read=read,
                appoint=nothing,
                remove=nothing,
                start=start,
                awake_s=time.monotonic,
            )
            with contextlib.ExitStack() as readers:
                for _ in range(READERS):
                    readers.enter_context(accesses.during(row))
                await until(lambda: len(asked) > 6, "the keeper was asked again and again")
                assert sum(not task.done() for task in background) <= 1
            await asyncio.wait(background)
            assert all(isinstance(task.exception(), EntryUnavailable) for task in background)
    assert any(path.endswith("/access") for path in asked)
    assert max(under_way) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
