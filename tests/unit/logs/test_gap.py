"""A gateway that loses only its metadata connection: what happens meanwhile ends its handles and owners
once the news come again (rule 16a), whatever bookies still know of a fence.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import asyncpg
import pytest

from loadtest.stores import Stores
from quorumlog.errors import (
    UNKNOWN,
    LedgerClosed,
    LedgerFenced,
    LogFenced,
    NoSuchLedger,
    QuorumLogError,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.frames import Message, Op, Request
from services.gateway.engine import Engine
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import LogTimes
from services.metadata.attempts import ACCEPTED
from tests.support.database import connected
from tests.support.framed import Line
from tests.support.proxy import proxy_to
from tests.support.waiting import until, within
from tests.unit.gateway.engine.support import (
    Gate,
    Gateway,
    MemoryBookie,
    World,
    gateway,
    ledger,
    outage,
    world_of,
)
from tests.unit.logs.test_manager import SETTINGS, call

SWEEPS: Final = LogTimes(sweep_every_s=0.2, orphans_every_s=86_400)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two gateways, each with a metadata connection of its own."""

    world: World
    one: Gateway
    two: Gateway

    async def until_one_writes_nothing(self) -> None:
        """Asked without an append: an append must not be what tells."""
        await until(lambda: not self.one.engine.handles.live, "the handle at gateway 1 has ended")

    async def until_one_owns_nothing(self) -> None:
        """A sweep after the gap ends the owner of a log."""
        await until(lambda: not self.one.logs.is_owned("log"), "the owner at gateway 1 has ended")


@asynccontextmanager
async def pair_of(stores: Stores, times: LogTimes | None = None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(world_of(stores, gateways=0))
        both = []
        for _ in range(2):
            proxy = await stack.enter_async_context(proxy_to(world.service.url))
            one = gateway(world, proxy=proxy, log_times=times)
            both.append(await stack.enter_async_context(one))
        yield Pair(world, *both)


async def contents(logs: LogManager, start: int) -> list[str]:
    found = await logs.reader.read("log", start)
    assert [record.offset for record in found.records] == list(
        range(start, start + len(found.records))
    )
    return [record.record.value.decode() for record in found.records]


async def test_a_log_that_was_opened_and_truncated_elsewhere_takes_nothing_without_its_token(
    stores: Stores,
) -> None:
    async with pair_of(stores, SWEEPS) as pair:
        one, two = pair.one.logs, pair.two.logs
        await one.put("log", SETTINGS)
        old = (await one.append("log", call("a"))).ledger_id
        async with outage(pair.one.proxy):
            # An open ledger is written without metadata.
            assert (await one.append("log", call("b"))).first_offset == 1
            token, at = await two.open("log", "a writer")
            assert (await two.append("log", call("c", token=token))).first_offset == at == 2
            await two.truncate("log", 2)
            with pytest.raises(NoSuchLedger):
                await pair.world.metadata.get(old)
            pair.world.collect(old)

        await pair.until_one_writes_nothing()
        await pair.until_one_owns_nothing()

        with pytest.raises(LogFenced):
            await one.append("log", call("without a token"))
        done = await one.append("log", call("d", token=token))
        assert (done.first_offset, done.ledger_id != old) == (3, True)
        assert await contents(one, 2) == await contents(two, 2) == ["c", "d"]


async def test_a_log_that_was_deleted_and_made_again_elsewhere_is_another_one(
    stores: Stores,
) -> None:
    async with pair_of(stores, SWEEPS) as pair:
        one, two = pair.one.logs, pair.two.logs
        await one.put("log", SETTINGS)
        old = (await one.append("log", call("a"))).ledger_id
        async with outage(pair.one.proxy):
            await two.delete("log")
            await two.put("log", SETTINGS)
            assert (await two.append("log", call("b"))).first_offset == 0
            pair.world.collect(old)

        await pair.until_one_writes_nothing()
        await pair.until_one_owns_nothing()

        assert (await one.append("log", call("c"))).first_offset == 1
        assert await contents(two, 0) == ["b", "c"]


async def test_a_ledger_that_nobody_heard_of_before_a_loss_was_accepted_takes_nothing(
    stores: Stores,
) -> None:
    """Rule 18f: the owner lives, its ledger is lost, and no bookie had a copy when the loss was accepted."""
    async with pair_of(stores) as pair:
        one, two = pair.one.logs, pair.two.logs
        await one.put("log", SETTINGS)
        old = (await one.append("log", call("a"))).ledger_id
        before = await _log_row(stores)
        for bookie in pair.world.bookies.values():
            bookie.behave = partial(_without_copies, bookie)
        await one.roll("log")
        for bookie in pair.world.bookies.values():
            bookie.behave = bookie.obey
        await _go_back(stores, before, kept=old)

        acknowledged = ["a"]
        with contextlib.suppress(QuorumLogError):
            await one.append("log", call("b"))
            acknowledged.append("b")
        await pair.one.kill()
        await two.append("log", call("c"))

        assert await contents(two, 0) == [*acknowledged, "c"]


async def _without_copies(bookie: MemoryBookie, request: Request, line: Line) -> Message | None:
    return None if request.op is Op.KEEP_ROW else await bookie.obey(request, line)


async def _log_row(stores: Stores) -> asyncpg.Record:
    async with connected(stores) as connection:
        (row,) = await connection.fetch("SELECT version, attempt, body::text AS body FROM logs")
        return row


async def _go_back(stores: Stores, log: asyncpg.Record, *, kept: int) -> None:
    """The log has this row again, and of its ledgers only this one is there. Each loss is accepted."""
    async with connected(stores) as connection:
        await connection.execute(
            "UPDATE logs SET version = $1, attempt = $2, body = $3::text::jsonb", *log.values()
        )
        (lost,) = await connection.fetch(
            "SELECT ledger_id FROM ledgers WHERE ledger_id <> $1", kept
        )
        await _forget_row(stores, lost["ledger_id"])
        await connection.execute(
            "UPDATE attempts SET target = $1 WHERE at > (SELECT at FROM attempts WHERE attempt = $2)",
            ACCEPTED,
            log["attempt"],
        )
        await connection.execute("UPDATE cluster SET loss_accepted_at = now()")


async def test_a_ledger_that_was_deleted_elsewhere_is_written_no_more(stores: Stores) -> None:
    async with pair_of(stores) as pair:
        engine = pair.one.engine
        row = await ledger(engine, b"one")
        async with outage(pair.one.proxy):
            await engine.appends.append(row.ledger_id, [b"two"])
            await pair.two.engine.delete(row.ledger_id)
            pair.world.collect(row.ledger_id)

        await pair.until_one_writes_nothing()

        with pytest.raises(NoSuchLedger):
            await engine.appends.append(row.ledger_id, [b"three"])


async def test_a_recovery_elsewhere_ends_the_handle_though_no_bookie_tells(stores: Stores) -> None:
    """The row says it, nobody is fenced yet: what is pending is acknowledged no more."""
    async with pair_of(stores) as pair:
        engine = pair.one.engine
        row = await ledger(engine, b"one")
        gate = Gate(pair.world.of(row))
        pending = asyncio.ensure_future(engine.appends.append(row.ledger_id, [b"two"]))
        async with outage(pair.one.proxy):
            await pair.world.metadata.cas(row.in_recovery())
            assert not pending.done()

        async with within("the append is told"):
            with pytest.raises((LedgerFenced, LedgerClosed)) as reported:
                await pending

        assert reported.value.outcome == UNKNOWN
        gate.open()
        await _until_closed(pair.world, row)


async def test_news_that_a_ledger_is_in_recovery_end_its_handle(stores: Stores) -> None:
    async with pair_of(stores) as pair:
        row = await ledger(pair.one.engine, b"one")
        Gate(pair.world.of(row))

        await pair.world.metadata.cas(row.in_recovery())

        await pair.until_one_writes_nothing()


async def test_a_handle_whose_row_is_as_it_was_goes_on_after_a_gap(stores: Stores) -> None:
    async with pair_of(stores) as pair:
        engine = pair.one.engine
        row = await ledger(engine, b"one")
        gaps = engine.handles.rereads.gaps
        async with outage(pair.one.proxy):
            # Its own change, of which it hears after the gap or before.
            await pair.world.of(row)[0].stop()
            await engine.appends.append(row.ledger_id, [b"two"])
        await _reread(engine, gaps)

        await engine.appends.append(row.ledger_id, [b"three"])

        assert (await engine.close(row.ledger_id)).last_entry == 2


async def test_a_row_that_is_lost_without_a_tombstone_ends_nothing(stores: Stores) -> None:
    """A database that went back knows nothing of the ledger: that is an alarm and no verdict."""
    async with pair_of(stores) as pair:
        engine = pair.one.engine
        row = await ledger(engine, b"one")
        gaps = engine.handles.rereads.gaps
        async with outage(pair.one.proxy):
            await _forget_row(stores, row.ledger_id)
        await _reread(engine, gaps)

        await engine.appends.append(row.ledger_id, [b"two"])

        assert len(engine.handles.live) == 1


async def _reread(engine: Engine, gaps: int) -> None:
    """The rows were read again since the count of gaps was this."""
    await until(
        lambda: engine.handles.rereads.gaps > gaps and not engine.handles.rereads.waiting,
        "all rows are reread",
    )


async def _forget_row(stores: Stores, ledger_id: int) -> None:
    async with connected(stores) as connection:
        for table in ("ledger_members", "ledger_tags", "ledgers"):
            await connection.execute(f"DELETE FROM {table} WHERE ledger_id = $1", ledger_id)


async def _until_closed(world: World, row: LedgerMetadata) -> None:
    async def is_closed() -> bool:
        return (await world.metadata.get(row.ledger_id)).state is State.CLOSED

    await until(is_closed, "the writer's gateway has recovered its ledger (rule 10)")
