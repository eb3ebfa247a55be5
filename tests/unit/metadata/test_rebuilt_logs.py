"""What a rebuild from the bookies makes of logs, and what it tells of them (rule 18f)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest.stores import Stores
from quorumlog.errors import NoSuchLedger, NoSuchLog
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.log import LIMITS, LogItem, LogMetadata, LogSettings, LogState, Producer
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import Deletion, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild_log import NEW_LOG_VERSION
from quorumlog.protocol.transaction import Sealed
from quorumlog.wire.bodies import received
from quorumlog.wire.log_bodies import TRANSACTION_TAG, LogChange
from quorumlog.wire.rebuild_bodies import NOT_REBUILT, RebuildReport
from services.bookie.runtime import BookieRuntime
from tests.support.database import connected, sql
from tests.support.once import once
from tests.support.waiting import until
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import DRAFT, Service, is_ready, serving, swapped
from tests.unit.metadata.test_rebuild import (
    NAMES,
    Bookies,
    bookies,
    closed,
    create,
    keep,
    lost_after,
    rebuild,
    until_ready,
    until_replayed,
)

__all__ = ("bookies",)

LOG = LogMetadata(
    "events",
    LogSettings(quorum=Quorum(3, 3, 2), retention_bytes=5, custom=(("owner", "me"),)),
)


@dataclass(slots=True)
class Written:
    """A log of CLOSED ledgers with ten records each, as an owner writes it."""

    service: Service
    row: LogMetadata
    rows: list[LedgerMetadata]
    """Of its ledgers."""
    attempts: list[str]
    """Tokens of the changes that placed them."""

    @classmethod
    async def of(cls, service: Service, ledgers: int, *, log: LogMetadata = LOG) -> "Written":
        row, _ = await LogClient(service.client).create(log)
        made = cls(service, row, [], [])
        for _ in range(ledgers):
            await made.add()
        return made

    async def add(self, opened_by: str | None = None) -> None:
        ledger = await closed(self.service, await create(self.service, log=self.row.name), last=9)
        item = LogItem(ledger.ledger_id, 10 * len(self.rows), 10 * len(self.rows) + 9)
        change = replace(self.row, items=(*self.row.items, item))
        if opened_by is not None:
            change = change.opened(opened_by)
        attempt = new_attempt()
        status, body = await swap(self.service, change, attempt)
        assert status == 200
        self.row = received(LogMetadata, orjson.dumps(body))
        self.rows.append(await self.service.client.get(ledger.ledger_id))
        self.attempts.append(attempt)


async def swap(service: Service, log: LogMetadata, attempt: str) -> tuple[int, Any]:
    """One try of a log's compare-and-swap."""
    body = LogChange(row=log, attempt=attempt)
    return await service.send("PUT", f"/v1/logs/{log.name}", body.model_dump_json().encode())


async def accepts(service: Service) -> bool:
    """As an operator: go on without the changes that nobody has; whether nothing is missing."""
    _, state = await service.send("GET", "/v1/witnesses")
    if missing := [found["witness"] for found in state["missing"]]:
        await service.send("POST", "/v1/witnesses/accept", {"witnesses": missing, "lost": []})
    return not missing and await is_ready(service)


def places(log: LogMetadata) -> list[tuple[int, int | None, int | None]]:
    return [(item.ledger_id, item.first_offset, item.last_offset) for item in log.items]


async def rebuilt(
    service: Service, bookies: Bookies, running: Mapping[str, BookieRuntime], **ask: Any
) -> RebuildReport:
    """The report of a rebuild from nothing by the bookies that run; the others are gone for ever."""
    for bookie in running.values():
        await until_replayed(bookie)
    without = tuple(name for name in NAMES if name not in running)
    report, why = await rebuild(
        service, bookies=tuple(bookies.urls), take_over=True, without=without, **ask
    )
    assert report is not None, why
    return report


async def test_a_repeated_log_change_gets_the_row(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        log = await Written.of(service, 1)
        before = replace(log.row, version=log.row.version - 1)
        await keep(running["b1"], *log.rows)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await rebuilt(service, bookies, running)
        now = await LogClient(service.client).get("events")
        answers = [
            await swap(service, replace(before, version=version), log.attempts[0])
            for version in (before.version, now.version)
        ]

    for status, problem in answers:
        assert (status, problem["code"]) == (412, "version-conflict")
        current = received(LogMetadata, orjson.dumps(problem["current"]))
        assert current == now


async def test_a_rebuilt_log_refuses_its_earlier_tokens(stores: Stores, bookies: Bookies) -> None:
    """Rule 22a. The last one to open it has appended nothing: no bookie knows of that one."""
    given = []
    async with lost_after(stores, bookies) as (service, running):
        log = await Written.of(service, 1)
        for owner in ("a", "b"):
            await log.add(owner)
            given.append(log.row.writer_token)
        await keep(running["b1"], *log.rows)
        await log.add("c")
        given.append(log.row.writer_token)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("events")
        again = await rebuilt(service, bookies, running)
        later = await create(service, log="events")

    assert given == [row.ledger_id for row in log.rows[1:]]
    assert found.writer_token > max(given)
    assert later.ledger_id > found.writer_token, "no ledger has that id"
    assert again.logs == {"same": 1}


async def test_a_hole_in_a_log_is_told_until_it_is_filled(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies, ("b1", "b2")) as (service, running):
        log = await Written.of(service, 4)
        first, hole, third, last = log.rows
        await keep(running["b1"], first, third, last)
        await keep(running["b2"], hole)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("events")
        with pytest.raises(NoSuchLedger):
            await service.client.get(hole.ledger_id)
        async with bookies.running(service, ("b2",)) as late:
            again = await rebuilt(service, bookies, {**running, **late})
            kept = await logs.get("events")
            row = await service.client.get(hole.ledger_id)
            orphans = await logs.orphans(older_than_s=0)

    open_end = replace(log.row.items[-1], last_offset=None)
    assert places(found) == places(replace(log.row, items=(*log.row.items[:-1], open_end)))
    assert report.holes == 1
    assert [finding.why for finding in report.findings] == [
        f"holes, where reads fail until a rebuild finds the rows: ledgers {hole.ledger_id}"
    ]
    assert (again.logs, again.holes) == ({"same": 1}, 0)
    assert (kept, row, orphans) == (found, hole, ())


async def test_a_log_with_a_hole_can_be_deleted(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        written = [
            await Written.of(service, 3, log=replace(LOG, name=name)) for name in ("one", "two")
        ]
        for log in written:
            await keep(running["b1"], log.rows[0], log.rows[2])

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        done, row = await logs.cas((await logs.get("one")).truncated(20))
        await logs.delete(await logs.get("two"))
        with pytest.raises(NoSuchLog):
            await logs.get("two")

    assert report.holes == 2
    assert done
    assert places(row) == [(written[0].rows[2].ledger_id, 20, None)]


async def test_a_ledger_with_a_later_row_keeps_its_place(stores: Stores, bookies: Bookies) -> None:
    """Without it the log's next owner would give its offsets to other records."""
    async with lost_after(stores, bookies) as (service, running):
        log = await Written.of(service, 1)
        opened = await create(service, log="events")
        await LogClient(service.client).cas(
            replace(log.row, items=(*log.row.items, LogItem(opened.ledger_id, 10)))
        )
        opened = await service.client.get(opened.ledger_id)
        await keep(running["b1"], *log.rows, opened)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_replayed(running["b1"])
        report, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        found = await LogClient(service.client).get("events")

    assert report is not None
    assert (report.ledgers, report.holes) == ({"write": 1, "wait": 1}, 1)
    assert places(found) == [(log.rows[0].ledger_id, 0, 9), (opened.ledger_id, 10, None)]


async def test_a_deleted_logs_ledger_is_in_no_namesake(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        earlier = await Written.of(service, 2)
        await LogClient(service.client).delete(earlier.row)
        log = await Written.of(service, 1)
        await keep(running["b1"], *earlier.rows, *log.rows)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("events")
        again = await rebuilt(service, bookies, running)

    assert places(found) == [(log.rows[0].ledger_id, 0, None)]
    assert found.created_at == log.row.created_at
    ids = ", ".join(str(row.ledger_id) for row in earlier.rows)
    assert [finding.why for finding in report.findings] == [
        f"ledgers without a place in the log: {ids}"
    ]
    assert again.logs == {"same": 1}


async def test_a_log_made_after_a_deletion_is_remade(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        earlier = await Written.of(service, 1)
        await LogClient(service.client).delete(earlier.row)
        deleted = await rebuilt(service, bookies, running)
        log = await Written.of(service, 1)
        await keep(running["b1"], *log.rows)
        await sql(
            stores,
            "UPDATE logs SET body = NULL, created_at = $1",
            datetime.fromisoformat(earlier.row.created_at),
        )

        report = await rebuilt(service, bookies, running)
        found = await LogClient(service.client).get("events")

    assert deleted.logs == {}
    assert report.logs == {"write": 1}
    assert (places(found), found.version) == (
        [(log.rows[0].ledger_id, 0, None)],
        NEW_LOG_VERSION,
    )


async def test_a_rebuild_keeps_a_later_log_whose_ledger_ids_are_lower(
    stores: Stores, bookies: Bookies
) -> None:
    """A backup was restored, and a log was created again before any rebuild. Its ledgers got ids
    below those of the log that was deleted in the lost history.
    """
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        await sql(stores, "SELECT setval('ledger_ids', last_value + 500) FROM ledger_ids")
        earlier = await Written.of(service, 1)
        deletion = earlier.rows[0].deleted(new_attempt(), deletion=Deletion.WITH_LOG)
        await keep(running["b1"], deletion)
        await sql(stores, "TRUNCATE logs, ledgers CASCADE")
        await sql(stores, "SELECT setval('ledger_ids', last_value - 501) FROM ledger_ids")
        log = await Written.of(service, 1)
        await keep(running["b1"], *log.rows)

        report = await rebuilt(service, bookies, running)
        found = await LogClient(service.client).get("events")

    assert log.rows[0].ledger_id < earlier.rows[0].ledger_id
    assert report.logs == {"same": 1}
    assert found.created_at == log.row.created_at
    assert [item.ledger_id for item in found.items] == [log.rows[0].ledger_id]


async def test_a_lost_log_waits_for_silent_bookies(stores: Stores, bookies: Bookies) -> None:
    """Its last ledger that is told of is CLOSED: the next one may be on the other two."""
    async with lost_after(stores, bookies) as (service, running):
        log = await Written.of(service, 2)
        await keep(running["b1"], *log.rows)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_replayed(running["b1"])
        waits, why = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        assert waits is not None, why
        with pytest.raises(NoSuchLog):
            await LogClient(service.client).get("events")
        given_up, why = await rebuild(service, without=("b2", "b3"))
        assert given_up is not None, why
        found = await LogClient(service.client).get("events")

    assert (waits.ledgers, waits.logs, waits.silent) == ({"write": 2}, {"wait": 1}, ("b2", "b3"))
    assert "the ledger after it may be on bookies" in waits.findings[0].why
    assert given_up.logs == {"write": 1}
    assert [item.ledger_id for item in found.items] == [row.ledger_id for row in log.rows]


async def test_a_rebuilt_logs_transaction_was_committed(stores: Stores, bookies: Bookies) -> None:
    """An abort would delete the ledgers of the log. The database is of before the commit."""
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        row, _ = await logs.create(LOG)
        begun, _ = await transactions.begin("events", app="job", version=7, expires_in_s=3600)
        tags = ((TRANSACTION_TAG, begun.id),)
        ledgers = [
            await closed(service, await create(service, log="events", extra=tags), last=9)
            for _ in range(2)
        ]
        behind = await create(service, log="events")
        row = replace(row, stream_seq="a")
        published = row.with_published([(ledgers[0].ledger_id, 10, 50)], now_ms=1, published_ms=7)
        published = published.with_ledger(behind.ledger_id).with_ends({}, producers=(), now_ms=1)
        file = await dump(stores, bookies.folder / "dump")
        done, _ = await transactions.commit(begun.id, (Sealed(ledgers[0].ledger_id),), published)
        placed = await service.client.get(ledgers[0].ledger_id)
        await keep(running["b1"], placed, ledgers[1])
    await restore(stores, file)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        await until(lambda: accepts(service), "the rest of the loss is accepted")
        found = await transactions.get(begun.id)
        again, _ = await transactions.begin("events", app="job", version=7, expires_in_s=60)
        orphans = await logs.orphans(older_than_s=0)
        log = await logs.get("events")

    assert done is not None
    assert report.logs == {"write": 1}
    assert (found.state, again.state) == ("COMMITTED", "COMMITTED")
    assert [item.ledger_id for item in found.ledgers] == [ledgers[0].ledger_id]
    assert places(log) == [(ledgers[0].ledger_id, 0, None)]
    assert (log.items[0].published_ms, log.stream_seq) == (7, "a")
    assert ledgers[0].ledger_id not in orphans


REBUILT = {
    "migrations": "",
    "cluster": "",
    "cookies": "",
    "ledgers": "keys of passwords",
    "ledger_members": "",
    "ledger_tags": "",
    "attempts": "idempotency keys",
    "logs": "logs without records",
    "unnamed_ledgers": "",
    "shared_ledgers": "",
    "forks": "sources of forks",
    "transactions": "open transactions",
    "transaction_ledgers": "open transactions",
    "app_versions": "versions of apps",
    "repairs": "the repair queue and its settings",
    "repair_settings": "the repair queue and its settings",
    "kept_ledgers": "",
    "unproven_ledgers": "",
    "leases": "",
    "access_tokens": "access tokens",
    "access_token_list": "access tokens",
    "audit": "the audit log",
    "sealing_keys": "",
}
"""Each table, and what of it no bookie holds; leases, kept and unproven ledgers are told anew by those who hold them."""

LOST_SETTINGS = "settings and states of logs"
REBUILT_OF_LOG = {
    "name": "",
    "settings": "",
    "items": "",
    "version": "",
    "state": LOST_SETTINGS,
    "first_offset": "",
    "next_offset": "logs without records",
    "writer_token": "writer tokens of logs",
    "opened_by": "writer tokens of logs",
    "forgotten_end": "producers of logs",
    "appended_ms": "",
    "stream_seq": "",
    "created_at": "",
    "attempt": "tokens of other changes",
    "archived_through": LOST_SETTINGS,
    "deletion_protection": LOST_SETTINGS,
    "expiry": "times to live of streams",
    "forked_at": "",
}
"""Each field of a log's row, and what of it no bookie holds."""
REBUILT_OF_ITEM = {
    "ledger_id": "",
    "first_offset": "",
    "last_offset": "",
    "producers": "producers of logs",
    "bytes": "",
    "sealed_ms": LOST_SETTINGS,
    "published_ms": "",
    "replaced": "",
    "index": "",  # built anew (rule 27e)
    "compacted_ms": "",  # a ledger counts as dirty, and is compacted again (rule 27d)
}


def test_each_field_of_a_log_comes_from_bookies_or_is_told_as_lost() -> None:
    reported = {**REBUILT_OF_LOG, **REBUILT_OF_ITEM}

    assert REBUILT_OF_LOG.keys() == {field.name for field in fields(LogMetadata) if field.compare}
    assert REBUILT_OF_ITEM.keys() == {field.name for field in fields(LogItem)}
    assert set(reported.values()) - {""} <= set(NOT_REBUILT)
    # Limits are lost; what is made with a log is not.
    made = {field.name for field in fields(LogSettings)} - set(LIMITS)
    assert made == {"quorum", "digest", "batch_compression", "custom"}


GONE = ("transactions", "transaction_ledgers", "app_versions", "repairs")


async def test_what_no_bookie_holds_is_gone_and_told(stores: Stores, bookies: Bookies) -> None:
    async def rows(table: str) -> int:
        async with connected(stores) as connection:
            return int(await connection.fetchval(f"SELECT count(*) FROM {table}"))

    async with lost_after(stores, bookies) as (service, running):
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        await logs.create(replace(LOG, name="empty"))
        log = await Written.of(service, 2)
        producer = Producer("p", 1, 0, ())
        items = (log.row.items[0], replace(log.row.items[1], producers=(producer,)))
        done, row = await logs.cas(replace(log.row, items=items, archived_through=5).opened("me"))
        assert done
        opened = await transactions.begin("events", app=None, version=None, expires_in_s=3600)
        app = await transactions.begin("empty", app="job", version=7, expires_in_s=3600)
        await transactions.commit(app[0].id, (), None)
        await create(service, log="events", extra=((TRANSACTION_TAG, opened[0].id),))
        ledger = await service.client.create(DRAFT, once=once("k"))
        ledger_closed = await swapped(
            service.client, ledger.closed(last_entry=4, length=50), (MissedRange("b1@1", 0, 4),)
        )
        await logs.cas(row.closed())
        before = [await rows(table) for table in GONE]
        tables = await public_tables(stores)
        await keep(running["b1"], *log.rows, ledger_closed)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        report = await rebuilt(service, bookies, running)
        logs = LogClient(service.client)
        found = await logs.get("events")
        with pytest.raises(NoSuchLog):
            await logs.get("empty")
        after = [await rows(table) for table in GONE]

    assert tables == REBUILT.keys(), "whether a table is rebuilt is told"
    assert set(REBUILT.values()) - {""} <= set(NOT_REBUILT)
    assert report.not_rebuilt == NOT_REBUILT
    assert min(before) > 0
    assert after == [0] * len(GONE)
    assert found.settings == LogSettings(quorum=LOG.settings.quorum, custom=DRAFT.custom)
    assert (found.state, found.archived_through) == (LogState.OPEN, None)
    assert (found.writer_token, found.opened_by) == (0, None)
    assert not any(item.producers for item in found.items)
    assert found.forgotten_end == found.items[-1].first_offset, "unknown is not new (rule 26a)"


async def public_tables(stores: Stores) -> set[str]:
    async with connected(stores) as connection:
        records = await connection.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        )
    return {record["tablename"] for record in records}


def test_the_guide_says_what_follows_of_each_thing_that_no_bookie_holds() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/rebuild.md").read_text(encoding="utf-8")
    section = guide.partition("## What bookies do not have")[2]

    reported = [
        line.removeprefix("- **").partition("**")[0].rstrip(":")
        for line in section.splitlines()
        if line.startswith("- **")
    ]

    assert reported == list(NOT_REBUILT)
