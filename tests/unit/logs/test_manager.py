"""Logs on a model of ledgers: order, exactly once, takeovers and duels, in many schedules."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quorumlog.errors import (
    UNKNOWN,
    DatabaseWentBack,
    EntryLost,
    LogClosed,
    LogExists,
    LogFenced,
    LogFull,
    MetadataUnavailable,
    NoSuchLog,
    OffsetTruncated,
    StaleProducer,
    UnexpectedOffset,
)
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogSettings, job, takeover
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.metadata import State
from quorumlog.protocol.quorum import Quorum
from tests.model.logs.model import Cluster, Gateway
from tests.support.waiting import turns, until

SETTINGS = LogSettings(Quorum(3, 3, 2), roll_bytes=0)


@asynccontextmanager
async def a_cluster(
    gateways: int = 2, seed: int = 0, settings: LogSettings = SETTINGS
) -> AsyncIterator[tuple[Cluster, list[Gateway]]]:
    cluster = Cluster(seed)
    made = [cluster.gateway() for _ in range(gateways)]
    await made[0].logs.put("log", settings)
    try:
        yield cluster, made
    finally:
        for gateway in cluster.gateways.values():
            await gateway.end()


def records(*values: str) -> tuple[Record, ...]:
    return tuple(Record(value.encode()) for value in values)


def call(
    *values: str,
    seq: int | None = None,
    epoch: int = 0,
    expect: int | None = None,
    token: int | None = None,
    producer: str = "p",
) -> Append:
    who = None if seq is None else ProducerSeq(producer, epoch, seq)
    return Append.of(records(*values), who, expect=expect, token=token)


async def contents(gateway: Gateway, start: int = 0, page: int = 7) -> list[str]:
    found: list[str] = []
    at = start
    while True:
        read = await gateway.logs.reader.read("log", at, limit=page)
        assert [record.offset for record in read.records] == list(range(at, at + len(read.records)))
        found += [record.record.value.decode() for record in read.records]
        if not read.records:
            return found
        at = read.next


async def test_offsets_are_dense_and_read_back_through_both_gateways() -> None:
    async with a_cluster() as (_, (one, two)):
        first = await one.logs.append("log", call("a", "b", "c"))
        second = await two.logs.append("log", call("d"))

        assert (first.first_offset, first.last_offset) == (0, 2)
        assert (second.first_offset, second.entry_id) == (3, 1)
        assert await contents(one) == await contents(two) == ["a", "b", "c", "d"]
        assert await contents(two, start=2, page=1) == ["c", "d"]
        assert (await two.logs.get("log")).next_offset == 4


async def test_pipelined_appends_keep_the_order_of_their_calls() -> None:
    async with a_cluster() as (_, (one, _two)):
        await one.logs.append("log", call("first"))

        tasks = [asyncio.create_task(one.logs.append("log", call(str(n)))) for n in range(50)]
        answers = await asyncio.gather(*tasks)

        assert [answer.first_offset for answer in answers] == list(range(1, 51))
        assert await contents(one) == ["first", *map(str, range(50))]


async def test_expect_takes_only_the_next_offset_and_tells_it() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a", expect=0))

        with pytest.raises(UnexpectedOffset) as wrong:
            await two.logs.append("log", call("b", expect=0))

        assert wrong.value.headers["Next-Offset"] == "1"
        assert (await two.logs.append("log", call("b", expect=1))).first_offset == 1


async def test_a_duplicate_in_flight_waits_for_the_first_and_gets_its_answer() -> None:
    async with a_cluster() as (_, (one, two)):
        answers = await asyncio.gather(
            *(gateway.logs.append("log", call("a", seq=0)) for gateway in (one, two) * 5)
        )

        assert sorted(answer.is_duplicate for answer in answers) == [False] + [True] * 9
        assert {answer.first_offset for answer in answers} == {0}
        assert await contents(one) == ["a"]


async def test_a_new_epoch_fences_the_old_one_off_for_good() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a", seq=0, epoch=1))
        await one.logs.append("log", call("b", seq=0, epoch=2))
        one.kill()

        with pytest.raises(StaleProducer) as stale:
            await two.logs.append("log", call("c", seq=1, epoch=1))

        assert stale.value.headers["Producer-Epoch"] == "2"


async def test_a_read_sees_what_was_acknowledged_before_it_though_it_knew_an_older_row() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        assert await contents(two) == ["a"]
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))

        assert await contents(two, start=1) == ["b"]
        assert await contents(two) == ["a", "b"]


async def test_limits_of_the_settings_roll_by_themselves() -> None:
    settings = LogSettings(Quorum(3, 3, 2), roll_bytes=0, roll_entries=5)
    async with a_cluster(settings=settings) as (cluster, (one, two)):
        sent: list[str] = []

        async def append_until_rolled() -> bool:
            sent.append(str(len(sent)))
            await one.logs.append("log", call(sent[-1]))
            return len(cluster.logs["log"].items) > 2

        await until(append_until_rolled, "the log has rolled twice")

        assert await contents(two) == sent


async def test_a_read_takes_over_so_that_what_is_acknowledged_is_readable() -> None:
    async with a_cluster() as (cluster, (one, two)):
        for n in range(5):
            await one.logs.append("log", call(str(n)))
        one.kill()

        assert await contents(two) == [str(n) for n in range(5)]
        assert all(ledger.row.state is State.CLOSED for ledger in cluster.ledgers.values())
        assert (await two.logs.append("log", call("5"))).first_offset == 5


async def test_a_tail_is_woken_by_an_append_and_ends_with_the_log() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        tail = asyncio.create_task(two.logs.reader.read("log", "latest", wait_s=60))
        later = asyncio.create_task(two.logs.reader.read("log", 1, wait_s=60))
        await turns()
        await one.logs.append("log", call("b"))

        assert [record.offset for record in (await later).records] == [1]
        end = asyncio.create_task(two.logs.reader.read("log", 2, wait_s=60))
        closed = await one.logs.close("log")
        assert closed.next_offset == 2
        assert (await end).closed
        # `latest` may have been asked before or after the second append: only that is open.
        found = await tail
        assert found.closed or [record.offset for record in found.records] == [1]


async def test_truncate_drops_whole_ledgers_and_what_is_below_is_gone() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a", "b"))
        await one.logs.roll("log")
        await one.logs.append("log", call("c"))
        assert await contents(two) == ["a", "b", "c"]

        kept = await two.logs.truncate("log", 1)
        cut = await two.logs.truncate("log", 2)

        assert (kept.log.first_offset, cut.log.first_offset) == (0, 2)
        for gateway in (one, two):
            with pytest.raises(OffsetTruncated) as gone:
                await gateway.logs.reader.read("log", 1)
            assert gone.value.members["first_offset"] == 2
            earliest = await gateway.logs.reader.read("log", "earliest")
            assert [record.offset for record in earliest.records] == [2]
        assert len(cluster.ledgers) == 1
        assert (await one.logs.append("log", call("d"))).first_offset == 3


async def test_an_opened_log_takes_only_its_latest_token() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        first, at = await two.logs.open("log", "me")
        assert at == 1
        await one.logs.append("log", call("b", token=first))
        second, at = await one.logs.open("log", "you")
        assert (second > first, at) == (True, 2)

        for token in (first, None):
            for gateway in (one, two):
                with pytest.raises(LogFenced):
                    await gateway.logs.append("log", call("x", token=token))
        await two.logs.append("log", call("c", token=second))
        one.kill()
        await two.logs.append("log", call("d", token=second))

        assert await contents(two) == ["a", "b", "c", "d"]


async def test_a_closed_log_takes_nothing_and_reads_on() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        await two.logs.close("log")

        for gateway in (one, two):
            with pytest.raises(LogClosed):
                await gateway.logs.append("log", call("b"))
            assert await contents(gateway) == ["a"]
        assert all(ledger.row.state is State.CLOSED for ledger in cluster.ledgers.values())


async def test_a_deleted_log_takes_its_ledgers_along_and_its_name_is_free() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        await two.logs.delete("log")

        for gateway in (one, two):
            with pytest.raises(NoSuchLog):
                await gateway.logs.append("log", call("b"))
            with pytest.raises(NoSuchLog):
                await gateway.logs.reader.read("log", 0)
        assert not cluster.ledgers
        await two.logs.put("log", SETTINGS)
        assert (await one.logs.append("log", call("c"))).first_offset == 0


def loses_metadata(_name: str, gateway: Gateway) -> None:
    gateway.cut_off(60, asks=False, hears=True)


async def test_a_deletion_is_not_told_as_done_where_members_cannot_be_told() -> None:
    """Rule 18e: metadata is lost between the deletion and the question which of its ledgers forks name."""
    async with a_cluster() as (cluster, (one, _two)):
        await one.logs.append("log", call("a"))
        cluster.on_freed = loses_metadata

        with pytest.raises(MetadataUnavailable) as error:
            await one.logs.delete("log")

        assert (error.value.outcome, cluster.told_deleted) == (UNKNOWN, set())
        assert "log" not in cluster.logs


async def test_a_deletion_or_truncation_that_the_database_lost_meanwhile_is_not_told_as_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 18e: the answer to the change was of a database that was lost before members knew."""
    async with a_cluster() as (cluster, (one, _two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))
        row = cluster.logs["log"]
        notify = one.notify_deleted

        async def goes_back(*args: Any) -> None:
            await notify(*args)
            cluster.logs["log"] = row

        monkeypatch.setattr(one, "notify_deleted", goes_back)

        with pytest.raises(DatabaseWentBack) as cut:
            await one.logs.truncate("log", 1)
        with pytest.raises(DatabaseWentBack) as deleted:
            await one.logs.delete("log")

        assert (cut.value.outcome, deleted.value.outcome) == (UNKNOWN, UNKNOWN)


async def test_a_fork_that_ends_or_is_cut_tells_of_none_of_its_sources_ledgers() -> None:
    """Rule 27a: they are told as deleted, and a rebuild would bury them with the living source's records."""
    async with a_cluster() as (cluster, (one, _two)):
        for value in "ab":
            await one.logs.append("log", call(value))
            await one.logs.roll("log")
        source = await one.logs.rows.row("log")
        for name in ("cut", "gone"):
            await one.logs.fork(one.logs.draft(name, SETTINGS), source, 2)
            await one.logs.append(name, call("own"))

        await one.logs.truncate("cut", 2)
        await one.logs.delete("gone")
        cut = await one.logs.rows.row("cut")

        assert (cut.first_offset, cut.shared) == (2, ())
        assert cluster.told_deleted.isdisjoint(item.ledger_id for item in source.items)
        assert not cluster.wrong_tombstones


@pytest.mark.parametrize("is_cut", [True, False])
async def test_what_a_fork_shared_is_deleted_at_once_where_nobody_names_it_any_more(
    *, is_cut: bool
) -> None:
    async with a_cluster() as (cluster, (one, _two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        source = await one.logs.rows.row("log")
        for name in ("first", "last"):
            await one.logs.fork(one.logs.draft(name, SETTINGS), source, 1)
            await one.logs.append(name, call("own"))
        await one.logs.delete("log")
        shared = source.items[0].ledger_id
        await one.logs.delete("first")
        assert shared in cluster.ledgers, "another fork names it"

        await (one.logs.truncate("last", 1) if is_cut else one.logs.delete("last"))

        assert shared in cluster.deleted


async def test_members_of_what_forks_share_hear_of_their_logs_deletion_alone() -> None:
    """Rule 18e: and a new fork has a ledger of its own at once, which tells a rebuild what it shares."""
    async with a_cluster() as (cluster, (one, _two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        source = await one.logs.rows.row("log")
        await one.logs.fork(one.logs.draft("fork", SETTINGS), source, 1)
        fork = await one.logs.rows.row("fork")

        await one.logs.delete("log")

        shared, own = (item.ledger_id for item in fork.items)
        assert fork.own[0].first_offset == 1
        assert cluster.told_of_log == {shared}
        assert shared not in cluster.told_deleted
        assert own in cluster.ledgers


async def test_a_repeated_truncation_tells_what_the_first_one_could_not() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        first = cluster.logs["log"].items[0].ledger_id
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))
        row = cluster.logs["log"]
        cluster.places[first] = 0
        await one.logs._store.cas(row.truncated(1))  # by a gateway that ended then
        assert not cluster.told_deleted

        await two.logs.truncate("log", 1)

        assert cluster.told_deleted == {first}


async def test_a_read_through_a_displaced_owner_heals_what_a_dead_one_left() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await two.take_over("log")
        await two.logs.forwarded("log", call("b"))
        two.kill()

        assert await contents(one) == ["a", "b"]
        assert (await one.logs.append("log", call("c"))).first_offset == 2


async def test_the_same_settings_again_are_the_same_log_and_others_are_refused() -> None:
    async with a_cluster() as (_, (one, two)):
        _, is_new = await two.logs.put("log", SETTINGS)

        assert not is_new
        with pytest.raises(LogExists):
            await one.logs.put("log", LogSettings(Quorum(3, 3, 3)))


async def test_a_drained_gateway_leaves_sealed_logs_behind() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))

        await one.logs.ownership.drain()

        assert cluster.logs["log"].end_offset == 1
        one.kill()
        assert (await two.logs.append("log", call("b"))).first_offset == 1


async def test_rolls_end_before_takeovers_lack_room_in_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(takeover, "LOG_LEDGERS_MAX", 4)
    monkeypatch.setattr(job, "LEDGERS_SPARE", 2)
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))
        with pytest.raises(LogFull):
            await two.logs.roll("log")
        one.kill()

        assert (await two.logs.append("log", call("c"))).first_offset == 2
        assert await contents(two) == ["a", "b", "c"]


def give_up(cluster: Cluster, ledger_id: int, first: int, last: int) -> None:
    """What an operator accepts (rule 31)."""
    ledger = cluster.ledgers[ledger_id]
    ledger.row = ledger.row.given_up(first, last, ())


async def test_a_read_of_lost_records_names_where_the_log_goes_on() -> None:
    async with a_cluster() as (cluster, (one, two)):
        for values in (("a",), ("b", "c"), ("d", "e", "f"), ("g",), ("h", "i")):
            await one.logs.append("log", call(*values))
        one.kill()
        await two.logs.append("log", call("j"))  # taken over: the first ledger is sealed
        give_up(cluster, 1, 1, 2)

        read = await two.logs.reader.read("log", 0)
        assert ([r.record.value for r in read.records], read.next) == ([b"a"], 1)
        for start in range(1, 6):
            with pytest.raises(EntryLost) as reported:
                await two.logs.reader.read("log", start)
            assert reported.value.members == {"next": 3, "next_offset": 6}
        for start, value in ((6, b"g"), (7, b"h"), (8, b"i"), (9, b"j")):
            read = await two.logs.reader.read("log", start, limit=1)
            assert [r.record.value for r in read.records] == [value]


async def test_lost_records_at_a_sealed_ledgers_end_lead_on_to_the_next_ledger() -> None:
    async with a_cluster() as (cluster, (one, two)):
        for values in (("a",), ("b", "c"), ("d", "e")):
            await one.logs.append("log", call(*values))
        one.kill()
        await two.logs.append("log", call("f"))
        give_up(cluster, 1, 1, 2)

        with pytest.raises(EntryLost) as reported:
            await two.logs.reader.read("log", 2)
        assert reported.value.members["next_offset"] == 5
        assert [r.record.value for r in (await two.logs.reader.read("log", 5)).records] == [b"f"]


async def test_a_takeover_ends_though_the_end_is_lost_and_gives_no_offset_twice() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a", seq=0))
        await one.logs.append("log", call("b", "c", seq=1))
        await one.logs.append("log", call("d", seq=2))
        one.kill()
        await two.recover(1)
        give_up(cluster, 1, 1, 2)

        after = await two.logs.append("log", call("e"))

        assert after.first_offset >= 4  # 1 to 3 were acknowledged
        with pytest.raises(EntryLost) as reported:
            await two.logs.reader.read("log", 2)
        assert reported.value.members["next_offset"] == after.first_offset
        read = await two.logs.reader.read("log", after.first_offset)
        assert [r.record.value for r in read.records] == [b"e"]
        # What is left of a producer is known; of the rest nobody can say what is a repeat.
        assert (await two.logs.append("log", call("a", seq=0))).first_offset == 0
        assert cluster.logs["log"].forgotten_end == after.first_offset


async def test_append_times_never_go_back_whoever_takes_the_log_over() -> None:
    async with a_cluster(gateways=3) as (cluster, gateways):
        for gateway, skew_ms in zip(gateways, (50_000, -50_000, 0), strict=True):
            gateway.skew_ms = skew_ms
            await gateway.logs.append("log", call("a"))
            await gateway.logs.roll("log")
            gateway.kill()
        last = cluster.gateway()
        await last.logs.append("log", call("b"))

        found = (await last.logs.reader.read("log", 0)).records
        times = [record.timestamp_ms for record in found]
        assert len(times) == 4
        assert times == sorted(times)


# --- lists -------------------------------------------------------------------------------------------


def counted(gateway: Gateway, *methods: str) -> Counter[str]:
    """How often these methods of a gateway's engine are called from now on."""
    calls: Counter[str] = Counter()

    def counting(method: str) -> Any:
        inner = getattr(gateway, method)

        def call(*args: Any, **options: Any) -> Any:
            calls[method] += 1
            return inner(*args, **options)

        return call

    for method in methods:
        setattr(gateway, method, counting(method))
    return calls


async def test_a_page_asks_nobody_log_by_log() -> None:
    async with a_cluster(gateways=3) as (_, (one, two, three)):
        for number, owner in enumerate((one, two, three) * 4):
            await one.logs.put(f"n{number:02}", SETTINGS)
            for _ in range(number):
                await owner.logs.append(f"n{number:02}", call("a"))
        calls = counted(two, "get", "last_add_confirmed", "read", "gateways")

        views, _ = await two.logs.views.page(after="m", limit=100)

        assert [view.next_offset for view in views] == list(range(12))
        # The first one has no owner: nothing was appended to it.
        owners = [view.owner for view in views[1:]]
        assert owners == ([one.writer, two.writer, three.writer] * 4)[1:]
        assert calls == {"gateways": 1}


async def test_a_page_shows_logs_whose_owner_is_gone() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        one.kill()

        views, following = await two.logs.views.page(after=None, limit=100)

        assert [(view.log.name, view.next_offset) for view in views] == [("log", 1)]
        assert following is None
