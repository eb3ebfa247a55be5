"""The sweep: ages, abandoned owners, and ledgers that nobody names."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from quorumlog.errors import EntryUnavailable, LogProtected
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from services.gateway.interface import LedgerOptions
from services.gateway.logs import store
from services.gateway.logs.driver import options_of
from services.gateway.logs.sweep import Sweep, retained_from
from services.gateway.logs.transactions import Transactions
from tests.model.logs.model import Cluster, Gateway, ModelTransactions, Store
from tests.support.virtual import in_virtual_time, run_virtual
from tests.support.waiting import until
from tests.unit.logs.test_manager import SETTINGS, a_cluster, call, contents, records

DAY_MS = 24 * 3600 * 1000


def sweep_of(gateway: Gateway) -> Sweep:
    return Sweep(gateway.logs, Store(gateway))


def kept(log: LogMetadata, *, retention_bytes: int = 0, retention_seconds: int = 0) -> int:
    settings = replace(
        SETTINGS, retention_bytes=retention_bytes, retention_seconds=retention_seconds
    )
    return retained_from(replace(log, settings=settings), now_ms=100_000)


ROW = LogMetadata(
    "log",
    SETTINGS,
    items=(
        LogItem(1, 0, 9, bytes=100, sealed_ms=10_000),
        LogItem(2, 10, 19, bytes=100, sealed_ms=50_000),
        LogItem(3, 20, 29, bytes=100, sealed_ms=90_000),
        LogItem(4, 30, None),
    ),
)


def test_by_age_ledgers_go_that_were_closed_long_ago() -> None:
    assert kept(ROW) == 0
    assert kept(ROW, retention_seconds=91) == 0
    assert kept(ROW, retention_seconds=90) == 10
    assert kept(ROW, retention_seconds=50) == 20
    assert kept(ROW, retention_seconds=1) == 30


async def test_a_gateway_whose_clock_is_ahead_deletes_nothing_before_its_time() -> None:
    settings = replace(SETTINGS, retention_seconds=3600)
    async with a_cluster(settings=settings) as (cluster, (one, two)):
        one.skew_ms, two.skew_ms = -400 * DAY_MS, 400 * DAY_MS
        for value in "ab":
            await one.logs.append("log", Append.of(records(value)))
            await one.logs.roll("log")
        await sweep_of(one).sweep_logs()
        one.kill()
        await sweep_of(two).sweep_logs()  # seals it, as nobody writes it any more
        await sweep_of(two).sweep_logs()
        assert await contents(two) == ["a", "b"]

        cluster.ahead_ms = 2 * 3600 * 1000  # two hours later by the database's clock
        await sweep_of(two).sweep_logs()
        assert (await two.logs.get("log")).log.first_offset > 0


def test_by_size_the_oldest_go_while_enough_bytes_stay() -> None:
    assert kept(ROW, retention_bytes=300) == 0
    assert kept(ROW, retention_bytes=200) == 10
    assert kept(ROW, retention_bytes=150) == 10
    assert kept(ROW, retention_bytes=1) == 20


def test_of_an_archived_log_nothing_goes_that_is_not_archived() -> None:
    assert kept(replace(ROW, archived_through=0), retention_seconds=1) == 0
    assert kept(replace(ROW, archived_through=19), retention_seconds=1) == 10
    assert kept(replace(ROW, archived_through=20), retention_seconds=1) == 20
    assert kept(replace(ROW, archived_through=30), retention_seconds=50) == 20


def test_the_last_ledger_of_a_sealed_log_stays() -> None:
    sealed = replace(ROW, items=ROW.items[:1])

    assert kept(sealed, retention_seconds=1) == 0


async def test_a_log_whose_owner_died_is_sealed_and_one_whose_owner_lives_is_left_alone() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", Append.of(records("a")))
        await sweep_of(two).sweep_logs()
        assert cluster.logs["log"].end_offset is None

        one.kill()
        await sweep_of(two).sweep_logs()

        assert cluster.logs["log"].end_offset == 1
        assert await contents(two) == ["a"]


async def test_the_owner_sweeps_its_retention_and_the_ledgers_are_gone() -> None:
    settings = LogSettings(Quorum(3, 3, 2), roll_bytes=0, retention_bytes=1)
    async with a_cluster(settings=settings) as (cluster, (one, two)):
        for value in ("a", "b", "c"):
            await one.logs.append("log", Append.of(records(value)))
            await one.logs.roll("log")
        await one.logs.append("log", Append.of(records("d")))

        await sweep_of(two).sweep_logs()
        assert cluster.logs["log"].first_offset == 0
        await sweep_of(one).sweep_logs()

        # The sealed ones go as long as a byte of sealed ones stays.
        assert cluster.logs["log"].first_offset == 2
        assert len(cluster.ledgers) == 2
        assert await contents(two, start=2) == ["c", "d"]


async def test_ledgers_that_no_log_names_are_deleted_and_no_others() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", Append.of(records("a")))
        orphan = await two.create(_options())
        cluster.ledgers[orphan.ledger_id].row = replace(orphan, state=State.OPEN)

        await one.logs.orphans.delete_some(older_than_s=0)

        assert list(cluster.ledgers) == [cluster.logs["log"].items[0].ledger_id]
        assert orphan.ledger_id in cluster.deleted


@in_virtual_time(seed=5)
async def test_the_end_of_a_transaction_takes_orphans_of_the_age_that_was_set() -> None:
    async with a_cluster() as (cluster, (one, two)):
        orphan = (await two.create(_options())).ledger_id

        async def abort() -> None:
            engine, client = cast(Any, one), ModelTransactions(one)
            served = Transactions(engine=engine, logs=one.logs, store=Store(one), client=client)
            await served.abort(cluster.begin("log"))

        await asyncio.sleep(60)
        await abort()
        await asyncio.sleep(60)
        assert orphan in cluster.ledgers
        one.logs.times = replace(one.logs.times, orphan_age_s=30)
        await abort()
        await until(lambda: orphan in cluster.deleted, "the orphan is deleted")


async def test_orphans_that_cant_be_recovered_hold_up_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.logs.store._PAGE", 3)
    async with a_cluster() as (cluster, (one, two)):
        stuck = [(await two.create(_options())).ledger_id for _ in range(4)]
        free = (await two.create(_options())).ledger_id
        recover = one.recover

        async def fails_for_some(ledger_id: int) -> LedgerMetadata:
            if ledger_id in stuck:
                raise EntryUnavailable(ledger_id=ledger_id)
            return await recover(ledger_id)

        monkeypatch.setattr(one, "recover", fails_for_some)

        await one.logs.orphans.delete_some(older_than_s=0)
        assert free in cluster.ledgers
        await one.logs.orphans.delete_some(older_than_s=0)
        assert set(cluster.deleted) == {free}

        # And those that were passed over are tried again.
        monkeypatch.setattr(one, "recover", recover)
        await one.logs.orphans.delete_some(older_than_s=0)
        await one.logs.orphans.delete_some(older_than_s=0)
        assert set(cluster.deleted) == {free, *stuck}


async def test_a_round_tells_whether_it_may_have_left_some_also_behind_the_last_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.logs.store._PAGE", 4)
    monkeypatch.setattr("services.gateway.logs.store.ORPHANS_PER_ROUND_MAX", 2)
    async with a_cluster() as (cluster, (one, two)):
        for _ in range(5):
            await two.create(_options())

        more = [await one.logs.orphans.delete_some(older_than_s=0) for _ in range(3)]

        assert more == [True, True, False]
        assert len(cluster.deleted) == 5


def test_gateways_that_delete_orphans_at_once_take_some_each_and_not_the_same_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.logs.store.ORPHANS_PER_ROUND_MAX", 10)

    async def main() -> list[set[int]]:
        async with a_cluster() as (_, (one, two)):
            for _ in range(200):
                await two.create(_options())
            taken: list[set[int]] = [set(), set()]
            for gateway, mine in zip((one, two), taken, strict=True):

                async def take(ledger_id: int, mine: set[int] = mine) -> None:
                    mine.add(ledger_id)

                monkeypatch.setattr(gateway.logs.orphans, "delete", take)
                assert await gateway.logs.orphans.delete_some(older_than_s=0), "there are more"
            return taken

    mine, others = run_virtual(main, seed=1)
    assert len(mine) == len(others) == 10
    assert len(mine & others) < 5


@in_virtual_time(seed=0)
async def test_logs_are_swept_while_the_deletion_of_orphans_takes_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(SETTINGS, retention_bytes=1)
    async with a_cluster(settings=settings) as (cluster, (one, two)):
        for value in "abc":
            await one.logs.append("log", call(value))
            await one.logs.roll("log")
        await two.create(_options())
        is_stuck = asyncio.Event()

        async def never(_ledger_id: int) -> LedgerMetadata:
            is_stuck.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(one, "recover", never)
        one.logs.times = replace(one.logs.times, orphans_every_s=1.0, orphan_age_s=0.0)
        sweep = Sweep(one.logs, Store(one))
        tasks = [asyncio.create_task(sweep.run()), asyncio.create_task(sweep.run_orphans())]
        await is_stuck.wait()

        await until(lambda: cluster.logs["log"].first_offset == 2, "the retention goes on")
        for task in tasks:
            task.cancel()


async def test_a_truncation_looks_at_no_orphan_of_another_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as (cluster, (one, two)):
        for value in "ab":
            await one.logs.append("log", call(value))
            await one.logs.roll("log")
        for _ in range(5):
            other = await two.create(options_of(LogMetadata("other", SETTINGS)))
            cluster.places[other.ledger_id] = 0
        looked: list[int] = []
        existing = one.existing

        async def look(ledger_ids: Sequence[int]) -> Sequence[LedgerMetadata]:
            looked.extend(ledger_ids)
            return await existing(ledger_ids)

        monkeypatch.setattr(one, "existing", look)
        monkeypatch.setattr(one.logs.orphans, "_delete", _nothing)
        await one.logs.truncate("log", 1)
        looked.clear()
        await one.logs.truncate("log", 1)

        assert len({*looked}) == 1, "the ledger that the first truncation let go of"


async def _nothing(*_: object) -> None:
    pass


@in_virtual_time(seed=0)
async def test_a_roll_by_time_comes_with_the_sweep_of_the_owner() -> None:
    settings = LogSettings(Quorum(3, 3, 2), roll_bytes=0, roll_seconds=3600)
    async with a_cluster(settings=settings) as (cluster, (one, _two)):
        await one.logs.append("log", Append.of(records("a")))
        await asyncio.sleep(3590)
        await sweep_of(one).sweep_logs()
        await asyncio.sleep(1)
        assert len(cluster.logs["log"].items) == 1
        await asyncio.sleep(10)

        await sweep_of(one).sweep_logs()

        await until(lambda: len(cluster.logs["log"].items) == 2, "the log has rolled")


def _options() -> LedgerOptions:
    return options_of(LogMetadata("log", SETTINGS))


def test_a_log_that_nobody_asks_for_is_sealed_within_ten_seconds_of_its_owner_s_death() -> None:
    async def main() -> float:
        async with a_cluster(seed=3) as (cluster, (one, two)):
            sweep = asyncio.create_task(Sweep(two.logs, Store(two)).run())
            await one.logs.append("log", Append.of(records("a")))
            died_s = asyncio.get_running_loop().time()
            one.kill()
            await until(lambda: cluster.logs["log"].end_offset is not None, "it is sealed")
            sweep.cancel()
            return asyncio.get_running_loop().time() - died_s

    assert run_virtual(main, seed=3) < 10


@in_virtual_time(seed=4)
async def test_a_ledger_that_was_made_for_a_log_by_a_gateway_that_died_is_deleted() -> None:
    async with a_cluster(seed=4) as (cluster, (one, two)):
        await one.logs.append("log", Append.of(records("a")))
        # It dies between creating a ledger and naming it: nobody else knows of that.
        left = await one.create(_options())
        one.kill()
        sweep = asyncio.create_task(Sweep(two.logs, Store(two)).run_orphans())
        await until(lambda: left.ledger_id not in cluster.ledgers, "it is deleted", 1000)
        sweep.cancel()
        assert await contents(two) == ["a"]
        assert len(cluster.ledgers) == 1


async def test_the_retention_of_a_protected_log_goes_on() -> None:
    async with a_cluster() as (_, (one, _two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        await one.logs.change("log", {}, deletion_protection=True)

        with pytest.raises(LogProtected):
            await one.logs.truncate("log", 1)
        assert (await one.logs.retain("log", lambda _row: 1)).log.first_offset == 1


class Watching:
    """A gateway's sweep over 30 logs of its own and of another gateway, and what it asks the database."""

    def __init__(self, cluster: Cluster, mine: Gateway, other: Gateway) -> None:
        self.cluster, self.mine, self.other = cluster, mine, other
        self.sweep = sweep_of(mine)
        self.asked: list[str] = []
        store = cast(Any, self.sweep._store)
        get, everything = store.get, store.list

        async def counted_get(name: str) -> LogMetadata:
            self.asked.append(name)
            return cast(LogMetadata, await get(name))

        async def counted_list(**of: Any) -> Any:
            self.asked.append("clock" if of == {"limit": 1} else "all")
            return await everything(**of)

        store.get, store.list = counted_get, counted_list

    async def swept(self) -> list[str]:
        """The requests to the database of one round of the sweep."""
        self.asked.clear()
        await self.sweep.sweep_logs()
        return list(self.asked)


@contextlib.asynccontextmanager
async def watching(*, settings: LogSettings = SETTINGS, count: int = 30) -> AsyncIterator[Watching]:
    async with a_cluster(settings=settings) as (cluster, (one, two)):
        for number in range(count):
            gateway = (one, two)[number % 2]
            await gateway.logs.put(f"log-{number:02}", settings)
            await gateway.logs.append(f"log-{number:02}", call("a"))
        watch = Watching(cluster, one, two)
        assert await watch.swept() == ["all"]
        yield watch


@pytest.mark.parametrize("count", [10, 100])
async def test_a_sweep_asks_the_database_for_the_time_alone_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    async with watching(count=count) as watch:
        questions: list[None] = []
        ask = watch.mine.ask

        async def counted() -> None:
            questions.append(None)
            await ask()

        monkeypatch.setattr(watch.mine, "ask", counted)
        for _ in range(10):
            assert await watch.swept() == ["clock"]

        assert len(questions) == 10


async def test_a_sweep_reads_only_logs_that_have_changed_or_were_created_or_deleted() -> None:
    async with watching() as watch:
        await watch.other.logs.roll("log-01")
        assert await watch.swept() == ["log-01"]
        await watch.other.logs.put("new", SETTINGS)
        await watch.other.logs.delete("log-03")
        assert await watch.swept() == ["log-03", "new"]
        assert await watch.swept() == ["clock"]


async def test_an_owner_hears_by_the_sweep_that_another_gateway_has_its_log() -> None:
    async with watching() as watch:
        await watch.other.take_over("log-00")
        assert watch.mine.logs.is_owned("log-00")

        assert await watch.swept() == ["log-00"]

        assert not watch.mine.logs.is_owned("log-00")


@in_virtual_time(seed=0)
@pytest.mark.parametrize("is_cut_off", [True, False])
async def test_a_lost_notification_is_made_good(is_cut_off: bool) -> None:
    """After a gap by the next sweep; without a gap, so by a defect, when all logs are read again."""
    async with watching() as watch:
        times = watch.mine.logs.times
        rounds = asyncio.create_task(watch.sweep.run())
        await asyncio.sleep(times.sweep_every_s)
        if is_cut_off:
            watch.mine.cut_off(1.0, asks=True, hears=False)
            await asyncio.sleep(0.5)
            await watch.other.take_over("log-00")
            bound_s = 1.0 + times.sweep_every_s
        else:
            heard = watch.mine.logs.rows
            cast(Any, heard).heard = lambda _name: None
            await watch.other.take_over("log-00")
            bound_s = times.sweep_all_every_s + times.sweep_every_s
        assert watch.mine.logs.is_owned("log-00")

        await asyncio.sleep(bound_s + 1.0)

        rounds.cancel()
        assert not watch.mine.logs.is_owned("log-00")


async def test_logs_whose_writer_died_are_sealed_though_their_rows_stay_as_they_are() -> None:
    async with watching() as watch:
        watch.other.kill()

        await watch.swept()

        ends = [row.end_offset for _, row in sorted(watch.cluster.logs.items())]
        assert ends.count(1) == len(ends) // 2


async def test_a_sealed_logs_records_go_by_age_though_its_row_stays_as_it_is() -> None:
    settings = replace(SETTINGS, retention_seconds=3600)
    async with watching(settings=settings) as watch:
        for value in "bc":
            await watch.mine.logs.roll("log-00")
            await watch.mine.logs.append("log-00", call(value))
        await watch.swept()
        assert await watch.swept() == ["clock"]

        watch.cluster.ahead_ms = 2 * 3600 * 1000
        assert await watch.swept() == ["log-00"]

        assert watch.cluster.logs["log-00"].first_offset == 2


async def test_a_log_that_could_not_be_swept_is_swept_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watching(settings=replace(SETTINGS, retention_bytes=1)) as watch:

        async def fails(*_: Any) -> None:
            raise EntryUnavailable

        for value in "bc":
            await watch.mine.logs.roll("log-00")
            await watch.mine.logs.append("log-00", call(value))
        monkeypatch.setattr(watch.mine.logs, "retain", fails)
        for _ in range(2):
            assert await watch.swept() == ["log-00"]
        monkeypatch.undo()

        assert await watch.swept() == ["log-00"]

        assert watch.cluster.logs["log-00"].first_offset > 0


async def test_a_log_rolls_by_time_though_its_row_stays_as_it_is() -> None:
    async with watching(settings=replace(SETTINGS, roll_seconds=3600)) as watch:
        owner = watch.mine.logs.ownership.owner("log-00")
        assert owner is not None
        ledger_id = owner.ledger_id
        await watch.swept()
        assert owner.ledger_id == ledger_id
        owner._pipe.since_s -= 3600

        assert await watch.swept() == ["clock"]

        await until(lambda: owner.ledger_id != ledger_id, "the log rolls")


async def test_when_many_logs_have_changed_a_sweep_reads_them_in_one_list() -> None:
    async with watching() as watch:
        for number in range(1, 9, 2):
            await watch.other.logs.roll(f"log-{number:02}")
        assert await watch.swept() == ["all"]
        assert await watch.swept() == ["clock"]


async def test_beyond_the_bound_of_announced_logs_a_sweep_reads_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "HEARD_MAX", 1)
    async with watching() as watch:
        await watch.other.logs.roll("log-01")
        assert await watch.swept() == ["log-01"]
        for name in ("log-03", "log-05"):
            await watch.other.logs.roll(name)
        assert await watch.swept() == ["all"]
