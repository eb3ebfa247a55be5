"""A log that is deleted and created again is another log (rule 27b): what readers and writers of the first one are told."""

import asyncio

import pytest

from quorumlog.errors import LogReplaced, NoSuchLog, OffsetBeyondEnd
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from services.gateway.logs.manager import LogManager
from tests.model.logs.model import Cluster
from tests.unit.gateway.streams.test_streams import CLOSED, STREAM, TEXT, place, served

SETTINGS = LogSettings(Quorum(3, 3, 2))
EVENTS = {"Accept": "text/event-stream"}
LOG = "/v1/logs/log"


async def made(logs: LogManager, *values: bytes) -> str:
    """The `created_at` of a new log that has records of these values."""
    view, _ = await logs.put("log", SETTINGS)
    for value in values:
        await logs.append("log", Append.of((Record(value),)))
    return view.log.created_at


async def replaced(logs: LogManager, *values: bytes) -> str:
    await logs.delete("log")
    return await made(logs, *values)


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
async def test_a_read_from_beyond_the_end_is_an_error_whether_it_waits_or_not(
    wait_s: float,
) -> None:
    gateway = Cluster(1).gateway()
    await made(gateway.logs, b"0", b"1")
    other = gateway.cluster.gateway()

    for each in (gateway, other):
        with pytest.raises(OffsetBeyondEnd) as error:
            await each.logs.reader.read("log", 3, wait_s=wait_s)
        assert error.value.members["next_offset"] == 2
        assert (await each.logs.reader.read("log", 2)).next == 2
    await gateway.logs.close("log")
    with pytest.raises(OffsetBeyondEnd):
        await other.logs.reader.read("log", 3, wait_s=wait_s)
    assert (await other.logs.reader.read("log", 2)).closed
    await gateway.end()
    await other.end()


async def test_the_end_of_a_displaced_owner_is_not_the_logs_end() -> None:
    """Another process has closed the ledger further on than the owner knows, and readers were told so."""
    gateway = Cluster(1).gateway()
    await made(gateway.logs, b"0", b"1")
    item = (await gateway.logs.rows.row("log")).last_item
    assert item is not None
    ledger = gateway.cluster.ledgers[item.ledger_id]
    await gateway.recover(item.ledger_id)
    tail = gateway.logs.reader.tail

    async def earlier(*given: object, **named: object) -> tuple[int, bool]:
        end, is_closed = await tail(*given, **named)  # type: ignore[arg-type]
        return end - 1, is_closed

    gateway.logs.reader.tail = earlier  # type: ignore[method-assign]
    gateway.logs.reader._index.drop(ledger.row.ledger_id)

    assert (await gateway.logs.reader.read("log", 2)).next == 2
    await gateway.end()


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_reader_of_a_log_gets_no_record_of_the_next_one(*, is_waiting: bool) -> None:
    gateway = Cluster(1).gateway()
    other = gateway.cluster.gateway()
    first = await made(gateway.logs, b"0", b"1")
    page = await other.logs.reader.read("log", 0)
    assert page.created_at == first

    if is_waiting:
        tail = asyncio.ensure_future(other.logs.reader.read("log", page.next, wait_s=60))
        await asyncio.sleep(0.1)
        await replaced(gateway.logs, *b"a b c d e".split())
        with pytest.raises(LogReplaced):
            await tail
    else:
        await replaced(gateway.logs, *b"a b c d e".split())
        with pytest.raises(LogReplaced):
            await other.logs.reader.read("log", page.next, created_at=page.created_at)
    await gateway.end()
    await other.end()


async def test_changes_that_name_a_log_leave_the_next_one_of_its_name_alone() -> None:
    gateway = Cluster(1).gateway()
    logs = gateway.logs
    first = await made(logs, b"0")
    second = await replaced(logs, b"a", b"b")
    await logs.roll("log")

    for work in (
        logs.append("log", Append.of((Record(b"x"),), created_at=first)),
        logs.close("log", created_at=first),
        logs.truncate("log", 2, created_at=first),
        logs.archived("log", 1, expect=None, created_at=first),
        logs.change("log", {"retention_seconds": 1}, created_at=first),
        logs.open("log", "me", created_at=first),
    ):
        with pytest.raises(LogReplaced):
            await work
    view = await logs.get("log")
    assert (view.next_offset, view.log.created_at, view.log.first_offset) == (2, second, 0)
    assert (view.log.state.value, view.log.archived_through) == ("OPEN", None)
    await gateway.end()


async def test_a_deletion_by_name_is_of_the_log_that_it_found_first() -> None:
    gateway = Cluster(1).gateway()
    logs = gateway.logs
    await made(logs, b"0")
    get, later = logs._store.get, ""

    async def replaced_meanwhile(name: str, known: LogMetadata | None = None) -> LogMetadata:
        nonlocal later
        row = await get(name, known)
        logs._store.get = get
        later = await replaced(logs, b"a")
        return row

    logs._store.get = replaced_meanwhile
    with pytest.raises(NoSuchLog):
        await logs.delete("log")

    assert (await logs.rows.row("log")).created_at == later
    await gateway.end()


async def test_ids_of_events_name_the_log_and_a_reader_that_comes_back_is_told() -> None:
    async with served() as http:
        await made(http.gateway.logs, b"0", b"1")
        await http.gateway.logs.close("log")
        events = await http.ask("GET", f"{LOG}/records", headers=EVENTS)
        ids = [line[4:] for line in events.body.decode().splitlines() if line.startswith("id: ")]
        assert [each.partition(".")[0] for each in ids] == ["0", "1"]
        page = await http.ask("GET", f"{LOG}/records?limit=1")

        await replaced(http.gateway.logs, *b"a b c d".split())

        back = await http.ask("GET", f"{LOG}/records", headers=EVENTS | {"Last-Event-ID": ids[-1]})
        assert (back.status, back.json["code"]) == (409, "log-replaced")
        for created in (page.json["created_at"], ids[0].partition(".")[2]):
            on = await http.ask("GET", f"{LOG}/records?from=1&created={created}")
            assert (on.status, on.json["code"]) == (409, "log-replaced")
        beyond = await http.ask("GET", f"{LOG}/records?from=9&wait_ms=30000")
        assert (beyond.status, beyond.json["next_offset"]) == (416, 4)


@pytest.mark.parametrize("live", ["", "&live=long-poll", "&live=sse"])
async def test_an_offset_of_a_stream_means_nothing_in_the_next_one(live: str) -> None:
    async with served() as http:
        await http.put(TEXT, b"0")
        end = (await http.post(TEXT, b"1")).headers["Stream-Next-Offset"]
        assert end == place(2)
        assert (await http.ask("DELETE", STREAM)).status == 204
        for text in (b"a", b"b", b"c"):
            assert (await (http.put if text == b"a" else http.post)(TEXT, text)).status < 300

        back = await http.ask("GET", f"{STREAM}?offset={end}{live}")

        assert (back.status, back.json["code"]) == (409, "log-replaced")


async def test_an_append_and_a_close_of_a_stream_are_of_the_stream_that_was_judged() -> None:
    async with served() as http:
        await http.put(TEXT, b"0")
        logs = http.gateway.logs
        find = logs.rows.row

        async def deleted_meanwhile(name: str) -> object:
            row = await find(name)
            logs.rows.row = find  # type: ignore[method-assign]
            assert (await http.ask("DELETE", STREAM)).status == 204
            assert (await http.put({"Content-Type": "application/json"})).status == 201
            return row

        for headers in (TEXT, TEXT | CLOSED):
            logs.rows.row = deleted_meanwhile  # type: ignore[assignment]
            late = await http.post(headers, b"this is {no json")
            assert (late.status, late.json["code"]) == (409, "log-replaced")
            found = await http.ask("GET", f"{STREAM}?offset=-1")
            assert (found.body, "Stream-Closed" in found.headers) == (b"[]", False)
            assert (await http.ask("DELETE", STREAM)).status == 204
            assert (await http.put(TEXT)).status == 201
