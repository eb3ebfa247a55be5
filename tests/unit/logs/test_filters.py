"""Reads with a filter return exactly the records that match, in every form, and say how far they looked."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlencode

import orjson
import pytest

from quorumlog.protocol.batch import Record, StoredBatch, encode, opened
from services.gateway.edge import pages as edge_pages
from services.gateway.logs.filters import Filter
from services.gateway.logs.values import LogBatches
from tests.support.waiting import until, within
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, RECORDS, code, served

EVENTS: Final = {"Accept": "text/event-stream"}
FILTERS: Final[list[dict[str, str]]] = [
    {"key": "a"},
    {"key": "ab"},
    {"key": "none"},
    {"key": ""},
    {"key_prefix": "a"},
    {"key_prefix": ""},
    {"header[h]": "1"},
    {"header[h]": "1", "header[g]": "2"},
    {"key": "a", "header[h]": "1"},
    {"key": "ab", "key_prefix": "a"},
]
KEYS: Final = (None, "", "a", "ab", "b", "ключ")


def drawn(dice: random.Random, number: int) -> dict[str, Any]:
    record: dict[str, Any] = {"text": f"r{number}"}
    if (key := dice.choice(KEYS)) is not None:
        record["key"] = key
    headers = {name: dice.choice("12") for name in "hg" if dice.random() < 0.5}
    return record | ({"headers": headers} if headers else {})


def matches(record: dict[str, Any], asked: dict[str, str]) -> bool:
    key, headers = record.get("key"), record.get("headers", {})
    return (
        ("key" not in asked or key == asked["key"])
        and ("key_prefix" not in asked or (key is not None and key.startswith(asked["key_prefix"])))
        and all(headers.get(n) == asked[f"header[{n}]"] for n in "hg" if f"header[{n}]" in asked)
    )


@pytest.fixture
async def filled() -> AsyncIterator[tuple[Http, list[dict[str, Any]]]]:
    """A closed log of 300 records in batches of several sizes and five ledgers."""
    dice = random.Random("filters")
    records = [drawn(dice, number) for number in range(300)]
    async with served() as http:
        assert (await http.ask("PUT", LOG, {"roll_entries": 5})).status == 201
        left = list(records)
        while left:
            count = dice.randint(1, 40)
            answer = await http.ask("POST", RECORDS, {"records": left[:count]})
            assert answer.status == 201, answer
            del left[:count]
        assert (await http.ask("POST", f"{LOG}/close")).status == 200
        yield http, records


def url(asked: dict[str, str], **more: object) -> str:
    return f"{RECORDS}?{urlencode({'encoding': 'text', **asked, **more})}"


async def listed(http: Http, asked: dict[str, str], limit: int) -> list[tuple[int, str]]:
    """All pages of a list, each no longer than `limit`."""
    found: list[tuple[int, str]] = []
    at = 0
    while True:
        page = (await http.ask("GET", url(asked, **{"from": at, "limit": limit}))).json
        assert len(page["records"]) <= limit
        assert all(at <= record["offset"] < page["next"] for record in page["records"])
        found += [(record["offset"], record["text"]) for record in page["records"]]
        if page["next"] == at:
            assert page["closed"]
            return found
        at = page["next"]


@pytest.mark.parametrize("asked", FILTERS, ids=str)
async def test_a_filter_returns_exactly_the_records_that_match(
    filled: tuple[Http, list[dict[str, Any]]], asked: dict[str, str]
) -> None:
    http, records = filled
    expected = [(at, r["text"]) for at, r in enumerate(records) if matches(r, asked)]

    for limit in (1, 7, 1000):
        assert await listed(http, asked, limit) == expected
    lines = await http.ask("GET", url(asked), headers={"Accept": "application/x-ndjson"})
    assert [
        (r["offset"], r["text"]) for r in map(orjson.loads, lines.body.splitlines())
    ] == expected
    events = await http.ask("GET", url(asked), headers=EVENTS)
    data = [line[6:] for line in events.body.splitlines() if line.startswith(b'data: {"offset')]
    assert [(r["offset"], r["text"]) for r in map(orjson.loads, data)] == expected
    frames = await http.ask(
        "GET", url(asked, limit=1000), headers={"Accept": "application/vnd.quorumlog.frames"}
    )
    offsets, at = [], 0
    while at < len(frames.body):
        offsets.append(int.from_bytes(frames.body[at : at + 8], "big"))
        at += 12 + int.from_bytes(frames.body[at + 8 : at + 12], "big")
    assert offsets == [offset for offset, _ in expected]
    assert frames.headers["Next-Offset"] == "300"


async def test_a_page_without_a_match_advances_next(
    filled: tuple[Http, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, _ = filled
    monkeypatch.setattr(edge_pages, "_FILTERED_BYTES_MAX", 1)  # one read of the log for each page
    monkeypatch.setattr(edge_pages, "TAIL_BYTES", 200)

    at, pages = 0, 0
    while True:
        page = (await http.ask("GET", url({"key": "none"}, **{"from": at}))).json
        assert page["records"] == []
        assert page["closed"] == (page["next"] == 300)
        if page["next"] == at:
            break
        at, pages = page["next"], pages + 1
    assert (at, pages > 10) == (300, True)


async def test_events_report_how_far_the_gateway_has_looked() -> None:
    async with served() as http:
        assert (await http.ask("PUT", LOG, {})).status == 201
        records = [{"text": "a", "key": "a"}, {"text": "b", "key": "b"}, {"text": "c"}]
        assert (await http.ask("POST", RECORDS, {"records": records})).status == 201
        async with (
            within("the tail reports all three records"),
            http.session.get(http.urls[0] + url({"key": "b"}), headers=EVENTS) as answer,
        ):
            ids = []
            async for line in answer.content:
                if line.startswith(b"id: "):
                    ids.append(int(line[4:].partition(b".")[0]))
                if ids[-1:] == [2]:
                    break
            assert ids == [1, 2]
            # The next record does not match, and the tail reports its offset all the same.
            assert (await http.ask("POST", RECORDS, {"text": "d", "key": "d"})).status == 201
            async for line in answer.content:
                if line.startswith(b"id: "):
                    assert int(line[4:].partition(b".")[0]) == 3
                    break


async def test_a_read_waits_for_a_record_that_matches() -> None:
    """A read that is not at the end does not wait, so the read must wait before the first append."""
    async with served() as http:
        assert (await http.ask("PUT", LOG, {})).status == 201

        async def is_waiting() -> bool:
            metrics = (await http.ask("GET", "/metrics")).body.decode().splitlines()
            return "quorumlog_http_waiters 1.0" in metrics

        async with within("the record that matches"):
            waiting = asyncio.create_task(http.ask("GET", url({"key": "b"}, wait_ms=60_000)))
            await until(is_waiting, "the read waits")
            async with http.session.get(http.urls[0] + url({"key": "b"}), headers=EVENTS) as tail:
                await tail.content.readline()
                for text in "ab":
                    assert (
                        await http.ask("POST", RECORDS, {"text": text, "key": text})
                    ).status == 201
                page = (await waiting).json
        assert [record["text"] for record in page["records"]] == ["b"]
        assert page["next"] == 2


async def test_a_limit_of_events_with_a_filter_cannot_be_resumed(
    filled: tuple[Http, list[dict[str, Any]]],
) -> None:
    http, _ = filled
    answer = await http.ask(
        "GET", url({"key": "a"}, limit=3), headers={**EVENTS, "Last-Event-ID": "7"}
    )
    assert code(answer) == (422, "invalid")


def test_a_page_is_cut_behind_the_record_that_fills_it() -> None:
    records = [Record(b"v" * 100, b"a" if at % 3 else b"b") for at in range(30)]
    stored = StoredBatch(5, 1, 0, 0, opened(encode(records)))
    page = LogBatches((stored,), 5, 35, 0, True, "", is_at_end=True)

    all_of_b = Filter(key=b"b").page(page, 100, 1 << 20)
    assert [found.first_offset for found in all_of_b.batches] == list(range(5, 35, 3))
    assert (all_of_b.next, all_of_b.closed) == (35, True)
    two = Filter(key=b"b").page(page, 2, 1 << 20)
    assert ([found.first_offset for found in two.batches], two.next) == ([5, 8], 9)
    assert not two.closed
    assert not two.is_at_end
    short = Filter(key=b"a").page(page, 100, 400)
    assert ([(f.first_offset, f.count) for f in short.batches], short.next) == (
        [(6, 2), (9, 1)],
        10,
    )
