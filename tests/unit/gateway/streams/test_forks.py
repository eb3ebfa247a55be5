"""Forks over HTTP: what the protocol's own suite (tests/outside/conformance) does not ask. The ledgers are the model's."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
import pytest

from quorumlog.errors import LogReplaced, NotEnoughBookies
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.log.messages import Append
from services.gateway.logs import values
from services.gateway.logs.handle import LogHandle
from services.gateway.logs.offsets import read_head
from services.gateway.logs.reading import LogReader
from services.gateway.logs.store import LogRows
from services.gateway.logs.values import Since
from services.gateway.streams.config import Forked, StreamConfig
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in
from tests.unit.gateway.streams.test_streams import (
    CLOSED,
    JSON,
    LOG,
    STREAM,
    TEXT,
    Served,
    place,
    producer,
    served,
)
from tests.unit.logs.support import Answer

FORK = "/v1/stream/fork"
FORK_LOG = "durable-stream.fork"
FROM = {"Stream-Forked-From": STREAM}


@pytest.fixture
async def http() -> AsyncIterator[Served]:
    async with served() as found:
        yield found


def at(offset: int, sub: int = 0) -> dict[str, str]:
    return FROM | {"Stream-Fork-Offset": place(offset), "Stream-Fork-Sub-Offset": str(sub)}


async def forked(
    http: Served, headers: Mapping[str, str] = FROM, body: bytes = b"", *, path: str = FORK
) -> Answer:
    """A creation that says its content type only where a test does."""
    async with http.session.request(
        "PUT",
        http.urls[0] + path,
        data=body or None,
        headers=dict(headers),
        skip_auto_headers=["Content-Type"],
    ) as response:
        return Answer(response.status, response.headers, await response.read())


async def read(http: Served, path: str = FORK) -> bytes:
    answer = await http.ask("GET", path)
    assert answer.status == 200, answer
    return answer.body


async def test_a_displaced_owner_does_not_limit_where_a_fork_begins(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery has closed the source's ledger above the end that the owner knows (rule 27b)."""
    await http.put(TEXT, b"a")
    await http.post(TEXT, b"b")
    item = (await http.gateway.logs.rows.row(LOG)).last_item
    assert item is not None
    await http.gateway.recover(item.ledger_id)
    tail_of = LogReader.tail

    async def tail(reader: LogReader, *given: Any, **named: Any) -> tuple[int, bool]:
        end, is_closed = await tail_of(reader, *given, **named)
        return end - 1, is_closed

    monkeypatch.setattr(LogReader, "tail", tail)
    made = await forked(http, at(2))
    monkeypatch.undo()

    assert made.status == 201, made
    assert await read(http) == b"ab"


async def test_a_fork_within_an_open_ledger_has_what_was_there_and_the_source_goes_on(
    http: Served,
) -> None:
    await http.put(TEXT, b"a")
    for text in (b"b", b"c"):
        await http.post(TEXT, text)

    for offset, text in enumerate((b"", b"a", b"ab", b"abc")):
        path = f"{FORK}-{offset}"
        made = await forked(http, at(offset), path=path)
        assert (made.status, made.headers["Stream-Next-Offset"]) == (201, place(offset))
        await http.post(TEXT, b"x")
        assert await read(http, path) == text
        assert (await http.ask("POST", path, headers=TEXT, body=b"!")).status == 204
        assert await read(http, path) == text + b"!"

    assert await read(http, STREAM) == b"abcxxxx"


async def test_a_fork_of_a_batch_ends_within_it_whatever_follows_there(http: Served) -> None:
    await http.put(JSON, b"[1,2,3,4]")

    assert (await forked(http, at(0, 3))).status == 201
    assert (await forked(http, at(2), path=f"{FORK}-2")).status == 201
    assert (await http.ask("POST", FORK, headers=JSON, body=b'["x"]')).status == 204

    assert await read(http) == b'[1,2,3,"x"]'
    assert await read(http, f"{FORK}-2") == b"[1,2]"
    inner = await forked(http, {"Stream-Forked-From": FORK}, path=f"{FORK}-in")
    assert inner.status == 201
    assert await read(http, f"{FORK}-in") == b'[1,2,3,"x"]'
    page = await http.gateway.logs.reader.read(FORK_LOG, 1)
    assert [(found.first_offset, found.count) for found in page.batches] == [(1, 2), (3, 1)]
    beyond = {"Stream-Forked-From": f"{FORK}-2", "Stream-Fork-Offset": place(0)}
    for sub, status in ((2, 201), (3, 400)):
        headers = beyond | {"Stream-Fork-Sub-Offset": str(sub)}
        assert (await forked(http, headers, path=f"{FORK}-{sub}-of-2")).status == status


async def test_bytes_of_a_record_that_a_fork_begins_in_are_its_own_first_record(
    http: Served,
) -> None:
    await http.put(TEXT, b"hello")
    await http.post(TEXT, b"world")

    made = await forked(http, at(1, 2), b"!")

    assert (made.status, made.headers["Stream-Next-Offset"]) == (201, place(3))
    assert await read(http) == b"hellowo!"
    assert (await forked(http, at(1, 2), b"!")).status == 200
    assert (await forked(http, at(1, 6), path=f"{FORK}-x")).status == 400


async def test_how_the_source_ended_says_nothing_of_a_fork(http: Served) -> None:
    await http.put(TEXT, b"a")
    await http.post(producer(0) | CLOSED, b"b")

    made = await forked(http)
    answer = await http.ask("GET", FORK)

    assert (made.status, answer.body) == (201, b"ab")
    assert "Stream-Closed" not in {**made.headers, **answer.headers}
    again = await http.ask("POST", FORK, headers=producer(0), body=b"c")
    assert again.status == 200, "the source's producers are not the fork's"
    assert await read(http) == b"abc"


async def test_a_fork_that_is_closed_with_nothing_of_its_own_knows_no_producer_of_the_source(
    http: Served,
) -> None:
    await http.put(TEXT, b"a")
    await http.post(producer(0) | CLOSED, b"b")

    assert (await forked(http, FROM | CLOSED)).status == 201

    answer = await http.ask("POST", FORK, headers=producer(0), body=b"b")
    assert (answer.status, answer.headers.get("Stream-Closed")) == (409, "true")
    assert (await forked(http, FROM | CLOSED)).status == 200
    assert (await forked(http, FROM)).status == 409


async def test_a_sequence_of_the_source_is_none_of_the_forks(http: Served) -> None:
    await http.put(TEXT)
    await http.post(TEXT | {"Stream-Seq": "b"}, b"1")
    await forked(http)

    mine = await http.ask("POST", FORK, headers=TEXT | {"Stream-Seq": "a"}, body=b"2")

    assert mine.status == 204
    assert await read(http) == b"12"


async def test_a_repeat_is_the_same_fork_whatever_became_of_the_source(http: Served) -> None:
    await http.put(TEXT, b"a")
    assert (await forked(http)).status == 201
    await http.post(TEXT, b"b")

    assert (await forked(http)).status == 200
    assert (await forked(http, at(1))).status == 200
    assert (await forked(http, at(2))).status == 409
    assert (await forked(http, FROM | JSON)).status == 409
    assert (await forked(http, TEXT)).status == 409, "a stream that is no fork"
    assert (await http.ask("DELETE", STREAM)).status == 204
    assert (await forked(http)).status == 200
    assert await read(http) == b"a"


async def test_a_repeat_gives_the_fork_the_ledger_that_its_creation_could_not(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 18e: copies of that ledger alone tell a rebuild what the fork shares."""

    async def fails(*_given: object, **_named: object) -> LogMetadata:
        raise NotEnoughBookies

    await http.put(TEXT, b"a")
    logs = http.gateway.logs
    with monkeypatch.context() as patch:
        patch.setattr(LogHandle, "force", fails)
        assert (await forked(http)).status == 201
    assert (await logs.rows.row(FORK_LOG)).own == ()

    assert (await forked(http)).status == 200
    assert len((await logs.rows.row(FORK_LOG)).own) == 1


async def test_of_creations_at_once_one_is_new_and_its_body_stays(http: Served) -> None:
    await http.put(TEXT, b"hello")
    bodies = [b"%d" % n for n in range(6)]

    done = await asyncio.gather(*(forked(http, at(0, 3), body) for body in bodies))

    assert sorted(answer.status for answer in done) == [200] * 5 + [201]
    new = next(n for n, answer in enumerate(done) if answer.status == 201)
    assert await read(http) == b"hel" + bodies[new]


async def test_a_creation_that_broke_off_is_found_by_nobody_and_is_finished(http: Served) -> None:
    await http.put(TEXT, b"hello")
    await http.post(TEXT, b"world")
    source = await http.gateway.logs.rows.row("durable-stream.chat_2F42")
    config = StreamConfig("text/plain", forked=Forked(source.name, 1, 2, source.created_at))
    await http.gateway.logs.fork(LogMetadata(FORK_LOG, config.settings("records")), source, 1)

    assert (await http.ask("GET", FORK)).status == 404
    assert (await forked(http, {"Stream-Forked-From": FORK}, path=f"{FORK}-x")).status == 404
    assert (await forked(http, at(1, 2))).status == 201
    assert await read(http) == b"hellowo"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Stream-Forked-From": "/v1/stream/nothing"}, 404),
        ({"Stream-Forked-From": "/v2/other"}, 400),
        ({"Stream-Forked-From": "/v1/stream/%ff"}, 400),
        (FROM | {"Stream-Fork-Offset": "now"}, 400),
        (FROM | {"Stream-Fork-Offset": "1"}, 400),
        (FROM | {"Stream-Fork-Offset": place(9)}, 400),
        (FROM | {"Stream-Fork-Sub-Offset": "1"}, 400),
        ({"Stream-Fork-Offset": place(0)}, 400),
        (FROM | JSON, 409),
    ],
)
async def test_a_fork_of_nothing_is_refused_and_leaves_nothing(
    http: Served, headers: dict[str, str], status: int
) -> None:
    await http.put(TEXT, b"a")

    assert (await forked(http, headers)).status == status

    assert (await http.ask("GET", FORK)).status == 404
    assert (await http.ask("DELETE", STREAM)).status == 204
    assert (await http.put(TEXT)).status == 201


async def test_a_fork_has_the_sources_expiry_or_its_own(http: Served) -> None:
    later, latest = "2090-01-02T03:04:05Z", "2091-01-02T03:04:05Z"
    await http.put(TEXT | {"Stream-Expires-At": later}, b"a")

    await forked(http)
    await forked(http, FROM | {"Stream-Expires-At": latest}, path=f"{FORK}-2")

    heads = [await http.ask("HEAD", path) for path in (FORK, f"{FORK}-2")]
    assert [head.headers["Stream-Expires-At"] for head in heads] == [later, latest]


async def test_a_path_whose_stream_has_expired_is_free_for_a_fork(http: Served) -> None:
    past = {"Stream-Expires-At": "2020-01-02T03:04:05Z"}
    await http.put(TEXT, b"a")
    await http.ask("PUT", FORK, headers=JSON | past, body=b"[1]")

    assert (await forked(http)).status == 201

    assert await read(http) == b"a"


async def test_a_source_that_a_batch_has_ended_is_forked_before_its_row_says_so(
    http: Served,
) -> None:
    await http.put(TEXT, b"a")
    name = "durable-stream.chat_2F42"
    await http.gateway.logs.append(name, Append.of((Record(b"b"),), is_end=True))
    assert (await http.gateway.logs.rows.row(name)).state is LogState.OPEN

    assert (await forked(http)).status == 201

    assert await read(http) == b"ab"


async def test_what_retention_dropped_of_the_source_is_in_no_fork(http: Served) -> None:
    await http.put(TEXT, b"a")
    await http.post(TEXT, b"b")
    await http.gateway.logs.roll("durable-stream.chat_2F42")
    before = await forked(http, at(1), path=f"{FORK}-before")
    await http.gateway.logs.truncate("durable-stream.chat_2F42", 2)

    refused = await forked(http, at(1))

    assert (before.status, refused.status) == (201, 400)
    assert b"2 to 2" in refused.body
    assert await read(http, f"{FORK}-before") == b"a"
    assert (await forked(http, at(2))).status == 201
    assert await read(http) == b""


async def test_a_reader_of_the_old_row_finds_nothing_of_it_under_a_new_stream(http: Served) -> None:
    """Its ledgers are still there: the source has them."""
    await http.put(TEXT, b"old")
    await forked(http)
    other = http.gateway.cluster.gateway()
    before = await other.logs.reader.read(FORK_LOG, 0)
    await http.ask("DELETE", FORK)
    await http.ask("PUT", FORK, headers=TEXT, body=b"new")

    after = await other.logs.reader.read(FORK_LOG, 0)
    await other.end()

    found = [[each.record.value for each in page.records] for page in (before, after)]
    assert found == [[b"old"], [b"new"]]
    assert await read(http, STREAM) == b"old"


@pytest.mark.parametrize("before", [b"", b"old"])
async def test_a_page_has_records_of_one_stream_only(
    http: Served, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read has the row of a stream that was deleted and made again since, and its ledgers are there for a fork."""
    await http.put(TEXT, before)
    logs = http.gateway.logs
    if before:
        await forked(http)  # which rolls the source
    row = await logs.rows.row(LOG)
    row = replace(row, items=row.items[:1])  # as it is between the two steps of a roll
    await http.ask("DELETE", STREAM)
    await http.put(TEXT, b"new")
    await http.post(TEXT, b"newer")

    if before:
        monkeypatch.setattr(logs.rows, "known", lambda _name: row)
        page = await logs.reader.read(LOG, 0)
        assert ([bytes(value) for value in page.values], page.is_at_end) == ([b"old"], False)
    else:
        with pytest.raises(LogReplaced):
            await logs.reader.read(LOG, 0, row=row, wait_s=60)


async def test_a_search_for_a_time_ends_within_what_a_fork_has(http: Served) -> None:
    await http.put(TEXT, b"a")
    await http.post(TEXT, b"b")
    await forked(http, at(1))
    row = await http.gateway.logs.rows.row(FORK_LOG)
    first = (await http.gateway.logs.reader.read(FORK_LOG, 0)).records[0]

    found = await http.gateway.logs.reader.read(FORK_LOG, Since(first.timestamp_ms + 1))

    assert (found.records, found.next) == ([], 1)
    assert [item.first_offset for item in row.own] == [1]


async def test_a_forks_json_crosses_its_border_in_one_array(http: Served) -> None:
    await http.put(JSON, b'[{"n":0}]')
    await forked(http)
    await http.ask("POST", FORK, headers=JSON, body=b'[{"n":1},{"n":2}]')

    assert orjson.loads(await read(http)) == [{"n": 0}, {"n": 1}, {"n": 2}]


# --- guards that are taken out one by one: a claim above must fail -------------------------------


def all_of_them(_original: Any) -> Any:
    return lambda _self, count: count


def whoever_wrote_it(_original: Any) -> Any:
    """A takeover learns from the last ledger, though it was made for the source."""
    return property(
        lambda log: next((i for i in reversed(log.items) if i.first_offset is not None), None)
    )


@stand_in
async def with_the_sources_end(original: Any, self: LogReader, item: Any, page: Any) -> bool:
    """A reader takes each ledger for the log's own."""
    page.row = replace(page.row, forked_at=None)
    return bool(await original(self, item, page))


@stand_in
async def by_anybody(_original: Any, self: LogReader, row: LogMetadata) -> Any:
    """The last batch of a closed log is that of its last ledger, whoever wrote it."""
    item = row.last_item
    assert item is not None
    last = (await self._engine.get(item.ledger_id)).last_entry
    return await read_head(self._engine, item.ledger_id, last or 0)


GUARDS: Final = (
    Patch(values.Page, "own", all_of_them).guard(
        "a read of a fork continues beyond the fork's part of a ledger",
        "rule 27a",
        test_a_fork_of_a_batch_ends_within_it_whatever_follows_there,
    ),
    Patch(LogMetadata, "base", whoever_wrote_it).guard(
        "a takeover of a fork learns producers from the source's ledger",
        "rule 27a",
        test_how_the_source_ended_says_nothing_of_a_fork,
    ),
    Patch(LogMetadata, "base", whoever_wrote_it).guard(
        "a takeover of a fork learns the source's sequence",
        "rule 27a",
        test_a_sequence_of_the_source_is_none_of_the_forks,
    ),
    Patch(LogReader, "_fill_from", with_the_sources_end).guard(
        "a reader of a fork takes the source's end for the fork's",
        "rule 27a",
        test_how_the_source_ended_says_nothing_of_a_fork,
    ),
    Patch(LogReader, "last_batch", by_anybody).guard(
        "a closed fork knows the source's last producer",
        "rule 27a",
        test_a_fork_that_is_closed_with_nothing_of_its_own_knows_no_producer_of_the_source,
    ),
    Patch(
        LogRows, "known", lambda _original: lambda self, name: self._rows.get(name, (None,))[0]
    ).guard(
        "a stream is read by a row from before",
        "rule 27a",
        test_a_reader_of_the_old_row_finds_nothing_of_it_under_a_new_stream,
    ),
    Patch(LogMetadata, "is_sealed_below", always(True)).guard(
        "a fork begins within an open ledger without a roll",
        "rule 27a",
        test_a_fork_within_an_open_ledger_has_what_was_there_and_the_source_goes_on,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(guard: Guard) -> None:
    with applied(guard), pytest.raises(AssertionError):
        async with served() as http:
            await guard.claim(http)
