"""The SDK's logs, against the gateway's edge on the model of ledgers."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from quorumlog.client import Client, Record
from quorumlog.errors import InvalidRequest, LogExists, LogFenced, NoSuchLog, StaleProducer
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import http

__all__ = ["http"]


@pytest.fixture
async def client(http: Http) -> AsyncIterator[Client]:
    async with Client(*http.urls) as client:
        yield client


async def test_records_are_appended_read_and_followed_to_the_end(client: Client) -> None:
    log = await client.create_log("events", roll_entries=100)
    first = await log.append(b"a", b"")
    second = await log.append(Record(b"c", b"key", {"h": "v"}, "2026-01-02T03:04:05.000Z"), b"d")
    await log.close()

    assert (first.first_offset, first.last_offset, second.first_offset) == (0, 1, 2)
    records = [record async for record in log.tail()]
    assert records == [record async for record in log.records()]
    assert [record.value for record in records] == [b"a", b"", b"c", b"d"]
    assert (records[2].key, records[2].headers) == (b"key", {"h": "v"})
    assert records[2].timestamp == "2026-01-02T03:04:05.000Z"
    assert (records[2].ledger_id, records[2].entry_id) == (second.ledger_id, second.entry_id)
    assert [info["name"] async for info in client.logs()] == ["events"]


async def test_a_producer_counts_and_a_later_one_of_its_name_ends_it(client: Client) -> None:
    log = await client.create_log("events")
    older = log.producer("p", epoch=1)
    await older.append(b"a")
    again = log.producer("p", epoch=1)

    assert (await again.append(b"a")).is_duplicate
    again.seq = 0
    with pytest.raises(InvalidRequest):
        await again.append(b"b")
    await log.producer("p").append(b"c")
    with pytest.raises(StaleProducer):
        await older.append(b"d")

    assert [record.value async for record in log.records()] == [b"a", b"c"]


async def test_whoever_opens_a_log_fences_the_others_off(client: Client) -> None:
    log = await client.create_log("events")
    await log.append(b"a")
    assert await log.open("me") == 1
    await log.append(b"b")

    with pytest.raises(LogFenced):
        await client.log("events").append(b"c")

    assert (await log.info())["next_offset"] == 2


async def test_a_log_is_rolled_truncated_and_deleted(client: Client) -> None:
    log = await client.create_log("events")
    await log.append(b"a")
    assert len((await log.roll())["ledgers"]) == 2
    assert (await log.truncate(1))["first_offset"] == 1
    with pytest.raises(LogExists):
        await client.create_log("events", roll_entries=1)
    await log.delete()

    with pytest.raises(NoSuchLog):
        await log.append(b"b")


async def shell(http: Http, *words: str) -> tuple[int, str]:
    """The exit status and the output of `quorumlog log …`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from quorumlog.cli import main; main()", "log", *words,
        "--gateway", http.urls[0],
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_shell_creates_appends_to_reads_and_deletes_a_log(http: Http) -> None:
    assert (await shell(http, "create", "events", "--roll-bytes", "1000000"))[0] == 0
    assert await shell(http, "append", "events", "one", "two") == (0, "0..1\n")
    assert await shell(http, "read", "events") == (0, "one\ntwo\n")
    assert "events" in (await shell(http, "list"))[1]
    assert (await shell(http, "close", "events"))[0] == 0
    assert await shell(http, "tail", "events", "--from", "1") == (0, "two\n")
    assert (await shell(http, "delete", "events"))[0] == 0
    assert (await shell(http, "show", "events"))[0] == 4
