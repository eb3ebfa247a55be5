"""Cached rows: no answer makes them older, and after a gap in the news all are read again."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import NOT_DONE, UNKNOWN, DatabaseWentBack, MetadataUnavailable, NoSuchLedger
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import HEADS_MAX
from services.gateway.engine import rows as rows_module
from services.gateway.engine.rows import LedgerRows, Rereads
from tests.support.virtual import in_virtual_time
from tests.support.waiting import until
from tests.unit.gateway.engine.hands import ROW, Failing, Primary, rows_of
from tests.unit.gateway.engine.hands import closed as closed_at
from tests.unit.metadata.support import DRAFT, Service, serving, swapped


class LateAnswers(MetadataClient):
    """Its answers to reads wait until they may come."""

    def __init__(self, url: str) -> None:
        super().__init__([url])
        self.read_at: list[int] = []
        self.comes = asyncio.Event()

    async def get(self, ledger_id: int, **how: Any) -> LedgerMetadata:
        """The row as it was when it was asked for."""
        row = await super().get(ledger_id, **how)
        self.read_at.append(row.version)
        await self.comes.wait()
        return row


async def closed(service: Service, row: LedgerMetadata) -> None:
    """The ledger ends, in two changes."""
    recovering = await swapped(service.client, row.in_recovery())
    await service.client.cas(recovering.closed(last_entry=-1, length=0))


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_change_overtaking_an_answer_is_stale(stores: Stores, *, is_known: bool) -> None:
    async with serving(stores) as service:
        row = await service.client.create(DRAFT)
        late = LateAnswers(service.url)
        ended: set[int] = set()
        rows = LedgerRows(late, lambda _ledger: None, ended.add)
        if is_known:
            late.comes.set()
            await rows.fresh(row.ledger_id)
            late.comes.clear()
        following = asyncio.ensure_future(rows.follow())

        async def is_followed() -> bool:
            await closed(service, await service.client.create(DRAFT))
            return bool(ended)

        await until(is_followed, "the changes are followed")
        asked = asyncio.ensure_future(rows.fresh(row.ledger_id))
        await until(lambda: len(late.read_at) > is_known, "the row is read")

        await closed(service, row)
        await until(lambda: row.ledger_id in ended, "the news has come")
        following.cancel()
        late.comes.set()

        try:
            assert (await asked).state is State.OPEN
            assert (await rows.row(row.ledger_id)).state is State.CLOSED
        finally:
            await late.close()


class Slow(Primary):
    """Its answers wait until they may come."""

    def __init__(self, row: LedgerMetadata) -> None:
        super().__init__(row)
        self.comes = asyncio.Event()

    async def get(self, ledger_id: int) -> LedgerMetadata:
        row = await super().get(ledger_id)
        await self.comes.wait()
        return row


class Missing(Primary):
    """A database without the row."""

    is_deleted = False

    async def get(self, _ledger_id: int) -> LedgerMetadata:
        raise NoSuchLedger(ledger_id=ROW.ledger_id, deleted=self.is_deleted)


async def test_the_outcome_of_a_close_is_not_told_by_a_row_from_before_the_close() -> None:
    """Rule 18a: the database may have gone back between the close and the read."""
    for older in (ROW, ROW.in_recovery()):
        with pytest.raises(DatabaseWentBack):
            await rows_of(Primary(older)).fresh_closed(ROW.ledger_id)
    with pytest.raises(DatabaseWentBack):
        await rows_of(Missing(ROW)).fresh_closed(ROW.ledger_id)

    assert await rows_of(Primary(closed_at(3))).fresh_closed(ROW.ledger_id) == closed_at(3)
    deleted = Missing(ROW)
    deleted.is_deleted = True
    with pytest.raises(NoSuchLedger):
        await rows_of(deleted).fresh_closed(ROW.ledger_id)


async def test_a_tombstone_beyond_the_bound_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_ROWS_MAX", 1)
    missing = Missing(ROW)
    missing.is_deleted = True
    rows = rows_of(missing)
    rows.deleted(ROW.ledger_id)
    rows.deleted(1 << 40)
    assert not rows.is_deleted(ROW.ledger_id)

    with pytest.raises(NoSuchLedger) as reported:
        await rows.row(ROW.ledger_id)
    assert reported.value.members["deleted"] is True


async def test_a_row_asked_for_before_its_end_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tombstone is remembered no more when the answer comes."""
    monkeypatch.setattr(rows_module, "_ROWS_MAX", 1)
    slow = Slow(ROW)
    rows = rows_of(slow)
    asked = asyncio.ensure_future(rows.fresh(ROW.ledger_id))
    await until(lambda: slow.reads == 1, "the row is read")
    rows.deleted(ROW.ledger_id)
    rows.deleted(1 << 40)
    slow.comes.set()
    await asked

    await rows.row(ROW.ledger_id)

    assert slow.reads == 2


async def test_a_row_beyond_the_bound_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_ROWS_MAX", 1)
    primary = Primary(ROW)
    rows = rows_of(primary)
    rows.put(ROW)
    rows.put(replace(ROW, ledger_id=ROW.ledger_id + 1))
    assert rows.cached(ROW.ledger_id) is None

    assert await rows.row(ROW.ledger_id) == ROW
    assert primary.reads == 1


async def test_what_clients_keep_in_rows_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_TEXT_BYTES_MAX", 1000)
    rows = rows_of(Primary(ROW))
    text = (("key", "x" * 297),)

    for ledger_id in range(1, 6):
        rows.put(replace(ROW, ledger_id=ledger_id, custom=text))
    rows.put(replace(ROW, ledger_id=5, version=ROW.version + 1, custom=text))
    rows.deleted(4)
    rows.put(replace(ROW, ledger_id=6, custom=text))
    rows.put(replace(ROW, ledger_id=7))

    cached = [ledger_id for ledger_id in range(1, 8) if rows.cached(ledger_id) is not None]
    assert cached == [3, 5, 6, 7]


async def test_a_deletion_is_told_only_if_the_database_has_it_once_members_know() -> None:
    """Rule 18e: its answer may be of a database that was lost before members were told."""
    tombstone = NoSuchLedger("the ledger was deleted", ledger_id=7, deleted=True)
    await rows_of(Failing(tombstone)).require_deleted(7)

    for lost in (Failing(NoSuchLedger("never", ledger_id=7)), Primary(closed_at(0))):
        with pytest.raises(DatabaseWentBack) as error:
            await rows_of(lost).require_deleted(7)
        assert error.value.outcome == UNKNOWN
    with pytest.raises(MetadataUnavailable) as away:
        await rows_of(Failing(MetadataUnavailable(outcome=NOT_DONE))).require_deleted(7)
    assert away.value.outcome == UNKNOWN


SOON_S = 60.0


class Heads:
    """Answers with what it was asked for, or fails as often as it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.failures: list[Exception] = []
        self.lost: set[int] = set()
        self.answers = asyncio.Event()
        self.answers.set()

    async def heads(self, keys: Sequence[int]) -> Mapping[int, int]:
        self.asked.append(list(keys))
        await self.answers.wait()
        if self.failures:
            raise self.failures.pop()
        return {key: key for key in keys if key not in self.lost}


@contextmanager
def running(rereads: Rereads[int]) -> Iterator[None]:
    task = asyncio.create_task(rereads.run())
    try:
        yield
    finally:
        task.cancel()


@in_virtual_time(seed=0)
async def test_every_row_is_reread_once_and_in_bulk() -> None:
    primary, learned = Heads(), list[int]()
    keys = range(2 * HEADS_MAX + 1)
    rereads = Rereads[int](lambda: keys, primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == list(keys)
    assert [len(asked) for asked in primary.asked] == [HEADS_MAX, HEADS_MAX, 1]
    assert rereads.waiting == 0


@in_virtual_time(seed=0)
async def test_rows_are_requested_until_answered_whatever_fails() -> None:
    primary, learned = Heads(), list[int]()
    primary.failures = [RuntimeError("a defect"), MetadataUnavailable(), MetadataUnavailable()]
    rereads = Rereads[int](lambda: (1, 2), primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == [1, 2]
    assert primary.asked == [[1, 2]] * 4


@in_virtual_time(seed=0)
async def test_a_row_whose_answer_a_gap_overtook_is_requested_again() -> None:
    primary, learned = Heads(), list[int]()
    rereads = Rereads[int](lambda: (1, 2), primary.heads, learned.append)
    with running(rereads):
        primary.answers.clear()
        rereads.want(1)
        await asyncio.sleep(SOON_S)
        rereads.gap()
        primary.answers.set()
        await asyncio.sleep(SOON_S)

    assert primary.asked == [[1], [1, 2]]
    assert learned == [1, 1, 2]


@in_virtual_time(seed=0)
async def test_without_live_keys_no_row_is_requested() -> None:
    primary = Heads()
    rereads = Rereads[int](lambda: (), primary.heads, lambda _head: None)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert primary.asked == []
    assert rereads.gaps == 1


@in_virtual_time(seed=0)
async def test_a_missing_row_is_logged_and_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    primary, learned = Heads(), list[int]()
    primary.lost = {2}
    rereads = Rereads[int](lambda: (1, 2, 3), primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == [1, 3]
    assert rereads.waiting == 0

    (reported,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (reported.message, reported.__dict__["rows"]) == ("rows-missing", [2])
