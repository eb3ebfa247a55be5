"""Compaction of a log through a gateway: what readers see, what is refused, and when it runs (rule 27d)."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import EntryUnavailable, KeyRequired
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogMetadata, compaction
from quorumlog.protocol.log.compaction import PassState, next_pass
from quorumlog.protocol.log.messages import Append
from services.gateway.logs import rewrites
from services.gateway.logs.driver import read_batches
from services.gateway.logs.handle import LOGS_COUNTED_MAX
from services.gateway.logs.values import Last, LogBatches
from tests.model.logs.model import Gateway
from tests.model.logs.rewrites import compacted as carried_out
from tests.support.waiting import until
from tests.unit.logs.test_manager import SETTINGS, a_cluster
from tests.unit.logs.test_rewrites import swept

COMPACT = replace(SETTINGS, cleanup_policy="compact", merge_below_bytes=0)


def call(pairs: Sequence[tuple[str, str | None]], **options: Any) -> Append:
    return Append.of(
        tuple(
            Record((value or "").encode(), key.encode(), is_tombstone=value is None)
            for key, value in pairs
        ),
        **options,
    )


async def filled(gateway: Gateway, *ledgers: Sequence[tuple[str, str | None]]) -> LogMetadata:
    """A log with these ledgers, one batch each, and an open one behind them."""
    for pairs in ledgers:
        await gateway.logs.append("log", call(pairs))
        await gateway.logs.roll("log")
    return gateway.cluster.logs["log"]


async def compacted(gateway: Gateway) -> LogMetadata:
    row = gateway.cluster.logs["log"]
    due = next_pass(row, gateway.logs.rewrites.now_ms())
    assert due is not None
    done = await carried_out(gateway, due)
    assert done is not None
    assert isinstance(done.log, LogMetadata)
    return done.log


async def contents(gateway: Gateway) -> dict[int, tuple[str, str | None]]:
    return {
        found.offset: (
            (found.record.key or b"").decode(),
            None if found.record.is_tombstone else found.record.value.decode(),
        )
        for found in await gateway.contents("log")
    }


AB = ("a", "0"), ("b", "1")


async def test_the_sweep_of_the_owner_compacts_a_log() -> None:
    async with a_cluster(settings=COMPACT) as (cluster, (one, two)):
        row = await filled(one, AB, (("a", "2"), ("c", "3")), (("c", None),))
        old = {item.ledger_id for item in row.items[:-1]}

        await swept(two)
        assert two.logs.rewrites._merging is None, "it does not own the log"
        await swept(one)
        await until(lambda: old <= cluster.deleted.keys(), "the old ledgers are deleted")

        left = {1: ("b", "1"), 2: ("a", "2"), 4: ("c", None)}
        assert [await contents(each) for each in (one, two)] == [left, left]
        assert one.logs.rewrites.removed_bytes > 0
        await swept(one)
        assert one.logs.rewrites._merging is None or one.logs.rewrites._merging.done()
        assert len(cluster.logs["log"].items) == 2, "nothing is dirty"
        assert (one.logs.rewrites.dirty_shares, two.logs.rewrites.dirty_shares) == ({"log": 0}, {})


async def test_compaction_waits_for_the_share_of_dirty_bytes() -> None:
    settings = replace(COMPACT, max_dirty_percent=100)
    async with a_cluster(settings=settings) as (_, (one, _)):
        await filled(one, AB)
        await compacted(one)
        row = await filled(one, *[AB] * 8)
        one.logs.rewrites.dirty_shares |= {f"deleted-{n}": 0.5 for n in range(LOGS_COUNTED_MAX)}
        await swept(one)
        (share,) = one.logs.rewrites.dirty_shares.values()
        assert 0.5 < share < 1, "reported as a metric"
        assert one.logs.rewrites._next(row) is None
        await one.logs.change("log", {"max_dirty_percent": 1})
        assert one.logs.rewrites._next(one.cluster.logs["log"]) is not None


async def test_pages_skip_the_offsets_of_removed_records() -> None:
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        batch_of_six = [("a", "0"), ("b", "1"), ("a", "2"), ("a", "3"), ("c", "4"), ("a", "5")]
        await filled(one, batch_of_six, (("c", "6"),), (("d", "7"),))
        await compacted(one)

        async def page(start: Any, limit: int = 100, **options: Any) -> tuple[int, list[int], int]:
            found: LogBatches = await one.logs.reader.read("log", start, limit=limit, **options)
            return found.first, [each.offset for each in found.records], found.next

        assert await page(0) == (0, [1, 5, 6, 7], 8)
        assert await page(0, 1) == (0, [1], 2)
        assert await page(2, 1) == (2, [5], 6)
        assert await page(2, 2, max_bytes=1) == (2, [5], 6)
        assert await page("earliest", 3) == (0, [1, 5, 6], 7)
        assert await page(Last(5), 1) == (3, [5], 6)
        assert await page(8) == (8, [], 8)


async def test_a_page_of_only_removed_records_moves_on() -> None:
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        await filled(one, AB, (("a", None), ("b", None)))
        await one.logs.change("log", {"delete_retention_s": 0})
        await compacted(one)
        await filled(one, (("x", "4"),))
        await compacted(one)

        page = await one.logs.reader.read("log", 0, limit=1)
        assert [each.offset for each in page.records] == [4]
        await one.logs.roll("log")
        await filled(one, (("x", None),))
        await compacted(one)
        await filled(one, (("y", "6"),))
        await compacted(one)
        assert await contents(one) == {6: ("y", "6")}
        page = await one.logs.reader.read("log", 3, limit=1)
        assert (page.first, page.next, [each.offset for each in page.records]) == (3, 7, [6])


async def test_a_tombstone_stays_for_its_time() -> None:
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        await filled(one, AB, (("a", None),))
        await compacted(one)
        await filled(one, (("c", "3"),))
        await compacted(one)
        assert await contents(one) == {1: ("b", "1"), 2: ("a", None), 3: ("c", "3")}

        await one.logs.change("log", {"delete_retention_s": 0})
        await filled(one, (("d", "4"),))
        await compacted(one)
        assert await contents(one) == {1: ("b", "1"), 3: ("c", "3"), 4: ("d", "4")}


@pytest.mark.parametrize("keys_max", [1, 3])
async def test_more_keys_than_a_pass_remembers(
    keys_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "KEYS_MAX", keys_max)
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        many = [(f"k{n}", f"{n}") for n in range(8)]
        await filled(one, many, many, many)
        row = await compacted(one)
        while next_pass(row, one.logs.rewrites.now_ms()) is not None:
            row = await compacted(one)

        assert await contents(one) == {16 + n: pair for n, pair in enumerate(many)}
        assert all(item.compacted_ms for item in row.items[:-1])


async def test_a_pass_ends_with_its_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 27d, clause 3."""
    async with a_cluster(settings=COMPACT) as (cluster, (one, _)):
        monkeypatch.setattr(compaction, "GROUP_BYTES_MAX", 1)
        row = await filled(one, AB, AB, AB)
        lost = cluster.ledgers[row.items[1].ledger_id]
        lost.row = replace(lost.row, may_lack_entries=True)
        due = next_pass(row, one.logs.rewrites.now_ms())
        assert due is not None

        due = replace(due, dirty=due.dirty[::2])  # the keys of the first and the last one are known
        state = PassState(due)
        for item in (row.items[0], row.items[2]):
            await one.logs.rewrites._learn(state, row, item)
        state._groups = deque([(item.ledger_id,) for item in row.items[:3]])
        first = await one.logs.rewrites.step(state, row)
        done = await one.logs.rewrites.step(state, cluster.logs["log"])

        assert first is not None
        assert done is not None
        assert isinstance(done.log, EntryUnavailable)
        assert done.spoiled == row.items[1].ledger_id
        assert state.is_over
        ids = [item.ledger_id for item in cluster.logs["log"].items]
        assert ids[0] != row.items[0].ledger_id
        assert ids[1:] == [item.ledger_id for item in row.items[1:]]
        again = next_pass(cluster.logs["log"], 10**15, {row.items[1].ledger_id})
        assert again is None, "the first is clean, and a pass ends before the second"


@pytest.mark.parametrize("how", ["unfit", "damaged", "unavailable"])
async def test_a_pass_ends_before_a_ledger_that_cant_be_read(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 27d, clause 5: earlier ones are compacted, and no ledger is read for each sweep."""
    async with a_cluster(settings=COMPACT) as (cluster, (one, _)):
        row = await filled(one, (("a", "0"), ("a", "1")), AB, (("a", "4"),))
        bad = cluster.ledgers[row.items[1].ledger_id]
        if how == "unfit":
            bad.row = replace(bad.row, lost_entries=((0, 0),))
        elif how == "damaged":
            bad.entries[0] = b"no batch"
        asked = list[int]()

        async def read(engine: Any, asked_for: Any, max_bytes: int = 0) -> Any:
            asked.append(asked_for.ledger_id)
            if how == "unavailable" and asked_for.ledger_id == row.items[1].ledger_id:
                raise EntryUnavailable("not now")
            return await read_batches(engine, asked_for, max_bytes)

        monkeypatch.setattr(rewrites, "read_batches", read)

        await swept(one)
        merging = one.logs.rewrites._merging
        assert merging is not None
        await merging

        now = cluster.logs["log"]
        assert [bool(item.compacted_ms) for item in now.items] == [True, False, False, False]
        assert now.items[0].replaced == 1
        assert one.logs.rewrites.failed == 1
        assert [item.ledger_id for item in now.items[1:]] == [i.ledger_id for i in row.items[1:]]
        asked.clear()
        await swept(one)
        await asyncio.sleep(0)
        if how != "unavailable":
            assert asked == []


async def test_a_pass_lets_other_logs_be_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a pass is a turn of its log. Later ledgers of that log are merged meanwhile."""
    async with a_cluster(settings=COMPACT) as (cluster, (one, _)):
        await one.logs.put("other", replace(SETTINGS, merge_below_bytes=1 << 20))
        for _ in range(9):
            await one.logs.append("other", Append.of((Record(b"v"),)))
            await one.logs.roll("other")
        row = await filled(one, AB, AB, AB)
        turns = list[str]()
        driver = rewrites._RewriteDriver

        def noted(owner: Any, machine: Any, name: str) -> Any:
            turns.append(name)
            return driver(owner, machine, name)

        monkeypatch.setattr(rewrites, "_RewriteDriver", noted)
        monkeypatch.setattr(compaction, "GROUP_BYTES_MAX", 1)
        one.logs.rewrites.want(row)
        one.logs.rewrites.want(cluster.logs["other"])
        merging = one.logs.rewrites._merging
        assert merging is not None
        await merging

        assert turns == ["other", "log", "log", "log"]
        assert one.logs.rewrites._pass is None


async def test_a_ledger_without_news_is_not_written_again() -> None:
    async with a_cluster(settings=COMPACT) as (cluster, (one, _)):
        await filled(one, AB)
        first = (await compacted(one)).items[0]
        for number in range(5):
            await filled(one, ((f"k{number}", ""),))
            await compacted(one)

        items = cluster.logs["log"].items[:-1]
        assert items[0] == first
        assert [item.replaced for item in items] == [0] * 6
        assert all(item.compacted_ms for item in items)
        assert one.logs.rewrites.done == 0


@pytest.mark.parametrize("knows", [False, True])
async def test_a_change_of_the_policy_ends_a_pass(knows: bool) -> None:
    async with a_cluster(settings=COMPACT) as (cluster, (one, two)):
        row = await filled(one, AB, AB)
        due = next_pass(row, one.logs.rewrites.now_ms())
        assert due is not None
        state = PassState(due)
        while state.to_learn is not None:
            await one.logs.rewrites.step(state, row)
        await two.logs.change("log", {"cleanup_policy": "delete"})

        await one.logs.rewrites.step(state, cluster.logs["log"] if knows else row)

        assert state.is_over
        assert await contents(one) == dict(enumerate((*AB, *AB)))


def test_what_is_decoded_at_once_is_bounded() -> None:
    """Batches of 10,000 equal keys are stored in some hundred bytes each."""
    records = [Record(b"", b"k")] * 10_000
    data = packed.pack(batch.placed(batch.encode(records), append_time_ms=1, records_before=0))
    assert len(data) < 1000

    assert [len(part) for part in rewrites.steps([(at, data) for at in range(50)])] == [1] * 50
    small = batch.placed(batch.encode([Record(b"v" * 1000)]), append_time_ms=1, records_before=0)
    parts = list(rewrites.steps([(at, small) for at in range(500)]))
    assert [entry for part in parts for entry in part] == [(at, small) for at in range(500)]
    assert max(map(len, parts)) < 250
    assert list(rewrites.steps([(0, b"no batch")])) == [[(0, b"no batch")]]
    gone = [(at, batch.emptied(batch.decode_head(small), 1)) for at in range(9)]
    head = replace(batch.decode_head(small), count=1 << 31)
    gone += [(9, batch.emptied(head, 1 << 31))]
    assert list(rewrites.steps(gone)) == [gone], "removed records cost nothing"


async def test_reading_the_keys_of_a_ledger_ends_when_they_dont_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after what was read at once: that may be millions of records."""
    monkeypatch.setattr(compaction, "KEYS_MAX", 3)
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        for number in range(20):
            await one.logs.append("log", call(((f"k{number}", ""),)))
        await one.logs.roll("log")
        row = await filled(one, AB)
        found = next_pass(row, one.logs.rewrites.now_ms())
        assert found is not None
        state, learn, count = PassState(found), PassState.learn, 0

        def counted(self: PassState, *asked: Any) -> bool:
            nonlocal count
            count += 1
            return learn(self, *asked)

        monkeypatch.setattr(PassState, "learn", counted)
        await one.logs.rewrites.step(state, row)

        assert count == 4


async def test_a_pass_ends_if_the_log_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(settings=COMPACT) as (cluster, (one, two)):
        monkeypatch.setattr(compaction, "GROUP_BYTES_MAX", 1)
        row = await filled(one, AB, AB)
        due = next_pass(row, one.logs.rewrites.now_ms())
        assert due is not None
        learn = one.logs.rewrites._learn

        async def truncated(*asked: Any) -> None:
            await learn(*asked)
            await two.logs.truncate("log", 2)

        monkeypatch.setattr(one.logs.rewrites, "_learn", truncated)

        assert await carried_out(one, due) is None
        assert len(cluster.logs["log"].items) == 2


async def test_a_record_without_a_key_is_refused() -> None:
    """Rule 27d, clause 6; the retry of an earlier request gets its answer."""
    plain, producer = (Record(b"v"),), ProducerSeq("p", 0, 0)
    async with a_cluster(settings=SETTINGS) as (_, (one, two)):
        await one.logs.append("log", Append.of(plain, producer))
        await one.logs.change("log", {"cleanup_policy": "compact,delete"})

        for gateway in (one, two):
            with pytest.raises(KeyRequired):
                await gateway.logs.append("log", Append.of(plain))
        again = await two.logs.append("log", Append.of(plain, producer))
        assert again.is_duplicate
        done = await one.logs.append("log", call(AB))
        assert (done.first_offset, done.last_offset) == (1, 2)


async def test_nothing_is_compacted_while_the_databases_clock_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 27d, clause 8."""
    async with a_cluster(settings=COMPACT) as (_, (one, _)):
        row = await filled(one, AB)
        assert one.logs.rewrites._next(row) is not None

        monkeypatch.setattr(type(one.logs), "deletes_by_age", False)

        assert one.logs.rewrites._next(row) is None


async def test_a_takeover_that_replays_a_compacted_ledger_knows_no_producer() -> None:
    """Rule 27d, clause 7: after a rebuild, a compacted ledger may be the last one."""
    async with a_cluster(settings=COMPACT) as (cluster, (one, two)):
        producer = ProducerSeq("p", 0, 0)
        await one.logs.append("log", call(AB, producer=producer))
        await filled(one, (("a", "2"),), (("z", "3"),))
        row = await compacted(one)
        one.kill()
        made = row.items[0]
        rebuilt = replace(row, items=(replace(made, last_offset=None),), version=row.version + 1)
        cluster.logs["log"] = rebuilt

        taken = await two.take_over("log")

        assert taken.forgotten_end == 4
        assert taken.last_item is not None
        assert taken.last_item.producers == ()
