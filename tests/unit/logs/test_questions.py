"""What a page of a log costs other services: how often metadata and the ledger's writer are asked."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import NoSuchLog, OffsetTruncated
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine import Engine
from services.gateway.logs import reading
from services.gateway.logs.manager import LogManager
from tests.model.logs.model import Gateway
from tests.support.waiting import until
from tests.unit.gateway.engine.support import World, world_of
from tests.unit.logs.test_manager import SETTINGS as OF_MODEL
from tests.unit.logs.test_manager import a_cluster, call

SETTINGS = LogSettings(Quorum(3, 3, 2))
PAGES = 8


class Questions:
    """What a gateway asks for: the paths of its requests to metadata, and its questions for an LAC."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metadata: list[str] = []
        self.lacs: list[int | None] = []
        ask, lac = engine.metadata.ask, engine.peers.last_add_confirmed

        async def asking(method: str, path: str, *given: Any, **named: Any) -> Any:
            if path.startswith(("/v1/ledgers", "/v1/logs")):
                self.metadata.append(f"{method} {path}")
            return await ask(method, path, *given, **named)

        async def asking_lac(writer: Any, ledger_id: int, **named: Any) -> Any:
            self.lacs.append(named.get("after"))
            return await lac(writer, ledger_id, **named)

        monkeypatch.setattr(engine.metadata, "ask", asking)
        monkeypatch.setattr(engine.peers, "last_add_confirmed", asking_lac)

    def clear(self) -> None:
        self.metadata.clear()
        self.lacs.clear()


async def filled(world: World) -> tuple[LogManager, LogManager]:
    """The logs of two gateways, of which the first one has written a log of batches of several sizes."""
    one, two = (gateway.logs for gateway in world.gateways)
    await one.put("log", SETTINGS)
    for count in range(1, PAGES + 1):
        await one.append("log", Append.of([Record(b"%d" % n) for n in range(count)]))
    return one, two


async def test_pages_of_a_sealed_ledger_ask_metadata_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RECENT_S", 3600.0, raising=False)
    async with world_of(stores, bookies=3) as world:
        one, two = await filled(world)
        await one.roll("log")
        first = await two.reader.read("log", 0, limit=3)
        asked = Questions(world.other, monkeypatch)
        at, pages = first.next, 0
        while at < sum(range(PAGES + 1)):
            at = (await two.reader.read("log", at, limit=3, created_at=first.created_at)).next
            pages += 1

        assert pages > PAGES
        assert (asked.metadata, asked.lacs) == ([], [])


async def test_a_page_of_an_open_log_asks_for_its_row_and_its_lac_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(stores, bookies=3) as world:
        _, two = await filled(world)
        await two.reader.read("log", 0, limit=1)
        for start in (0, 5, 20, "latest", "earliest"):
            asked = Questions(world.other, monkeypatch)
            await two.reader.read("log", start)

            assert asked.metadata == ["GET /v1/logs/log"], start
            assert asked.lacs == [None], start
            monkeypatch.undo()


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_page_reads_no_more_entries_than_its_records_need(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    """A page of few records once read as many bytes of large batches as a page may have at most."""
    async with world_of(stores, bookies=3) as world:
        one, two = (gateway.logs for gateway in world.gateways)
        await one.put("log", SETTINGS)
        for start in range(0, 100, 10):
            batch = [Record(b"%d" % n) for n in range(start, start + 10)]
            await one.append("log", Append.of(batch))
        if is_sealed:
            await one.roll("log")
        else:
            await two.reader.read("log", 0, limit=1)  # learns how many records an entry has
        counts: list[int] = []
        read = two.reader._reads.read

        async def counting(ledger_id: int, first: int, **named: Any) -> Any:
            found = await read(ledger_id, first, **named)
            if "last" not in named:  # a search reads single entries
                counts.append(sum(run.count for run in found.runs))
            return found

        monkeypatch.setattr(two.reader._reads, "read", counting)
        at, values = 0, []
        for limit, most in ((10, 1), (20, 2), (5, 1), (10, 2), (1, 1), (14, 3), (40, 5)):
            page = await two.reader.read("log", at, limit=limit)
            values += [record.record.value for record in page.records]
            assert page.next - at == limit
            assert 0 < sum(counts) <= most, (limit, counts)
            at = page.next
            counts.clear()

        assert values == [b"%d" % n for n in range(100)]


async def test_news_of_a_tail_are_read_by_the_answer_that_told_of_them(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(stores, bookies=3) as world:
        one, two = await filled(world)
        end = (await two.reader.read("log", 0)).next
        asked = Questions(world.other, monkeypatch)
        tail = asyncio.ensure_future(two.reader.read("log", end, wait_s=60))
        await until(lambda: PAGES - 1 in asked.lacs, "the tail waits at the writer")
        await one.append("log", Append.of([Record(b"news")]))

        assert [found.record.value for found in (await tail).records] == [b"news"]
        assert asked.lacs.count(None) == 2, "once for the empty page, once for the news"


def _deleted(logs: LogManager) -> Awaitable[Any]:
    return logs.delete("log")


def _truncated(logs: LogManager) -> Awaitable[Any]:
    return logs.truncate("log", 2)


@pytest.mark.parametrize(
    ("gone", "error"), [(_deleted, NoSuchLog), (_truncated, OffsetTruncated)], ids=["del", "cut"]
)
async def test_what_another_gateway_deleted_is_served_no_longer_than_metadata_is_recent(
    gone: Callable[[LogManager], Awaitable[Any]],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "RECENT_S", 3600.0)
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a", "b"))
        await one.logs.roll("log")
        await one.logs.append("log", call("c"))
        page = await two.logs.reader.read("log", 0)
        assert [found.offset for found in page.records] == [0, 1, 2]

        async def read_on(gateway: Gateway) -> int:
            again = await gateway.logs.reader.read("log", 0, limit=2, created_at=page.created_at)
            return again.next

        assert await read_on(one) == 2
        await gone(one.logs)

        assert await read_on(two) == 2
        with pytest.raises(error):
            await read_on(one)
        monkeypatch.setattr(reading, "RECENT_S", -1.0)
        with pytest.raises(error):
            await read_on(two)


async def test_a_read_that_names_no_log_is_of_the_one_that_is_there_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "RECENT_S", 3600.0)
    async with a_cluster() as (_, (one, two)):
        for value in ("old", "new"):
            await one.logs.put("log", OF_MODEL)
            await one.logs.append("log", call(value))
            await one.logs.roll("log")
            page = await two.logs.reader.read("log", 0, limit=1)
            assert [found.record.value for found in page.records] == [value.encode()]
            await one.logs.delete("log")
