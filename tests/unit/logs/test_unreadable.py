"""What can't be read in the middle of a log does not withhold the records before it."""

import asyncio
from typing import Any

import pytest

from quorumlog.errors import EntryUnavailable, NoSuchLedger
from quorumlog.protocol.batch import BATCH_BYTES_MAX, Record
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from tests.model.logs.model import Cluster, Gateway
from tests.support.waiting import within

LOG = "log"


async def filled(*values: bytes) -> tuple[Cluster, Gateway, int]:
    """A log with one batch for each value, and the ledger that has them."""
    cluster = Cluster(1)
    gateway = cluster.gateway()
    await gateway.logs.put(LOG, LogSettings(Quorum.of(3, 3, 2)))
    done = [await gateway.logs.append(LOG, Append.of((Record(value),))) for value in values]
    return cluster, gateway, done[0].ledger_id


async def test_a_damaged_batch_ends_the_page_before_it_and_is_told_by_its_offset() -> None:
    async with within("the log is read"):
        cluster, gateway, ledger_id = await filled(b"a", b"b", b"c")
        cluster.ledger(ledger_id).entries[1] = b"no batch"
        read = gateway.logs.reader.read

        page = await read(LOG, "earliest")
        with pytest.raises(EntryUnavailable) as reported:
            await read(LOG, page.next)
        await gateway.end()

    assert page.next == 1
    assert (reported.value.log, reported.value.members["offset"]) == (LOG, 1)
    assert "from offset 1 on" in reported.value.detail


async def test_bookies_that_are_silent_at_one_batch_withhold_nothing_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with within("the log is read"):
        _, gateway, _ = await filled(b"a" * 700, b"b" * 700, b"c")
        reads = gateway.logs.reader._reads
        found = reads.read

        async def read(ledger_id: int, first: int, **limits: Any) -> object:
            if first == 1 and limits.get("limit") != 1:
                raise EntryUnavailable("confirmed up to 9", ledger_id=ledger_id, entry_id=first)
            return await found(ledger_id, first, **limits)

        monkeypatch.setattr(reads, "read", read)
        page = await gateway.logs.reader.read(LOG, 0, max_bytes=1000)
        with pytest.raises(EntryUnavailable, match="records from offset 1 on"):
            await gateway.logs.reader.read(LOG, page.next)
        await gateway.end()

    assert [each.record.value for each in page.records] == [b"a" * 700]


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_ledger_without_a_row_is_told_by_its_first_offset_and_not_skipped(
    monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    async with within("the log is read"):
        cluster, gateway, first = await filled(b"a", b"b")
        await gateway.logs.roll(LOG)
        hole = (await gateway.logs.append(LOG, Append.of((Record(b"c"),)))).ledger_id
        if is_sealed:
            await gateway.logs.roll(LOG)
            await gateway.logs.append(LOG, Append.of((Record(b"d"),)))
        gateway.logs.rows._rows.clear()
        found = cluster.ledger

        def ledger(ledger_id: int) -> object:
            if ledger_id == hole:
                raise NoSuchLedger(ledger_id=hole, deleted=False)
            return found(ledger_id)

        monkeypatch.setattr(cluster, "ledger", ledger)
        page = await gateway.logs.reader.read(LOG, "earliest")
        with pytest.raises(EntryUnavailable) as reported:
            await gateway.logs.reader.read(LOG, page.next)
        await gateway.end()

    assert hole != first
    assert [each.record.value for each in page.records] == [b"a", b"b"]
    assert (reported.value.ledger_id, reported.value.members["offset"]) == (hole, 2)
    assert "from offset 2 on" in reported.value.detail


async def test_headers_count_in_a_page_and_one_record_always_comes() -> None:
    async with within("the log is read"):
        cluster = Cluster(1)
        gateway = cluster.gateway()
        await gateway.logs.put(LOG, LogSettings(Quorum.of(3, 3, 2)))
        large = tuple((f"h{n}", "x" * 60_000) for n in range(BATCH_BYTES_MAX // 70_000))
        await asyncio.gather(
            *(gateway.logs.append(LOG, Append.of((Record(b"v", None, large),))) for _ in range(3))
        )

        page = await gateway.logs.reader.read(LOG, 0, max_bytes=1 << 20)
        await gateway.end()

    assert len(page.records) == 1


async def test_a_log_whose_last_ledger_has_no_row_takes_nothing_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 18f: its next owner would give the offsets of that ledger to other records. A rebuild closes the hole."""
    async with within("the log is asked"):
        cluster, gateway, ledger_id = await filled(b"a")
        gateway.kill()
        other = cluster.gateway()
        hole = cluster.ledgers.pop(ledger_id)

        async def recover(_ledger_id: int) -> object:
            raise NoSuchLedger("there is no such ledger", ledger_id=ledger_id, deleted=False)

        with monkeypatch.context() as patch:
            patch.setattr(other, "recover", recover)
            patch.setattr(other, "get", recover)
            with pytest.raises(
                EntryUnavailable, match="run `quorumlog metadata rebuild`"
            ) as reported:
                await other.logs.append(LOG, Append.of((Record(b"b"),)))
        row = cluster.logs[LOG]
        cluster.ledgers[ledger_id] = hole
        done = await other.logs.append(LOG, Append.of((Record(b"b"),)))
        await other.end()
        await gateway.end()

    assert reported.value.outcome == "not-done"
    assert reported.value.ledger_id == ledger_id
    assert [item.ledger_id for item in row.items] == [ledger_id]
    assert done.first_offset == 1
