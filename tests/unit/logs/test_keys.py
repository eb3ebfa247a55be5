"""Reads by key: what indexes make unnecessary to read, what damage does, and ledgers without an index (rule 27e)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import pytest

from quorumlog import errors
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import NO_KEYS, LogMetadata, indexing, ledgers_of
from quorumlog.protocol.log import keys as key_format
from quorumlog.protocol.log.keys import BUCKET_PAIRS, KeyEntries, keys_of
from quorumlog.protocol.log.messages import Append
from services.gateway.edge.pages import LogPages
from services.gateway.logs import keys as module
from services.gateway.logs import rewrites, scans
from services.gateway.logs.filters import Filter
from services.gateway.logs.scans import Piece, Scans
from tests.model.logs.model import Cluster, Gateway
from tests.support.waiting import until
from tests.unit.logs.test_http import LOG, RECORDS, code, served
from tests.unit.logs.test_manager import SETTINGS, a_cluster, contents
from tests.unit.logs.test_rewrites import swept

UNMERGED: Final = replace(SETTINGS, merge_below_bytes=0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ledgers are indexed too."""
    monkeypatch.setattr(indexing, "INDEXED_BYTES_MIN", 1)


async def append(gateway: Gateway, *keys: str | None) -> int:
    """Append a batch of records with these keys; returns the first offset."""
    records = tuple(
        Record(f"v-{key}".encode(), None if key is None else key.encode()) for key in keys
    )
    return (await gateway.logs.append("log", Append.of(records))).first_offset


LEDGERS: Final = (
    (("a", "b"), ("c",), ("a", None, "a"), ("d",)),
    (("e",), ("f",), ("e", "e")),
    (("a",), ("b",)),
    ((None,),),
    (("f", "g"),),
)
FLAT: Final = [key for ledger in LEDGERS for keys in ledger for key in keys]


@asynccontextmanager
async def filled(
    *, is_indexed: bool = True, gateways: int = 2
) -> AsyncIterator[tuple[Cluster, list[Gateway]]]:
    """A log of five sealed ledgers and an open one with a record of the key `o`."""
    async with a_cluster(gateways, settings=UNMERGED) as (cluster, made):
        for ledger in LEDGERS:
            for keys in ledger:
                await append(made[0], *keys)
            await made[0].logs.roll("log")
        await append(made[0], "o")
        if is_indexed:
            await swept(made[0])
            await until(lambda: len(indexes(cluster)) == 5, "all are indexed")
        yield cluster, made


def indexes(cluster: Cluster) -> list[int]:
    return [item.index for item in cluster.logs["log"].items if item.index is not None]


async def offsets(gateway: Gateway, key: str, limit: int = 100) -> list[int]:
    """The offsets that all pages of a filtered read have."""
    pages, at, found = LogPages(gateway.logs, "log", None, Filter(key.encode())), 0, list[int]()
    while True:
        page = await pages.read(at, limit=limit)
        assert pages.count(page) <= limit
        found += pages.numbers(page)
        if page.next == at:
            return found
        at = page.next


async def newest(gateway: Gateway, key: str, log: str = "log") -> int | None:
    """The offset of the newest record, found by as many requests as it takes; each looks further."""
    befores, created_at = list[int](), None
    while True:
        try:
            page = await gateway.logs.keys.newest(
                log, key.encode(), before=min(befores, default=None), created_at=created_at
            )
        except errors.KeyScanLimit as error:
            befores.append(error.members["before"])
            created_at = error.members["created_at"]
        else:
            assert sorted({*befores}, reverse=True) == befores, "each request looks further"
            assert not befores or page.batches or page.next == befores[-1]
            return page.records[0].offset if page.batches else None


def last(key: str, flat: Sequence[str | None]) -> int | None:
    return max((at for at, each in enumerate(flat) if each == key), default=None)


def expected(key: str) -> list[int]:
    return [at for at, each in enumerate(FLAT) if each == key]


def reads_of(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The reads of entries: ledger, first entry, count."""
    found: list[tuple[int, int, int]] = []
    read = gateway.read

    async def noted(ledger_id: int, first: int, **options: Any) -> Any:
        done = await read(ledger_id, first, **options)
        found.append((ledger_id, first, sum(run.count for run in done.runs)))
        return done

    monkeypatch.setattr(gateway, "read", noted)
    return found


async def test_the_owners_sweep_indexes_each_sealed_ledger() -> None:
    async with filled() as (cluster, (one, two)):
        assert indexes(cluster).count(NO_KEYS) == 1, "one ledger has no keys"
        assert (one.logs.rewrites.indexed, two.logs.rewrites.indexed) == (5, 0)
        named = ledgers_of(cluster.logs["log"].items)
        assert cluster.ledgers.keys() == named
        await one.logs.append("log", Append.of((Record(b"more"),)))
        assert one.logs.ownership.owned == ["log"], "without a takeover"


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("key", [*"abcdefg", "none", ""])
async def test_a_read_of_a_key_finds_what_it_finds_without_indexes(key: str, limit: int) -> None:
    async with filled() as (_, gateways):
        for gateway in gateways:
            assert await offsets(gateway, key, limit) == expected(key)


async def test_only_entries_with_the_key_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled() as (cluster, (_, two)):
        items = cluster.logs["log"].items
        reads = reads_of(two, monkeypatch)

        page = await two.logs.keys.page("log", 0, b"a", created_at=None, limit=9, max_bytes=9999)

        assert page is not None
        assert (page.first, page.next) == (0, items[-1].first_offset)
        data = {item.ledger_id for item in items}
        assert sorted(each for each in reads if each[0] in data) == [
            (items[0].ledger_id, 0, 1),
            (items[0].ledger_id, 2, 1),
            (items[2].ledger_id, 0, 1),
        ]
        assert len([each for each in reads if each[0] not in data]) == 4, "one bucket of each index"
        skipped = [items[at].bytes for at in (1, 3, 4)]
        assert two.logs.keys.skipped_bytes > sum(skipped)
        reads.clear()
        await two.logs.keys.page("log", 0, b"none", created_at=None, limit=9, max_bytes=9999)
        assert reads == [], "buckets are cached"
        two.logs.keys._buckets.parts.clear()
        two.logs.keys._buckets.bytes = 0
        await two.logs.keys.page("log", 0, b"none", created_at=None, limit=9, max_bytes=9999)
        assert reads == [], "hints about buckets prove that they lack the key"
        first = await LogPages(two.logs, "log", None, Filter(b"none")).read("earliest")
        assert (first.first, first.next) == (0, len(FLAT) + 1)
        assert {each[0] for each in reads} == {items[-1].ledger_id}, "the open ledger"


async def test_all_hints_of_an_index_are_read_once_lookups_needed_a_quarter_of_its_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_format, "BUCKET_PAIRS", 8)
    async with a_cluster(2, settings=UNMERGED) as (cluster, (one, two)):
        await append(one, *(f"k{number}" for number in range(256)))
        await one.logs.roll("log")
        await append(one, "o")
        await swept(one)
        await until(lambda: bool(indexes(cluster)), "the ledger has an index")
        (index,) = indexes(cluster)
        buckets = len(cluster.ledgers[index].entries)
        reads = reads_of(two, monkeypatch)

        async def look(keys: str) -> list[int]:
            for number in range(buckets):
                assert await newest(two, f"{keys}{number}") is None
            return [count for ledger_id, _, count in reads if ledger_id == index]

        counts = await look("absent")
        assert counts[: buckets // 4] == [1] * (buckets // 4)
        await until(lambda: len(two.logs.keys._hints.parts) == buckets, "all hints are read")
        reads.clear()
        assert await look("other") == []
        assert await newest(two, "k9") == 9


async def test_buckets_are_cached_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES_MAX", 300)
    monkeypatch.setattr(module, "HINT_BYTES_MAX", 600)
    async with filled() as (_, (_, two)):
        keys = two.logs.keys
        for _ in range(3):
            assert await offsets(two, "a") == expected("a")
            for cache, bound in ((keys._buckets, 300), (keys._hints, 600)):
                assert cache.bytes == sum(each.size for each in cache.parts.values()) <= bound
                assert cache.parts


@pytest.mark.parametrize("is_indexed", [True, False])
async def test_the_newest_record_of_each_key(is_indexed: bool) -> None:
    async with filled(is_indexed=is_indexed) as (_, gateways):
        for gateway in gateways:
            for key in "abcdefgo":
                (found,) = (await gateway.logs.keys.newest("log", key.encode())).records
                assert found.record.key == key.encode()
                assert found.offset == [*FLAT, "o"].index(key) or key in "abef"
                assert found.offset == max(at for at, k in enumerate([*FLAT, "o"]) if k == key)
            page = await gateway.logs.keys.newest("log", b"none")
            assert (page.batches, page.next) == ((), len(FLAT) + 1)


async def test_the_newest_record_is_found_in_the_open_ledger_as_it_grows() -> None:
    async with filled() as (_, (one, two)):
        for _ in range(3):
            offset = await append(one, "a", "x")
            for gateway in (one, two):
                (found,) = (await gateway.logs.keys.newest("log", b"a")).records
                assert found.offset == offset


async def test_no_newest_record_is_missed_by_a_gateway_whose_metadata_is_old() -> None:
    async with filled() as (_, (one, two)):
        for _ in range(2):
            assert await newest(two, "a") is not None
            await one.logs.roll("log")
            offset = await append(one, "a")
            assert two.logs.rows.known("log") != one.logs.rows.known("log")
            assert await newest(two, "a") == offset


@pytest.mark.parametrize("is_indexed", [True, False])
async def test_too_much_for_a_request_is_no_absence(
    is_indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request looks at something, and says where to go on, whatever stays in memory."""
    monkeypatch.setattr(module, "SCANNED_BYTES_MAX", 1 + module._LOOKUP_COST * is_indexed)
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    async with filled(is_indexed=is_indexed) as (_, (one, two)):
        with pytest.raises(errors.KeyScanLimit):
            await one.logs.keys.newest("log", b"none")
        for kept in (scans.SCANNED_KEYS_BYTES_MAX, 0):
            monkeypatch.setattr(scans, "SCANNED_KEYS_BYTES_MAX", kept)
            for key in (*"abcdefgo", "none"):
                for gateway in (one, two):
                    assert await newest(gateway, key) == last(key, [*FLAT, "o"])


async def test_the_newest_record_below_an_offset() -> None:
    for is_indexed in (True, False):
        async with filled(is_indexed=is_indexed) as (_, (one, two)):
            for gateway in (one, two):
                for before in range(len(FLAT) + 2):
                    page = await gateway.logs.keys.newest("log", b"a", before=before)
                    found = [record.offset for record in page.records]
                    assert found == [at for at in [last("a", FLAT[:before])] if at is not None]
                    assert page.batches or page.next == before


async def test_an_open_ledger_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read stays in memory; the rest is not read for a key that is newer."""
    async with filled(is_indexed=False) as (cluster, (one, two)):
        for number in range(40):
            await append(one, f"n{number}")
        reads = reads_of(two, monkeypatch)
        assert await newest(two, "n39") == len(FLAT) + 40
        assert sum(count for _, _, count in reads) <= 3
        assert await newest(two, "n20") == len(FLAT) + 21
        reads.clear()
        assert await newest(two, "n39") is not None
        assert await newest(two, "none") is None
        reads.clear()
        await append(one, "p")
        assert await newest(two, "none") is None
        assert sum(count for _, _, count in reads) <= 4, "the new entry, and ends of ledgers"
        assert len(cluster.logs["log"].items) == 6


async def test_hashes_of_ledgers_without_an_index_are_kept_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after requests that come to no end."""
    monkeypatch.setattr(module, "SCANNED_BYTES_MAX", 1)
    async with filled(is_indexed=False) as (_, (one, _)):
        for bound in (10_000, 1200, 600, 0):
            monkeypatch.setattr(scans, "SCANNED_KEYS_BYTES_MAX", bound)
            monkeypatch.setattr(one.logs.keys, "_scans", Scans())
            for key in ("none", "a"):
                assert await newest(one, key) == last(key, FLAT)
            kept = one.logs.keys._scans
            pieces = [piece for ledger in kept._ledgers.values() for piece in ledger]
            assert kept.size == sum(piece.size for piece in pieces) <= bound
            assert bool(pieces) == (bound > 0)


async def test_small_pieces_become_one_and_none_overlaps() -> None:
    kept = Scans()
    for first, after in ((8, 9), (4, 6), (2, 4), (6, 8), (5, 7), (0, 1)):
        kept.add(1, Piece.of(first, after, first, 10, {first, 99}))
    found = [
        (piece.first, piece.after, piece.place, list(piece.hashes)) for piece in kept._ledgers[1]
    ]
    assert found == [(0, 1, 0, [0, 99]), (2, 9, 2, [2, 4, 6, 8, 99])]
    kept.add(1, Piece.of(9, 10, 9, scans.PIECE_COST, {9}))
    assert len(kept._ledgers[1]) == 3, "it is large"
    piece = kept.below(1, 5)
    assert piece is not None
    assert (piece.first, piece.has(4), piece.has(5)) == (2, True, False)
    assert kept.below(1, 0) is kept.below(2, 5) is None
    kept.drop(1)
    assert kept.size == 0


async def test_what_is_indexed_is_forgotten() -> None:
    async with filled(is_indexed=False) as (cluster, (one, _)):
        kept = one.logs.keys._scans
        assert await newest(one, "none") is None
        assert len(kept._ledgers) == 6
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 5, "all are indexed")
        assert await newest(one, "none") is None
        ((ledger_id, pieces),) = kept._ledgers.items()
        assert ledger_id == cluster.logs["log"].items[-1].ledger_id
        assert kept.size == sum(piece.size for piece in pieces)


async def test_keys_of_another_logs_ledgers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled(is_indexed=False) as (_, (one, _)):
        kept = one.logs.keys._scans
        assert await newest(one, "none") is None
        before = [*kept._ledgers]
        await one.logs.put("other", UNMERGED)
        await one.logs.append("other", Append.of((Record(b"v", b"a"),)))
        monkeypatch.setattr(scans, "SCANNED_KEYS_BYTES_MAX", kept.size)
        assert await newest(one, "a", "other") == 0
        assert [*kept._ledgers][:-1] == before[1:]


async def test_many_requests_at_once_scan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled(is_indexed=False) as (cluster, (one, _)):
        reads = reads_of(one, monkeypatch)
        ledger_id = cluster.logs["log"].items[0].ledger_id
        found = await asyncio.gather(*(one.logs.keys.newest("log", b"none") for _ in range(8)))
        assert [page.batches for page in found] == [()] * 8
        scanned = [count for ledger, _, count in reads if ledger == ledger_id]
        assert sum(scanned) == len(LEDGERS[0])
        assert await asyncio.gather(*(newest(one, "c") for _ in range(8))) == [2] * 8


async def test_a_batch_that_unpacks_to_much_is_charged_and_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some hundred bytes may take long, so they end the work of a request, and delay no other."""
    data = packed.pack(batch.encode([Record(b"\0" * 100, b"k%d" % (n % 3)) for n in range(20_000)]))
    assert len(data) < 1000
    work, threads = scans.Work(16 << 20), list[object]()
    to_thread = asyncio.to_thread

    async def noted(decode: Any, *given: Any) -> Any:
        threads.append(decode)
        return await to_thread(decode, *given)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    assert len(await work.decode(keys_of, data)) == 3
    assert (threads, (16 << 20) - work.left >= 20_000 * 164) == ([keys_of], True)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    small = packed.pack(batch.encode([Record(b"\0" * 100, b"k") for n in range(400)]))
    for _ in range(20):
        await work.decode(keys_of, small)
    task.cancel()
    assert (ticks >= 10, len(threads)) == (True, 1)


async def test_a_request_decodes_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some hundred bytes that unpack to megabytes, too, although one read returns them all."""
    decoded = 0
    decode = scans.Work.decode

    async def counted(self: Any, look: Any, data: Any) -> Any:
        nonlocal decoded
        decoded += batch.plain_size(data)
        return await decode(self, look, data)

    monkeypatch.setattr(scans.Work, "decode", counted)
    async with a_cluster(1, settings=replace(UNMERGED, batch_compression="zstd")) as (_, (one,)):
        for _ in range(12):
            large = (Record(b"\0" * (4 << 20), b"k"),)
            await one.logs.append("log", Append.of(large))
        with pytest.raises(errors.KeyScanLimit) as caught:
            await one.logs.keys.newest("log", b"none")
        assert caught.value.members["before"] == 12 - 4
        assert decoded < module.SCANNED_BYTES_MAX + (5 << 20)
        assert await newest(one, "none") is None


async def test_a_key_in_many_entries_is_found_with_what_its_index_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index names the last entries only. Reads find earlier ones without it."""
    monkeypatch.setattr(key_format, "KEY_ENTRIES_MAX", 4)
    async with a_cluster(2, settings=UNMERGED) as (cluster, (one, two)):
        flat = [key for n in range(40) for key in (("x", "hot") if n in {3, 30} else ("hot",))]
        flat += ["y"] * 3
        for key in flat:
            await append(one, key)
        await one.logs.roll("log")
        await append(one, "o")
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 1, "it is indexed")
        item = cluster.logs["log"].items[0]
        named = await two.logs.keys._look_up(item, item.index or 0, b"hot")
        assert 4 <= len(named) < 40
        for key in ("hot", "x", "y", "none"):
            assert await offsets(two, key) == [n for n, each in enumerate(flat) if each == key]
            for before in (1, 5, len(flat)):
                found = (await two.logs.keys.newest("log", key.encode(), before=before)).records
                assert [each.offset for each in found][-1:] == [
                    n for n in [last(key, flat[:before])] if n is not None
                ]
        assert two.logs.keys.damaged == 0


def broken(cluster: Cluster, at: int, how: str) -> None:
    """Break the index of the ledger at a place of the log."""
    items = cluster.logs["log"].items
    index = items[at].index
    assert index is not None
    ledger = cluster.ledgers[index]
    data = bytearray(ledger.entries[0])
    match how:
        case "damaged":
            data[-1] ^= 1
            ledger.entries[0] = bytes(data)
        case "of another ledger":
            ledger.entries[:] = cluster.ledgers[items[at + 1].index or 0].entries
        case "longer":
            ledger.entries += ledger.entries * 2
            ledger.row = replace(ledger.row, last_entry=2)
        case "in the wrong place":
            other = KeyEntries()
            other.add(0, {b"%d" % number for number in range(2 * BUCKET_PAIRS)})
            last = len(cluster.ledgers[items[at].ledger_id].entries) - 1
            buckets = [other.bucket(n, items[at].ledger_id, last) for n in range(1 << other.bits)]
            ledger.entries[:] = buckets[1:] + buckets[:1]
            ledger.row = replace(ledger.row, last_entry=len(buckets) - 1)
        case "missing":
            cluster.deleted[index] = cluster.ledgers.pop(index)
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize(
    "how", ["damaged", "of another ledger", "longer", "in the wrong place", "missing"]
)
async def test_a_broken_index_is_not_used_and_is_built_anew(how: str) -> None:
    async with filled() as (cluster, (one, two)):
        before = cluster.logs["log"].items[0].index
        broken(cluster, 0, how)

        assert await offsets(two, "a") == expected("a")
        assert (await two.logs.keys.newest("log", b"c")).records[0].offset == 2
        await until(lambda: cluster.logs["log"].items[0].index is None, "the log drops the index")
        assert two.logs.keys.damaged == 1
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 5, "the index is built anew")
        assert cluster.logs["log"].items[0].index != before
        damaged = two.logs.keys.damaged
        assert await offsets(two, "a") == expected("a")
        assert two.logs.keys.damaged == damaged


async def test_an_index_that_cant_be_read_now_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled() as (cluster, (_, two)):
        before = indexes(cluster)
        read = two.read

        async def unreadable(ledger_id: int, first: int, **options: Any) -> Any:
            if ledger_id in before:
                raise errors.EntryUnavailable(ledger_id=ledger_id, entry_id=first)
            return await read(ledger_id, first, **options)

        monkeypatch.setattr(two, "read", unreadable)
        assert await offsets(two, "a") == expected("a")
        assert (await two.logs.keys.newest("log", b"none")).batches == ()
        assert (indexes(cluster), two.logs.keys.damaged) == (before, 0)


async def test_truncation_and_deletion_release_indexes() -> None:
    async with filled() as (cluster, (one, _)):
        first = cluster.logs["log"].items[0]
        await one.logs.truncate("log", (first.last_offset or 0) + 1)
        await one.logs.orphans.delete_some(older_than_s=0)
        assert first.index in cluster.deleted
        with pytest.raises(errors.OffsetTruncated):
            await offsets(one, "a")
        assert (await one.logs.keys.newest("log", b"c")).batches == ()

        await one.logs.delete("log")
        await one.logs.orphans.delete_some(older_than_s=0)
        assert cluster.ledgers == {}


async def test_a_merge_drops_the_indexes_of_what_it_replaces() -> None:
    async with filled() as (cluster, (one, two)):
        row = cluster.logs["log"]
        assert await offsets(two, "a") == expected("a")
        done = await one.logs.rewrites.rewrite(row, row.items[:5])
        assert isinstance(done.log, LogMetadata)
        await one.logs.orphans.delete_some(older_than_s=0)
        for key in "abcdefg":
            assert await offsets(two, key) == expected(key)
            assert (await two.logs.keys.newest("log", key.encode())).records
        assert two.logs.keys.damaged == 0, "it only was older"
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 1, "the new ledger is indexed")
        assert cluster.ledgers.keys() == ledgers_of(cluster.logs["log"].items)
        for key in "abcdefg":
            assert await offsets(two, key) == expected(key)


async def of_fork(gateway: Gateway, key: str, max_bytes: int) -> list[int]:
    """The offsets of a key in the fork."""
    found, at = list[int](), 0
    while True:
        page = await gateway.logs.keys.page(
            "fork", at, key.encode(), created_at=None, limit=100, max_bytes=max_bytes
        )
        page = page or await gateway.logs.reader.read("fork", at, max_bytes=max_bytes)
        found += [each.offset for each in page.records if each.record.key == key.encode()]
        if page.next == at:
            return found
        at = page.next


@pytest.mark.parametrize("at", [1, 2, 4, 8, 10, 11])
async def test_a_fork_uses_its_sources_indexes(at: int) -> None:
    """Also an index that names entries beyond the end of what the fork shares."""
    async with filled() as (cluster, (one, two)):
        row = cluster.logs["log"]
        fork, _ = await one.logs.fork(one.logs.draft("fork", row.settings), row, at)
        shared = [item for item in row.items if (item.first_offset or 0) < at]
        assert [item.index for item in fork.shared] == [item.index for item in shared]
        kept = FLAT[:at]
        for number in range(6):
            key = "ae"[number % 2]
            await one.logs.append("fork", Append.of((Record(b"v", key.encode()),)))
            kept = [*kept, key]
        await one.logs.delete("log")
        await one.logs.orphans.delete_some(older_than_s=0)
        assert ledgers_of(fork.shared) <= cluster.ledgers.keys()

        for key in "abcdefg":
            expected = [n for n, each in enumerate(kept) if each == key]
            for max_bytes in (1, 70, 140, 1 << 20):
                assert await of_fork(two, key, max_bytes) == expected
            for before in (None, *range(len(kept) + 1)):
                found = await two.logs.keys.newest("fork", key.encode(), before=before)
                below = [n for n in expected if before is None or n < before]
                assert [each.offset for each in found.records] == below[-1:]
        assert two.logs.keys.damaged == 0
        await one.logs.delete("fork")
        await one.logs.orphans.delete_some(older_than_s=0)
        assert cluster.ledgers == {}


async def test_an_index_is_not_read_beyond_the_end_of_what_a_fork_shares() -> None:
    async with a_cluster(2, settings=UNMERGED) as (cluster, (one, two)):
        for _ in range(20):
            await append(one, "a")
        await one.logs.roll("log")
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 1, "it is indexed")
        row = cluster.logs["log"]
        await one.logs.fork(one.logs.draft("fork", row.settings), row, 10)
        for _ in range(8):
            await one.logs.append("fork", Append.of((Record(b"v", b"a"),)))

        for max_bytes in (1, *range(100, 2200, 50)):
            assert await of_fork(two, "a", max_bytes) == list(range(18))


async def test_a_read_that_names_no_log_sees_a_deletion_at_once() -> None:
    async with filled() as (_, (one, two)):
        pages = LogPages(two.logs, "log", None, Filter(b"a"))
        await pages.read(0)
        await one.logs.delete("log")
        with pytest.raises(errors.NoSuchLog):
            await LogPages(two.logs, "log", None, Filter(b"a")).read(0)
        with pytest.raises(errors.NoSuchLog):
            await two.logs.keys.newest("log", b"a")


async def test_the_end_of_a_search_is_that_of_the_ledgers_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a record that another owner's ledger got meanwhile is below the end, and not found."""
    async with filled() as (_, (one, two)):
        ended_at = two.logs.reader.ended_at
        calls = 0

        async def late(row: LogMetadata, page: Any = None) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                await append(one, "new")
                await one.logs.roll("log")
                await append(one, "newer")
                return None  # as if the owner was gone
            return await ended_at(row, page)

        monkeypatch.setattr(two.logs.reader, "ended_at", late)
        (found,) = (await two.logs.keys.newest("log", b"newer")).records
        assert found.offset == len(FLAT) + 2


async def test_a_lost_entry_is_reported_and_not_taken_for_absent() -> None:
    async with filled(is_indexed=False) as (cluster, (one, _)):
        ledger = cluster.ledgers[cluster.logs["log"].items[0].ledger_id]
        ledger.row = replace(ledger.row, lost_entries=((1, 1),))
        with pytest.raises(errors.EntryLost):
            await one.logs.keys.newest("log", b"c")
        assert (await one.logs.keys.newest("log", b"g")).records


async def test_reads_of_two_logs_and_concurrent_lookups_agree() -> None:
    async with filled(is_indexed=False) as (cluster, (one, two)):
        found = await asyncio.gather(
            *(one.logs.keys.newest("log", key.encode()) for key in "abcdefg" * 3)
        )
        assert [page.records[0].record.key for page in found] == [
            key.encode() for key in "abcdefg" * 3
        ]
        await swept(one)
        await until(lambda: len(indexes(cluster)) == 5, "all are indexed")
        assert await contents(two)


async def test_the_own_logs_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "OWN_LOGS", {"log"})
    async with filled(is_indexed=False) as (cluster, (one, _)):
        await swept(one)
        await asyncio.sleep(0.05)
        assert indexes(cluster) == []


# --- over HTTP ------------------------------------------------------------------------------------


def values(found: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(each["key"], each["offset"]) for each in found]


async def test_the_newest_record_over_http() -> None:
    async with served() as http:
        await http.ask("PUT", LOG, {"roll_entries": 1})
        for text in ("one", "two"):
            for key in ("a", "b/c", "ключ"):
                await http.ask("POST", RECORDS, {"text": text, "key": key})
        for path, key, offset in (
            ("a", "a", 3),
            ("b%2Fc", "b/c", 4),
            ("%D0%BA%D0%BB%D1%8E%D1%87", "ключ", 5),
        ):
            answer = await http.ask("GET", f"{LOG}/keys/{path}?encoding=text")
            assert answer.status == 200, answer
            assert (answer.json["key"], answer.json["offset"]) == (key, offset)
            assert answer.json["text"] == "two"
        missing = await http.ask("GET", f"{LOG}/keys/none")
        assert (code(missing), missing.json["next_offset"]) == ((404, "no-such-key"), 6)
        assert (await http.ask("GET", "/v1/logs/none/keys/a")).status == 404


async def test_keys_over_http() -> None:
    async with served() as http:
        await http.ask("PUT", LOG, {"roll_entries": 2})
        for key in ("a1", "b1", "a1", None, "a2"):
            record = {"text": "x"} if key is None else {"text": "x", "key": key}
            assert (await http.ask("POST", RECORDS, record)).status == 201

        async def listed(query: str) -> dict[str, Any]:
            found: dict[str, Any] = (await http.ask("GET", f"{LOG}/keys?encoding=text{query}")).json
            return found

        page = await listed("")
        assert values(page["keys"]) == [("b1", 1), ("a1", 2), ("a2", 4)]
        assert (page["next"], page["first_offset"], page["closed"]) == (5, 0, False)
        assert values((await listed("&prefix=a"))["keys"]) == [("a1", 2), ("a2", 4)]
        page = await listed("&prefix=a&limit=1")
        assert (values(page["keys"]), page["next"]) == ([("a1", 0)], 1)
        assert values((await listed("&from=3"))["keys"]) == [("a2", 4)]
        assert (await listed("&from=5"))["next"] == 5
        assert code(await http.ask("GET", f"{LOG}/keys?from=9")) == (416, "offset-beyond-end")
