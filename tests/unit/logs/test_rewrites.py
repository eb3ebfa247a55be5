"""Merges of a log's ledgers through a gateway: who merges, what readers see, and what is deleted when (rule 27c)."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import (
    EntryUnavailable,
    NotEnoughBookies,
    OwnedByLog,
    QuorumLogError,
    WriterLost,
)
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import RewriteDone
from quorumlog.protocol.log.rewrite import Rewrite
from quorumlog.protocol.metadata import Lineage, State
from services.gateway.interface import LedgerOptions
from services.gateway.logs import rewrites, store, sweep
from services.gateway.logs.driver import options_of
from services.gateway.logs.store import RECENT_S
from services.gateway.logs.sweep import Sweep
from tests.model.logs.model import Cluster, Gateway, Store
from tests.support.waiting import until
from tests.unit.logs.test_manager import SETTINGS, a_cluster, call, contents

VALUES = [f"{number}" for number in range(12)]


async def filled(gateway: Gateway, values: Sequence[str] = VALUES) -> LogMetadata:
    """A log with a ledger for each value, and the last one open."""
    for value in values:
        await gateway.logs.append("log", call(value))
        await gateway.logs.roll("log")
    return gateway.cluster.logs["log"]


async def swept(gateway: Gateway) -> None:
    await Sweep(gateway.logs, Store(gateway)).sweep_logs()


def ids(cluster: Cluster) -> list[int]:
    return [item.ledger_id for item in cluster.logs["log"].items]


async def test_the_sweep_of_the_owner_merges_small_ledgers() -> None:
    async with a_cluster() as (cluster, (one, two)):
        row = await filled(one)
        old = [item.ledger_id for item in row.items[:-1]]

        await swept(two)
        assert two.logs.rewrites._merging is None, "it does not own the log"
        await swept(one)
        await until(lambda: len(ids(cluster)) == 2, "the ledgers are merged")
        await until(lambda: {*old} <= cluster.deleted.keys(), "the old ones are deleted")

        merged, last = cluster.logs["log"].items
        assert (merged.first_offset, merged.last_offset, merged.replaced) == (0, 11, 12)
        assert last == row.items[-1]
        for gateway in (one, two):
            assert await contents(gateway) == VALUES
        assert (one.logs.rewrites.done, one.logs.rewrites.bytes) == (1, merged.bytes)
        await one.logs.append("log", call("more"))
        assert one.logs.ownership.owned == ["log"], "without a takeover"


async def test_a_log_whose_retention_always_has_something_to_release_is_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "retained_from", lambda _row, **_: 1)
    async with a_cluster() as (cluster, (one, _)):
        await filled(one)

        await swept(one)

        assert cluster.logs["log"].first_offset == 1, "the retention released something"
        await until(lambda: len(ids(cluster)) == 2, "the ledgers are merged")


async def test_a_merge_reads_the_logs_metadata_once_to_delete_the_old_ledgers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as (cluster, (one, _)):
        done, old = await undeleted(one, VALUES)
        reads: list[str] = []
        get = one.logs.orphans._store.get

        async def count(name: str, known: LogMetadata | None = None) -> LogMetadata:
            reads.append(name)
            return await get(name, known)

        monkeypatch.setattr(one.logs.orphans._store, "get", count)
        await one.logs.orphans.drop([*old])

        assert reads == [done.name]
        assert old <= cluster.deleted.keys()


async def test_an_orphan_that_never_had_a_place_is_deleted_without_the_logs_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transactions leave thousands of them."""
    async with a_cluster() as (cluster, (one, two)):
        row = await filled(one, ["a"])
        orphan = await one.create(options_of(row))

        async def read(_name: str, _known: LogMetadata | None = None) -> LogMetadata:
            raise AssertionError

        monkeypatch.setattr(two.logs.orphans._store, "get", read)
        await two.logs.orphans.delete(orphan.ledger_id)

        assert orphan.ledger_id in cluster.deleted


async def test_a_place_that_cant_be_kept_is_asked_for_once_for_all_old_ledgers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time may take as long as a timeout."""
    async with a_cluster() as (cluster, (one, _)):
        _, old = await undeleted(one, VALUES)
        asked: list[int] = []

        async def unkept(ledger_id: int) -> None:
            asked.append(ledger_id)
            raise EntryUnavailable(ledger_id=ledger_id)

        monkeypatch.setattr(one, "keep_place", unkept)
        await one.logs.orphans.drop([*old])

        assert len(asked) == 1
        assert old <= cluster.ledgers.keys()


async def test_a_log_whose_merges_are_off_stays_as_it_is() -> None:
    async with a_cluster(settings=replace(SETTINGS, merge_below_bytes=0)) as (cluster, (one, _)):
        row = await filled(one)

        await swept(one)

        assert one.logs.rewrites._merging is None
        await one.logs.change("log", {"merge_below_bytes": 1 << 20})
        await swept(one)
        await until(lambda: len(ids(cluster)) == 2, "the ledgers are merged")
        assert cluster.logs["log"].items[-1] == row.items[-1]


async def test_one_gateway_merges_a_log_that_nobody_writes() -> None:
    async with a_cluster(gateways=3) as (cluster, gateways):
        await filled(gateways[0])
        await gateways[0].logs.close("log")

        for gateway in gateways:
            await swept(gateway)
        await until(lambda: len(ids(cluster)) == 2, "the ledgers are merged")
        await asyncio.sleep(0.1)

        assert sorted(gateway.logs.rewrites.done for gateway in gateways) == [0, 0, 1]
        assert len(cluster.ledgers) + len(cluster.deleted) == len(VALUES) + 1 + 1
        assert await contents(gateways[0]) == VALUES


async def test_a_reader_in_the_middle_of_an_old_ledger_goes_on() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a", "b", "c", "d"))
        await one.logs.roll("log")
        row = await filled(one, ["e", "f"])
        page = await two.logs.reader.read("log", 0, limit=2)
        assert [record.ledger_id for record in page.records] == [row.items[0].ledger_id] * 2

        done = await one.logs.rewrites.rewrite(row, row.items[:2])

        assert isinstance(done.log, LogMetadata)
        assert not {row.items[0].ledger_id, row.items[1].ledger_id} & cluster.ledgers.keys()
        rest = await two.logs.reader.read("log", page.next, created_at=page.created_at)
        assert [record.record.value for record in rest.records][:2] == [b"c", b"d"]
        assert await contents(two, page.next) == ["c", "d", "e", "f"]
        await asyncio.sleep(1.5 * RECENT_S)
        later = await two.logs.reader.read("log", page.next, created_at=page.created_at)
        assert later.records[0].ledger_id == done.log.items[0].ledger_id


async def test_two_rewrites_of_the_same_ledgers_leave_one_ledger() -> None:
    async with a_cluster() as (cluster, (one, two)):
        row = await filled(one, ["a", "b", "c"])

        done = await asyncio.gather(
            one.logs.rewrites.rewrite(row, row.items[:3]),
            two.logs.rewrites.rewrite(row, row.items[:2]),
        )

        assert [isinstance(each.log, LogMetadata) for each in done].count(True) == 1
        assert await contents(two) == ["a", "b", "c"]
        named = {item.ledger_id for item in cluster.logs["log"].items}
        await until(lambda: cluster.ledgers.keys() == named, "the others are deleted")


async def test_a_forks_ledgers_outlive_a_rewrite_and_its_own_are_rewritten() -> None:
    async with a_cluster() as (cluster, (one, _)):
        row = await filled(one, ["a", "b", "c", "d"])
        fork, _ = await one.logs.fork(one.logs.draft("fork", row.settings), row, 2)

        await one.logs.rewrites.rewrite(row, row.items[:4])

        kept = [item.ledger_id for item in row.items[:2]]
        assert [ledger_id in cluster.ledgers for ledger_id in kept] == [True, True]
        assert row.items[2].ledger_id in cluster.deleted
        found = await one.contents("fork")
        assert [record.record.value for record in found] == [b"a", b"b"]
        assert not fork.names_sealed(fork.items[:2])
        await one.logs.delete("fork")
        await until(lambda: not {*kept} & cluster.ledgers.keys(), "nobody names them now")
        assert await contents(one) == ["a", "b", "c", "d"]


async def test_a_replaced_ledger_stays_until_bookies_know_what_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as (cluster, (one, two)):
        row = await filled(one, ["a", "b"])
        old = row.items[0].ledger_id

        async def unkept(ledger_id: int) -> None:
            raise EntryUnavailable(ledger_id=ledger_id)

        for gateway in (one, two):
            monkeypatch.setattr(gateway, "keep_place", unkept)
        await one.logs.rewrites.rewrite(row, row.items[:2])
        with pytest.raises(EntryUnavailable):
            await two.logs.orphans.delete(old)
        assert old in cluster.ledgers
        assert old not in cluster.told_deleted
        monkeypatch.undo()
        monkeypatch.setattr(store, "_KEPT_MAX", 1)

        two.logs.orphans._kept.add(-1)

        await two.logs.orphans.delete_some(older_than_s=0)

        assert old in cluster.deleted
        assert cluster.kept_places == two.logs.orphans._kept, "beyond the bound one is forgotten"


async def undeleted(gateway: Gateway, values: list[str]) -> tuple[LogMetadata, set[int]]:
    """The log after a rewrite of all but its last two ledgers, whose process ended before it
    deleted the old ones; and these.
    """
    row = await filled(gateway, values)
    items = row.items[:-2]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gateway.logs.orphans, "drop", _nothing)
        done = await gateway.logs.rewrites.rewrite(row, items)
    assert isinstance(done.log, LogMetadata)
    return done.log, {item.ledger_id for item in items}


async def _nothing(*_args: Any) -> None:
    """What a process that has ended does."""


async def test_a_truncation_releases_the_replaced_ledgers_too() -> None:
    """Else a rebuild would name them again, with the records that were truncated."""
    async with a_cluster() as (cluster, (one, two)):
        row, old = await undeleted(one, ["a", "b", "c", "d"])
        assert old <= cluster.ledgers.keys()

        await two.logs.truncate("log", 3)

        assert cluster.logs["log"].first_offset == 3
        assert {row.items[0].ledger_id} | old <= cluster.told_deleted
        assert {row.items[0].ledger_id} | old <= cluster.deleted.keys()
        assert await contents(one, 3) == ["d"]


async def test_a_truncation_releases_replaced_ledgers_that_a_rebuild_has_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep leaves them to an operator, so no list of orphans has them."""
    async with a_cluster() as (cluster, (one, two)):
        row, old = await undeleted(one, ["a", "b", "c", "d"])
        merged = cluster.ledgers[row.items[0].ledger_id]
        places = tuple((ledger_id, at) for at, ledger_id in enumerate(sorted(old)))
        merged.row = replace(merged.row, lineage=Lineage("", (), replaced=places))

        async def none(_name: str) -> list[int]:
            return []

        monkeypatch.setattr(two.logs._store, "placed_orphans", none)
        await two.logs.truncate("log", 3)

        assert {merged.row.ledger_id} | old <= cluster.told_deleted
        assert {merged.row.ledger_id} | old <= cluster.deleted.keys()
        assert not cluster.wrong_tombstones


async def test_a_truncation_that_releases_nothing_leaves_replaced_ledgers() -> None:
    """No bookie may know yet what has replaced them."""
    async with a_cluster() as (cluster, (one, two)):
        _, old = await undeleted(one, ["a", "b", "c", "d"])

        await two.logs.truncate("log", 0)

        assert not old & cluster.told_deleted
        assert old <= cluster.ledgers.keys()
        assert await contents(one) == ["a", "b", "c", "d"]


async def test_bookies_know_of_the_deletion_of_a_replaced_ledger_before_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a truncation finds no ledger to tell them of, and a rebuild finds this one."""
    async with a_cluster() as (cluster, (one, two)):
        _, old = await undeleted(one, ["a", "b", "c", "d"])

        async def ends(_ledger_id: int) -> None:
            raise WriterLost

        monkeypatch.setattr(two.logs.orphans._store, "delete_unnamed", ends)
        await two.logs.orphans.delete_some(older_than_s=0)

        assert old <= cluster.told_deleted
        assert old <= cluster.ledgers.keys()
        assert not cluster.wrong_tombstones


async def test_a_deleted_log_takes_the_replaced_ledgers_along() -> None:
    """Else a reader with older metadata finds the deleted log's records in them."""
    async with a_cluster() as (cluster, (one, two)):
        _, old = await undeleted(one, ["a", "b", "c", "d"])

        await two.logs.delete("log")

        assert old <= cluster.told_deleted
        assert not cluster.ledgers


async def test_the_ledger_of_a_rewrite_has_all_its_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that it replaces had them, and are deleted."""
    async with a_cluster() as (cluster, (one, _)):
        row = await filled(one, ["a", "b"])
        asked: list[bool] = []

        async def too_few(options: LedgerOptions) -> Any:
            asked.append(options.allow_degraded)
            raise NotEnoughBookies

        monkeypatch.setattr(one, "create", too_few)
        done = await one.logs.rewrites.rewrite(row, row.items[:2])

        assert isinstance(done.log, NotEnoughBookies)
        assert asked == [False]
        assert cluster.logs["log"] == row


async def test_a_ledger_that_the_log_names_is_no_orphan_whoever_asks() -> None:
    async with a_cluster() as (cluster, (one, _)):
        row = await filled(one, ["a"])

        with pytest.raises(OwnedByLog):
            await one.logs.orphans.delete(row.items[0].ledger_id)

        assert row.items[0].ledger_id in cluster.ledgers


async def test_ledgers_that_cant_be_rewritten_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "_SPOILED_MAX", 1)
    async with a_cluster() as (cluster, (one, _)):
        one.logs.rewrites._spoiled["another"] = {1}
        row = await filled(one)
        spoiled = cluster.ledgers[row.items[2].ledger_id]
        spoiled.row = replace(spoiled.row, may_lack_entries=True)

        for _ in range(2):
            await swept(one)
            one.logs.rows.gap()
            assert one.logs.rewrites._merging is not None
            await until(one.logs.rewrites._merging.done, "the merge ends")
            await asyncio.sleep(0)

        assert one.logs.rewrites._spoiled == {"log": {row.items[2].ledger_id}}
        assert ids(cluster)[:3] == [item.ledger_id for item in row.items[:3]]
        assert len(ids(cluster)) == 5
        assert await contents(one) == VALUES


async def test_a_rewrite_whose_machine_breaks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster() as (cluster, (one, _)):
        row = await filled(one, ["a", "b"])

        def breaks(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Rewrite, "_swap", breaks)
        done = await one.logs.rewrites.rewrite(row, row.items[:2])

        assert isinstance(done.log, QuorumLogError)
        assert cluster.logs["log"] == row


async def test_a_rewrite_that_is_cancelled_leaves_an_orphan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as (cluster, (one, two)):
        row = await filled(one, ["a", "b"])
        writes = asyncio.Event()

        async def hangs(*_: Any) -> None:
            writes.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(rewrites._RewriteDriver, "_write", hangs)
        task = asyncio.ensure_future(one.logs.rewrites.rewrite(row, row.items[:2]))
        await writes.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        new = max(cluster.ledgers)
        assert cluster.ledgers[new].row.state is State.OPEN

        await two.logs.orphans.delete_some(older_than_s=0)

        assert new in cluster.deleted
        assert cluster.logs["log"] == row


async def test_a_rewrite_takes_records_on_while_the_log_grows() -> None:
    """Batches of many sizes, with retries of producers afterwards."""
    async with a_cluster() as (cluster, (one, two)):
        for number in range(6):
            await one.logs.append("log", call(*"abc"[: number % 3 + 1], seq=number))
            await one.logs.roll("log")
        before = await contents(two)
        row = cluster.logs["log"]

        async def grow() -> None:
            for number in itertools.count(6):
                await one.logs.append("log", call(f"{number}", seq=number))
                if number == 12:
                    return

        done, _ = await asyncio.gather(one.logs.rewrites.rewrite(row, row.items[1:5]), grow())

        assert isinstance(done, RewriteDone)
        assert (await contents(two))[: len(before)] == before
        again = await two.logs.append("log", call(*"abc"[:2], seq=4))
        assert again.is_duplicate
        assert again.first_offset == row.items[4].first_offset
