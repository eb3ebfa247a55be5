"""Logs' rows: compare-and-swap, and which ledgers they may name (rule 22)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, LogProtected, NoSuchLedger, NoSuchLog, OwnedByLog
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.log import Expiry, LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import (
    PREDECESSORS_KEPT,
    DigestKind,
    LedgerMetadata,
    Lineage,
    Writer,
)
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of
from tests.support.database import connected
from tests.unit.metadata.support import DRAFT, Service, swapped

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))


@pytest.fixture
def logs(service: Service) -> LogClient:
    return LogClient(service.client)


async def ledger(service: Service, log: str | None = "a-log") -> LedgerMetadata:
    return await service.client.create(replace(DRAFT, log=log))


def first(log: LogMetadata, row: LedgerMetadata) -> LogMetadata:
    return replace(log, items=(LogItem(row.ledger_id, 0),))


def placed(
    row: LedgerMetadata, log: LogMetadata, at: int, *before: tuple[int, int]
) -> LedgerMetadata:
    """The row of a ledger that begins at an offset of the log, after these. `log`: as the change made it that placed it."""
    lineage = Lineage(log.created_at, before, placed_by=log.attempt)
    return replace(row, first_offset=at, lineage=lineage)


async def test_a_change_of_a_log_in_another_history_conflicts(service: Service) -> None:
    """Rule 18a."""
    logs = LogClient(service.client)
    row, _ = await logs.create(LOG)
    lost = replace(row, attempt=new_attempt())

    assert await logs.cas(replace(lost, forgotten_end=7)) == (False, row)

    done, now = await logs.cas(replace(row, forgotten_end=7))
    assert (done, now.version, now.attempt != row.attempt) == (True, 2, True)


async def test_a_deletion_by_a_row_of_another_history_is_refused(service: Service) -> None:
    """Rule 18a: what has the name and version now may be another log, whose writer lives (rule 27)."""
    logs = LogClient(service.client)
    row, _ = await logs.create(LOG)

    assert await logs.delete(replace(row, attempt=new_attempt())) == row
    assert await logs.get(LOG.name) == row

    assert await logs.delete(row) is None


async def test_a_log_is_created_once(logs: LogClient) -> None:
    answers = await asyncio.gather(*(logs.create(LOG) for _ in range(5)))

    assert sorted(made for _, made in answers) == [False] * 4 + [True]
    assert {row for row, _ in answers} == {await logs.get("a-log")}
    row = answers[0][0]
    assert replace(row, created_at="", attempt="") == LOG


async def test_of_concurrent_changes_one_wins(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    ledgers = [await ledger(service) for _ in range(5)]

    answers = await asyncio.gather(*(logs.cas(first(row, one)) for one in ledgers))

    winner = await logs.get("a-log")
    assert sorted(won for won, _ in answers) == [False] * 4 + [True]
    assert {now for _, now in answers} == {winner}
    assert winner.version == 2


async def test_every_log_row_has_the_databases_clock(
    service: Service, logs: LogClient, stores: Stores
) -> None:
    async def database_ms() -> float:
        async with connected(stores) as connection:
            now: datetime = await connection.fetchval("SELECT clock_timestamp()")
        return now.timestamp() * 1000

    assert logs.database_ms() is None
    row, _ = await logs.create(LOG)
    asked: tuple[Callable[[LogClient], Awaitable[object]], ...] = (
        lambda client: client.get("a-log"),
        lambda client: client.list(),
        lambda client: client.cas(row),
        lambda client: client.cas(row),  # a conflict
        lambda client: client.create(LOG),
    )
    for ask in asked:
        client = LogClient(service.client)
        before = await database_ms()
        await ask(client)
        reported = client.database_ms()
        assert reported is not None
        assert before - 1 <= reported <= await database_ms()


async def test_forgotten_end_never_decreases(logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    _, row = await logs.cas(replace(row, forgotten_end=7))

    with pytest.raises(InvalidRequest, match="forgotten_end"):
        await logs.cas(replace(row, forgotten_end=6))


async def test_a_log_names_only_ledgers_made_for_it(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    others = [await ledger(service, log=None), await ledger(service, log="other")]
    gone = await ledger(service)
    await logs.delete_unnamed(gone.ledger_id)

    for wrong in (*others, gone, replace(gone, ledger_id=12345)):
        with pytest.raises(InvalidRequest):
            await logs.cas(first(row, wrong))

    assert await logs.get("a-log") == row


async def test_a_ledger_that_a_log_names_is_not_deleted(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    one = await ledger(service)
    assert await logs.orphans(older_than_s=0) == (one.ledger_id,)

    _, named = await logs.cas(first(row, one))

    assert await logs.orphans(older_than_s=0) == ()
    with pytest.raises(OwnedByLog):
        await logs.delete_unnamed(one.ledger_id)
    with pytest.raises(OwnedByLog):
        await service.client.delete(one.ledger_id, version=one.version)
    await logs.cas(replace(named, items=(), first_offset=0))
    ahead = await ledger(service)
    assert await logs.orphans(older_than_s=0) == (one.ledger_id, ahead.ledger_id)
    assert await logs.orphans(older_than_s=0, log="a-log") == (one.ledger_id,), "it had a place"
    assert await logs.orphans(older_than_s=0, log="a-log", after=one.ledger_id) == ()
    assert await logs.orphans(older_than_s=0, log="another") == ()
    await logs.delete_unnamed(ahead.ledger_id)
    assert await logs.orphans(older_than_s=3600) == ()
    await logs.delete_unnamed(one.ledger_id)
    await logs.delete_unnamed(one.ledger_id)
    with pytest.raises(NoSuchLedger):
        await service.client.get(one.ledger_id)
    assert await logs.orphans(older_than_s=0) == ()


async def test_a_ledger_is_placed_by_its_first_offset(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    one = await ledger(service)

    _, named = await logs.cas(replace(row, items=(LogItem(one.ledger_id, None),)))
    unplaced = await service.client.get(one.ledger_id)
    _, there_now = await logs.cas(replace(named, items=(LogItem(one.ledger_id, 7),)))

    assert unplaced == one
    assert there_now.attempt
    there = placed(one, there_now, 7)
    assert await service.client.get(one.ledger_id) == there, "of the same name: nobody has a copy"
    assert (await service.client.list(log="a-log"))[0] == [there]


async def test_a_log_created_with_a_ledger_places_it(service: Service, logs: LogClient) -> None:
    one = await ledger(service)

    row, _ = await logs.create(first(LOG, one))

    assert await service.client.get(one.ledger_id) == placed(one, row, 0)


async def test_a_placed_ledger_tells_what_precedes_it(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    ledgers = [await ledger(service) for _ in range(PREDECESSORS_KEPT + 3)]
    *full, empty, last = ledgers
    items = [LogItem(one.ledger_id, 10 * at, 10 * at + 9) for at, one in enumerate(full)]
    end = 10 * len(full)

    _, named = await logs.cas(
        replace(
            row,
            items=(*items, LogItem(empty.ledger_id, end, end - 1), LogItem(last.ledger_id, end)),
            created_at="",
        )
    )

    reported = [await service.client.get(one.ledger_id) for one in (full[0], full[1], last)]
    places = [(item.ledger_id, item.first_offset or 0) for item in items]
    assert reported == [
        placed(full[0], named, 0),
        placed(full[1], named, 10, places[0]),
        placed(last, named, end, *places[-PREDECESSORS_KEPT:]),
    ]
    assert (await logs.cas(named.truncated(20)))[0]
    assert await service.client.get(last.ledger_id) == reported[-1], "as it was when it was placed"


async def test_placing_a_closed_ledger_changes_its_row(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    one = await ledger(service)
    closed = await swapped(service.client, one.closed(last_entry=4, length=9))

    _, named = await logs.cas(replace(row, items=(LogItem(one.ledger_id, 7, 11),)))
    placed = await service.client.get(one.ledger_id)
    await logs.cas(replace(named, archived_through=8))
    conflict, now = await service.client.cas(closed.given_up(0, 0, ()))

    assert (placed.first_offset, placed.version) == (7, closed.version + 1)
    assert placed.attempt not in (one.attempt, closed.attempt)
    assert placed.ancestors == (one.attempt, closed.attempt)
    assert (conflict, now) == (CasStatus.CONFLICT, placed), "placed once"


async def test_a_released_ledger_keeps_its_place(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    one = await ledger(service)
    _, named = await logs.cas(first(row, one))

    await logs.cas(replace(named, items=(), first_offset=0))

    assert await service.client.get(one.ledger_id) == placed(one, named, 0)


async def test_orphans_come_in_pages_by_id(service: Service, logs: LogClient) -> None:
    await logs.create(LOG)
    made = sorted([(await ledger(service)).ledger_id for _ in range(3)])

    first = await logs.orphans(older_than_s=0, limit=2)
    rest = await logs.orphans(older_than_s=0, after=first[-1])

    assert [*first, *rest] == made
    assert await logs.orphans(older_than_s=0, after=made[-1]) == ()


async def test_a_ledger_is_never_both_named_and_deleted(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)

    for _ in range(10):
        one = await ledger(service)
        named, deleted = await asyncio.gather(
            logs.cas(first(row, one)),
            logs.delete_unnamed(one.ledger_id),
            return_exceptions=True,
        )

        row = await logs.get("a-log")
        if isinstance(named, BaseException):
            assert isinstance(named, InvalidRequest)
            assert deleted is None
        else:
            assert isinstance(deleted, OwnedByLog)
            assert (await service.client.get(one.ledger_id)).log == "a-log"
            _, row = await logs.cas(replace(row, items=()))


async def test_a_ledger_of_no_log_is_no_orphan(service: Service, logs: LogClient) -> None:
    one = await ledger(service, log=None)

    with pytest.raises(InvalidRequest):
        await logs.delete_unnamed(one.ledger_id)

    assert await logs.orphans(older_than_s=0) == ()


async def test_illegal_changes_of_a_log_are_refused(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(replace(LOG, first_offset=5, writer_token=2, archived_through=3))
    one = await ledger(service)
    _, row = await logs.cas(replace(row, items=(LogItem(one.ledger_id, 5, 9),)))

    for wrong in (
        replace(row, settings=replace(row.settings, digest=DigestKind.NONE)),
        replace(row, settings=replace(row.settings, custom=(("k", "v"),))),
        replace(row, first_offset=4),
        replace(row, archived_through=2),
        replace(row, archived_through=None),
        replace(row, writer_token=1),
        replace(row, items=(LogItem(one.ledger_id, 5, 8),)),
        replace(row, items=(LogItem(one.ledger_id, 6, 9),)),
    ):
        with pytest.raises(InvalidRequest):
            await logs.cas(wrong)

    assert await logs.get("a-log") == row
    _, row = await logs.cas(replace(row, state=LogState.CLOSED, next_offset=10))
    with pytest.raises(InvalidRequest):
        await logs.cas(replace(row, state=LogState.OPEN))


async def test_a_log_without_archived_records_may_change(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    _, row = await logs.cas(row.archived(0))
    one = await ledger(service)

    _, row = await logs.cas(first(row, one))

    assert (row.archived_through, len(row.items)) == (0, 1)
    with pytest.raises(InvalidRequest):
        await logs.cas(replace(row, archived_through=None))


async def test_a_deleted_log_frees_name_and_ledgers(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    one = await ledger(service)
    _, row = await logs.cas(first(row, one))
    assert await logs.delete(replace(row, version=1)) == row

    assert await logs.delete(row) is None

    with pytest.raises(NoSuchLog):
        await logs.get("a-log")
    with pytest.raises(NoSuchLog):
        await logs.cas(row)
    assert await logs.orphans(older_than_s=0) == (one.ledger_id,)
    anew, made = await logs.create(LOG)
    assert made
    # What was sent to the old log can't meet the new one.
    assert anew.version > row.version
    assert (await logs.cas(row))[0] is False


async def test_a_deleted_log_takes_its_closed_ledgers(service: Service, logs: LogClient) -> None:
    row, _ = await logs.create(LOG)
    ended, written = await ledger(service), await ledger(service)
    ending = await swapped(service.client, ended.in_recovery())
    await service.client.cas(ending.closed(last_entry=-1, length=0))
    items = (LogItem(ended.ledger_id, 0, 4), LogItem(written.ledger_id, 5))
    is_done, row = await logs.cas(replace(row, items=items))
    assert is_done

    assert await logs.delete(row) is None

    with pytest.raises(NoSuchLedger) as gone:
        await service.client.get(ended.ledger_id)
    assert gone.value.members["deleted"] is True
    assert await logs.orphans(older_than_s=0) == (written.ledger_id,)


async def test_logs_are_listed_by_name(logs: LogClient) -> None:
    rows = [(await logs.create(replace(LOG, name=f"log-{n}")))[0] for n in range(5)]
    await logs.delete(rows.pop(2))

    first_page, after = await logs.list(limit=2)
    rest, end = await logs.list(after=after, limit=2)

    assert first_page + rest == rows
    assert end is None


async def test_metadata_that_the_caller_has_is_not_sent_again(
    service: Service, stores: Stores
) -> None:
    logs = LogClient(service.client)
    row, _ = await logs.create(LOG)

    async def sent(known: LogMetadata) -> Any:
        path = f"/v1/logs/{LOG.name}?known={known.attempt}&created_at={known.created_at}"
        status, answer = await service.send("GET", path)
        return status, answer.get("row"), answer.get("read_ms", 0) > 0

    assert await sent(row) == (200, None, True)
    assert await logs.get(LOG.name, row) is row
    assert await logs.get(LOG.name, replace(row, attempt="")) == row

    other = replace(row, attempt=new_attempt(), forgotten_end=5)
    assert await logs.get(LOG.name, other) == row
    # After the database went back, the same attempt may have created the log again.
    earlier = replace(row, created_at="2026-01-02T03:04:05.678901Z")
    assert await logs.get(LOG.name, earlier) == row
    async with connected(stores) as database:
        await database.execute("UPDATE logs SET attempt = NULL")
    assert (await logs.get(LOG.name, row)).attempt == ""

    _, changed = await logs.cas(replace(await logs.get(LOG.name), forgotten_end=7))
    assert await logs.get(LOG.name, row) == changed
    await logs.delete(changed)
    with pytest.raises(NoSuchLog):
        await logs.get(LOG.name, changed)
    assert await sent(changed) == (404, None, False)


async def test_a_bad_name_is_refused(service: Service) -> None:
    for name in ("-a", "a%20b", "a" * 201, "..%2Fx"):
        status, problem = await service.send("GET", f"/v1/logs/{name}")

        assert (status, problem["code"]) in {(422, "invalid"), (404, "not-found")}


async def test_a_repeated_create_gets_no_later_namesake(service: Service, logs: LogClient) -> None:
    body = {"row": document_of(LOG), "attempt": new_attempt()}
    made, again = [await service.send("POST", "/v1/logs", body) for _ in range(2)]
    assert (again[0], again[1] | {"read_ms": made[1]["read_ms"]}) == made
    await logs.delete(await logs.get(LOG.name))
    other, is_new = await logs.create(LOG)
    assert is_new

    status, problem = await service.send("POST", "/v1/logs", body)

    assert (made[0], status, problem["code"]) == (201, 404, "no-such-log")
    assert await logs.get(LOG.name) == other


async def test_a_protected_log_is_not_deleted(logs: LogClient) -> None:
    row, _ = await logs.create(replace(LOG, deletion_protection=True))

    with pytest.raises(LogProtected):
        await logs.delete(row)

    is_done, row = await logs.cas(row.protected(is_on=False))
    assert is_done
    assert await logs.delete(row) is None


async def test_the_limits_of_a_log_change_by_compare_and_swap(logs: LogClient) -> None:
    made, _ = await logs.create(LOG)

    is_done, changed = await logs.cas(made.with_limits({"retention_seconds": 60}))
    is_late, current = await logs.cas(made.with_limits({"retention_seconds": 90}))

    assert (is_done, is_late) == (True, False)
    assert current == changed == await logs.get("a-log")
    assert changed.settings == replace(made.settings, retention_seconds=60)
    assert changed.version == made.version + 1


async def test_a_deletion_by_the_row_of_a_former_keeper_changes_nothing(logs: LogClient) -> None:
    one, two = Writer("g1", "http://g1"), Writer("g2", "http://g2", "http://g2:1")
    made, _ = await logs.create(replace(LOG, expiry=Expiry(60, one, "t1")))
    is_done, kept = await logs.cas(made.kept_by(two, "t2"))

    assert is_done
    assert kept.expiry == Expiry(60, two, "t2")
    assert await logs.delete(made) == kept == await logs.get("a-log")
    with pytest.raises(InvalidRequest):
        await logs.cas(replace(kept, expiry=None))
    assert await logs.delete(kept) is None


async def test_logs_are_listed_by_the_beginning_of_their_names(logs: LogClient) -> None:
    names = ["a", "a-1", "a.1", "a_1", "ab", "b", "b-1"]
    for name in names:
        await logs.create(replace(LOG, name=name))

    async def listed(prefix: str, limit: int = 100) -> list[str]:
        found: list[str] = []
        after = None
        while True:
            rows, after = await logs.list(after=after, limit=limit, prefix=prefix)
            found += [row.name for row in rows]
            if after is None:
                return found

    for prefix in ("", "a", "a-", "a_", "a.", "ab", "b", "c", "a-10"):
        expected = sorted(name for name in names if name.startswith(prefix))
        assert sorted(await listed(prefix)) == expected
        assert await listed(prefix, 1) == await listed(prefix)
