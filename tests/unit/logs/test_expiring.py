"""Records with a time to live: which reads return them, and what is refused (rule 27f)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.batch import TTL_S_MAX, ProducerSeq, Record
from quorumlog.protocol.log.compaction import next_pass
from quorumlog.protocol.log.messages import Append
from services.gateway.logs import values
from tests.model.logs.model import Gateway
from tests.model.logs.rewrites import compacted
from tests.support.waiting import until
from tests.unit.logs.support import Http
from tests.unit.logs.test_compactions import COMPACT
from tests.unit.logs.test_http import LOG, RECORDS, code, served
from tests.unit.logs.test_manager import SETTINGS, a_cluster

NEVER_MERGED = replace(SETTINGS, merge_below_bytes=0)


def call(*ttls: int, producer: ProducerSeq | None = None) -> Append:
    return Append.of([Record(b"%d" % n, ttl_s=ttl) for n, ttl in enumerate(ttls)], producer)


async def page(gateway: Gateway, start: int = 0, limit: int = 100) -> tuple[list[int], int]:
    found = await gateway.logs.reader.read("log", start, limit=limit)
    return [record.offset for record in found.records], found.next


def later(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the database's time pass."""
    now = gateway.logs.ownership.now
    moved_ms = int(1000 * seconds)

    def then() -> object:
        known = now()
        return replace(known, database_ms=known.sealed_ms() + moved_ms)

    monkeypatch.setattr(gateway.logs.ownership, "now", then)


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_no_read_returns_an_expired_record(
    is_sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cluster(settings=NEVER_MERGED) as (_, (one, _)):
        await one.logs.append("log", call(0, 5, 5, 0, 100))
        await one.logs.append("log", call(5))
        if is_sealed:
            await one.logs.roll("log")
        assert await page(one) == ([0, 1, 2, 3, 4, 5], 6)

        later(one, monkeypatch, 6)

        assert await page(one) == ([0, 3, 4], 6)
        assert await page(one, 1, limit=1) == ([3], 4)
        assert await page(one, 5) == ([], 6)
        await one.logs.append("log", call(0))
        assert await page(one, 5) == ([6], 7)


async def test_expired_records_go_with_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster() as (cluster, (one, _)):
        for _ in range(8):
            await one.logs.append("log", call(5, 0))
            await one.logs.roll("log")
        monkeypatch.setattr(one.logs.rewrites, "now_ms", lambda: cluster.database_ms() + 6000)
        one.logs.rewrites.want(cluster.logs["log"])
        await until(lambda: len(cluster.logs["log"].items) == 2, "the ledgers are merged")

        assert await page(one) == ([*range(1, 16, 2)], 16), "although they have not expired here"


async def test_a_page_skips_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_EXPIRED_BYTES_MAX", 2)
    async with a_cluster(settings=NEVER_MERGED) as (_, (one, _)):
        for _ in range(5):
            await one.logs.append("log", call(5, 5))
        await one.logs.append("log", call(0))
        later(one, monkeypatch, 6)

        assert await page(one) == ([], 4)
        assert await page(one, 4) == ([], 8)
        assert await page(one, 8) == ([10], 11)


async def test_a_retry_is_the_same_request_whenever_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster(settings=NEVER_MERGED) as (_, (one, _)):
        producer = ProducerSeq("p", 0, 0)
        first = await one.logs.append("log", call(5, producer=producer))
        later(one, monkeypatch, 6)

        again = await one.logs.append("log", call(5, producer=producer))

        assert (again.is_duplicate, again.first_offset) == (True, first.first_offset)


async def test_a_compacted_log_takes_no_ttl() -> None:
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        with pytest.raises(InvalidRequest, match="compacted"):
            await one.logs.append("log", Append.of([Record(b"v", b"k", ttl_s=1)]))


async def appended(http: Http, query: str, *bodies: object) -> Sequence[int]:
    return [(await http.ask("POST", RECORDS + query, each)).status for each in bodies]


async def test_requests_and_records_say_how_long_they_last() -> None:
    async with served() as http:
        await http.done("PUT", LOG, {})
        both = {"records": [{"text": "a", "ttl_s": 1000}, {"text": "b"}]}
        assert await appended(http, "?ttl_s=1", both, {"text": "c"}) == [201, 201]
        assert await appended(http, "", {"text": "d", "ttl_s": 1}, {"text": "e"}) == [201, 201]
        lines = await http.ask(
            "POST",
            f"{RECORDS}?ttl_s=1",
            body=b'{"text":"f"}\n{"text":"g","ttl_s":1000}\n',
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert lines.status in (200, 201), lines

        async def is_over() -> bool:
            found = await http.done("GET", f"{RECORDS}?encoding=text")
            return [each["text"] for each in found["records"]] == ["a", "e", "g"]

        await until(is_over, "the others expire")


@pytest.mark.parametrize("ttl_s", [0, -1, 1.5, "5", True, TTL_S_MAX + 1])
async def test_what_no_ttl_is(ttl_s: object) -> None:
    async with served() as http:
        await http.done("PUT", LOG, {})
        assert code(await http.ask("POST", RECORDS, {"text": "a", "ttl_s": ttl_s})) == (
            422,
            "invalid",
        )
        if not isinstance(ttl_s, str):
            answer = await http.ask("POST", f"{RECORDS}?ttl_s={ttl_s}", {"text": "a"})
            assert answer.status in (400, 422)


async def test_an_expired_record_of_a_compacted_log_is_a_tombstone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the older record of its key would be the newest one, until it is compacted."""
    records = (Record(b"old", b"k"), Record(b"new", b"k", (("h", "x"),), ttl_s=5), Record(b"l"))
    async with a_cluster(settings=NEVER_MERGED) as (cluster, (one, _)):
        await one.logs.append("log", Append.of(records))
        await one.logs.append("log", Append.of((Record(b"gone", ttl_s=5),)))
        await one.logs.roll("log")
        await one.logs.change("log", {"cleanup_policy": "compact"})
        later(one, monkeypatch, 6)
        monkeypatch.setattr(one.logs.rewrites, "now_ms", lambda: cluster.database_ms() + 6000)
        wanted = [(0, records[0]), (1, Record(b"", b"k", is_tombstone=True)), (2, records[2])]
        assert [(each.offset, each.record) for each in await one.contents("log")] == wanted
        assert not (await one.logs.keys.newest("log", b"k")).records

        due = next_pass(cluster.logs["log"], one.logs.rewrites.now_ms())
        assert due is not None
        await compacted(one, due)

        assert [(each.offset, each.record) for each in await one.contents("log")] == wanted[1:]
        stored = cluster.ledgers[cluster.logs["log"].items[0].ledger_id].entries
        assert not any(b"new" in data for data in stored)
