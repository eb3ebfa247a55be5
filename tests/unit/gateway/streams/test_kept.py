"""Kept pages: many readers cost one read, and nothing is told that is not true any more."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from quorumlog.errors import EntryUnavailable
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import Append
from services.gateway.logs import store
from services.gateway.logs.values import LogBatches
from services.gateway.streams.reads import KeptPages
from tests.unit.gateway.streams.test_streams import LOG, STREAM, Served, place, served
from tests.unit.logs.support import Answer

OCTETS = {"Content-Type": "application/octet-stream"}
MIB = 1 << 20


@pytest.fixture
async def http() -> AsyncIterator[Served]:
    async with served() as found:
        yield found


@pytest.fixture
def asked(http: Served, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the log was read, read by read, by whatever row."""
    places: list[Any] = []
    read, full_page = http.gateway.logs.reader.read, http.gateway.logs.reader.full_page

    async def counted(name: str, start: Any, **options: Any) -> LogBatches:
        places.append(start)
        return await read(name, start, **options)

    async def counted_too(row: Any, start: int, **options: Any) -> LogBatches | None:
        places.append(start)
        return await full_page(row, start, **options)

    monkeypatch.setattr(http.gateway.logs.reader, "read", counted)
    monkeypatch.setattr(http.gateway.logs.reader, "full_page", counted_too)
    return places


async def fill(http: Served, *letters: str) -> None:
    """A stream of records of 600 KiB: two fill a page."""
    assert (await http.put(OCTETS)).status in (200, 201)
    for letter in letters:
        assert (await http.post(OCTETS, letter.encode() * (600 << 10))).status == 204


async def test_a_large_page_that_is_not_full_does_not_say_for_ever_that_it_ends_the_stream(
    http: Served,
) -> None:
    assert (await http.put(OCTETS)).status in (200, 201)
    assert (await http.post(OCTETS, b"a" * (950 << 10))).status == 204
    await get(http, 0)
    assert (await http.post(OCTETS, b"b")).status == 204

    assert not shown(await get(http, 0))[3]


async def test_a_page_by_an_older_row_does_not_say_that_it_ends_the_log(http: Served) -> None:
    assert (await http.put(OCTETS)).status in (200, 201)
    assert (await http.post(OCTETS, b"a" * (950 << 10))).status == 204
    logs = http.gateway.logs
    older = await logs.rows.row(LOG)
    await logs.roll(LOG)
    assert (await http.post(OCTETS, b"b")).status == 204

    page = await logs.reader.full_page(older, 0, limit=10_000, max_bytes=MIB)

    assert page is not None
    assert not page.is_at_end


async def get(http: Served, offset: str | int) -> Answer:
    text = offset if isinstance(offset, str) else place(offset)
    return await http.ask("GET", f"{STREAM}?offset={text}")


def shown(answer: Answer) -> tuple[int, str, str, bool]:
    """Status, the letters of the body, where to go on, and whether that is the tail."""
    letters = "".join(dict.fromkeys(answer.body.decode()))
    following = answer.headers["Stream-Next-Offset"].partition("_")[0].lstrip("0")
    return answer.status, letters, following, "Stream-Up-To-Date" in answer.headers


async def test_a_full_page_is_read_once_for_all_readers(http: Served, asked: list[Any]) -> None:
    await fill(http, "a", "b", "c")

    first, again, by_number = await get(http, "-1"), await get(http, "-1"), await get(http, 0)
    other = await get(http, 1)

    assert shown(first) == (200, "ab", "2", False)
    assert [0 if at == "earliest" else at for at in asked] == [0, 1], "the others were kept"
    for answer in (again, by_number):
        assert (answer.status, answer.body) == (200, first.body)
        own = {"Date": "", "X-Request-ID": ""}
        assert {**answer.headers, **own} == {**first.headers, **own}
    assert shown(other) == (200, "bc", "3", False)
    same = await http.ask(
        "GET", f"{STREAM}?offset=-1", headers={"If-None-Match": first.headers["ETag"]}
    )
    assert same.status == 304
    tag = first.headers["ETag"]
    for known, status in (
        ("*", 304), (f"W/{tag}", 304), (f'"a", {tag}', 304), (f"xx{tag}yy", 200), ('"*"', 200), ('"a"', 200),
    ):  # fmt: skip
        same = await http.ask("GET", f"{STREAM}?offset=-1", headers={"If-None-Match": known})
        assert same.status == status, known


async def test_a_page_at_the_tail_is_not_kept(http: Served) -> None:
    await fill(http, "a")
    assert shown(await get(http, "-1")) == (200, "a", "1", True)
    await fill(http, "b", "c")
    assert shown(await get(http, "-1")) == (200, "ab", "2", False)
    assert shown(await get(http, 2)) == (200, "c", "3", True)
    assert (await http.post(OCTETS | {"Stream-Closed": "true"}, b"d")).status == 204
    closed = await get(http, 2)
    assert shown(closed) == (200, "cd", "4", True)
    assert closed.headers["Stream-Closed"] == "true"


@pytest.fixture
def rows_asked(http: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Logs whose row the primary was asked for. A row is recent for as long as the test lasts."""
    names: list[str] = []
    get = http.gateway.logs.rows._store.get

    async def counted(name: str, known: LogMetadata | None = None) -> Any:
        names.append(name)
        return await get(name, known)

    monkeypatch.setattr(http.gateway.logs.rows._store, "get", counted)
    monkeypatch.setattr(store, "RECENT_S", 1e6)
    return names


async def test_who_catches_up_asks_for_the_row_at_the_beginning_and_at_the_tail(
    http: Served, rows_asked: list[str]
) -> None:
    await fill(http, *"abcde")
    rows_asked.clear()
    http.gateway.logs.rows.changed(LOG)

    pages = [await get(http, at) for at in ("-1", 2, 4)]

    assert [shown(page) for page in pages] == [
        (200, "ab", "2", False),
        (200, "cd", "4", False),
        (200, "e", "5", True),
    ]
    assert rows_asked == [LOG, LOG], "a recent row never says where the log ends"


async def test_a_recent_row_hides_no_record_that_another_gateway_appended(
    http: Served, rows_asked: list[str]
) -> None:
    await fill(http, "a")
    assert shown(await get(http, 0)) == (200, "a", "1", True)
    other = http.gateway.cluster.gateway()
    await other.logs.roll(LOG)
    await other.logs.append(LOG, Append.of((Record(b"b" * 10),)))
    await other.end()
    rows_asked.clear()

    assert shown(await get(http, 0)) == (200, "ab", "2", True)
    assert shown(await get(http, 1)) == (200, "b", "2", True)
    assert (await get(http, 3)).status == 400, "beyond the tail"
    assert len(rows_asked) >= 2


async def test_only_a_full_page_is_told_by_a_recent_row(
    http: Served, rows_asked: list[str]
) -> None:
    """A small stream that another gateway has deleted, or made again, is so for everybody at once."""
    await fill(http, "a")
    assert shown(await get(http, "-1")) == (200, "a", "1", True)
    other = http.gateway.cluster.gateway()
    await other.logs.delete(LOG)

    assert (await get(http, "-1")).status == 404
    assert rows_asked[-1] == LOG
    await other.end()


@pytest.mark.usefixtures("rows_asked")
async def test_who_reads_what_nobody_can_read_now_waits_for_it_once(
    http: Served, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(http, *"abc")
    assert shown(await get(http, 2)) == (200, "c", "3", True)
    asked.clear()

    async def silent(*_given: Any, **_named: Any) -> NoReturn:
        raise EntryUnavailable("no bookie answers", ledger_id=1, entry_id=0)

    monkeypatch.setattr(http.gateway.logs.reader._engine, "read", silent)

    assert (await get(http, 0)).status == 503
    assert asked == [0]


async def test_a_deletion_by_another_gateway_is_told_once_the_row_is_not_recent(
    http: Served, rows_asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(http, *"abc")
    assert shown(await get(http, "-1")) == (200, "ab", "2", False)
    other = http.gateway.cluster.gateway()
    await other.logs.delete(LOG)
    await other.end()
    rows_asked.clear()

    assert shown(await get(http, "-1")) == (200, "ab", "2", False)
    assert rows_asked == []
    assert (await get(http, "now")).status == 404, "the tail is always asked for"
    monkeypatch.setattr(store, "RECENT_S", -1.0)
    assert (await get(http, "-1")).status == 404


async def test_nothing_is_told_of_a_stream_that_was_deleted_or_made_again(http: Served) -> None:
    await fill(http, "a", "b", "c")
    before = await get(http, "-1")
    assert (await http.ask("DELETE", STREAM)).status == 204
    assert (await get(http, "-1")).status == 404

    await fill(http, "x", "y", "z")
    after = await get(http, "-1")

    assert shown(after) == (200, "xy", "2", False)
    assert after.headers["ETag"] != before.headers["ETag"]


async def test_nothing_is_told_of_records_that_were_truncated(http: Served) -> None:
    await fill(http, "a", "b", "c")
    assert shown(await get(http, "-1")) == (200, "ab", "2", False)
    assert (await http.ask("POST", f"/v1/logs/{LOG}/roll", {})).status == 200
    await fill(http, "d", "e", "f")
    cut = await http.ask("POST", f"/v1/logs/{LOG}/truncate", {"before": 3})
    assert cut.json["first_offset"] == 3

    assert (await get(http, 0)).status == 410
    assert shown(await get(http, "-1")) == (200, "de", "5", False)
    assert shown(await get(http, "-1")) == (200, "de", "5", False)


async def test_beyond_the_bound_the_page_that_was_not_asked_for_longest_goes(http: Served) -> None:
    await fill(http, "a")
    row = await http.gateway.logs.rows.row(LOG)
    kept = KeptPages(bytes_max=3 * MIB)

    def page(at: int) -> LogBatches:
        return LogBatches((), at, at + 1, 0, closed=False, created_at="", is_full=True)

    for at in range(2):
        kept.keep(row, page(at), b"x" * MIB)
    assert kept.find(row, 0) is not None
    kept.keep(row, page(2), b"y" * MIB)

    assert kept.find(row, 1) is None
    assert [kept.find(row, at) is not None for at in (0, 2)] == [True, True]
    assert MIB < kept.bytes_kept <= 3 * MIB
    # The same page again counts once, and one that alone is too large is not kept.
    before = kept.bytes_kept
    kept.keep(row, page(2), b"y" * MIB)
    assert kept.bytes_kept == before
    kept.keep(row, page(3), b"z" * 4 * MIB)
    assert (kept.find(row, 3), kept.bytes_kept) == (None, 0)
    # Neither is what may change.
    kept.keep(row, replace(page(4), is_full=False), b"x")
    assert kept.bytes_kept == 0
