"""A client's request is carried out once, whichever copy of it comes when (rule 6a)."""

import asyncio
from dataclasses import replace

import pytest

from quorumlog.errors import InvalidRequest, NoSuchLog
from quorumlog.net.gateway_clients import LogClient
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from tests.support.once import once
from tests.unit.metadata.support import DRAFT, Service, swapped

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))
ASKED = once("a request", "keep a week")


@pytest.fixture
def logs(service: Service) -> LogClient:
    return LogClient(service.client)


def keeping(log: LogMetadata, seconds: int) -> LogMetadata:
    return log.with_limits({"retention_seconds": seconds})


async def changed(logs: LogClient, row: LogMetadata, by: Once | None = None) -> LogMetadata:
    done, now = await logs.cas(row, once=by)
    assert done
    return now


async def test_a_late_copy_of_a_change_is_told_done_and_changes_nothing(logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    week = await changed(logs, keeping(row, 7), ASKED)
    ever = await changed(logs, keeping(week, 0))

    late = await changed(logs, keeping(ever, 7), ASKED)

    assert late == ever == await logs.get("a-log")
    assert await logs.is_done(ASKED)
    assert not await logs.is_done(once("another request"))


async def test_a_change_that_was_refused_may_come_again(logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    await changed(logs, keeping(row, 1))

    assert (await logs.cas(keeping(row, 7), once=ASKED))[0] is False

    assert not await logs.is_done(ASKED)
    now = await changed(logs, keeping(await logs.get("a-log"), 7), ASKED)
    assert now.settings.retention_seconds == 7


async def test_a_name_with_another_request_is_refused(service: Service, logs: LogClient) -> None:
    other = once("a request", "keep a day")
    row, _ = await logs.create(LOG)
    row = await changed(logs, keeping(row, 7), ASKED)

    with pytest.raises(InvalidRequest) as refused:
        await logs.cas(keeping(row, 1), once=other)
    with pytest.raises(InvalidRequest):
        await logs.is_done(other)
    with pytest.raises(InvalidRequest):
        await service.client.create(DRAFT, once=other)

    assert refused.value.members["errors"][0]["pointer"] == "/header/Idempotency-Key"
    assert await logs.get("a-log") == row


@pytest.mark.parametrize("was_there", [False, True], ids=["it made the log", "the log was there"])
async def test_a_late_creation_brings_no_log_back(logs: LogClient, *, was_there: bool) -> None:
    if was_there:
        await logs.create(LOG)
    row, is_new = await logs.create(LOG, once=ASKED)
    assert is_new is not was_there
    assert await logs.create(LOG, once=ASKED) == (row, False)
    await logs.delete(row)

    with pytest.raises(NoSuchLog):
        await logs.create(LOG, once=ASKED)

    with pytest.raises(NoSuchLog):
        await logs.get("a-log")


async def test_copies_of_a_creation_that_come_at_once_make_one_ledger(service: Service) -> None:
    copies = (service.client.create(DRAFT, once=ASKED) for _ in range(8))
    first, *others = await asyncio.gather(*copies)

    assert set(others) == {first}
    assert first == await service.client.create(DRAFT, once=ASKED)
    page, _ = await service.client.list()
    assert len(page) == 1


async def test_a_late_copy_of_a_ledgers_change_changes_nothing(service: Service) -> None:
    row = await service.client.create(DRAFT)
    first = await swapped(service.client, row.in_recovery(), once=ASKED)
    closed = replace(first, attempt="").closed(last_entry=4, length=40)

    assert await service.client.cas(closed, once=ASKED) == (CasStatus.OK, first)

    assert await service.client.get(row.ledger_id) == first
