"""Lists: filters, pages, and that an index serves every query."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from loadtest.stores import Stores
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.parameters import PAIRS_MAX
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import Cookie
from services.metadata.cookies import REPAIRS_COUNT, USES, USES_COUNT
from services.metadata.forks import KEPT
from services.metadata.ledgers import NAMING, LedgerFilter, list_query
from services.metadata.logs import ORPHANS, ORPHANS_OF_LOG, page_query
from services.metadata.repairs import ADD, CLAIM, HURRY
from services.metadata.repairs import PAGE as REPAIR_PAGE
from services.metadata.sql import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from services.metadata.transactions import EXPIRED
from tests.support.database import connected, sql
from tests.unit.metadata.support import DRAFT, Service, serving, swapped


async def made(service: Service) -> list[LedgerMetadata]:
    """Twelve ledgers that differ in what can be asked for."""
    rows = []
    for number in range(12):
        draft = replace(DRAFT, custom=(("n", str(number % 3)), ("all", "x")))
        if number % 4 == 0:
            draft = replace(draft, log="a-log")
        row = await service.client.create(draft)
        if number % 2:
            b4 = await service.client.cookie("b4")
            await service.client.put_cookie(
                "b4",
                Cookie(
                    incarnation=number,
                    cluster_id=await service.client.cluster_id(),
                    instance=f"data-{number}",
                ),
                version=None if b4 is None else b4.version,
            )
            changed = await swapped(
                service.client, row.with_ensemble(5, ("b1@1", "b2@1", f"b4@{number}"))
            )
            row = changed
        if number % 3 == 0:
            changed = await swapped(service.client, row.in_recovery())
            row = changed
        rows.append(row)
    return rows


async def test_filters_choose_and_combine(service: Service) -> None:
    rows = await made(service)
    client = service.client

    async def listed(**wanted: Any) -> list[LedgerMetadata]:
        return (await client.list(**wanted))[0]

    assert await listed() == rows
    assert await listed(state=State.IN_RECOVERY) == rows[::3]
    assert await listed(state=State.CLOSED) == []
    assert await listed(log="a-log") == rows[::4]
    assert await listed(bookie="b1@1") == rows
    assert await listed(bookie="b4") == rows[1::2]
    assert await listed(bookie="b4@5") == [rows[5]]
    assert await listed(bookie="b") == []
    assert await client.ledgers_naming("b4") == {row.ledger_id for row in rows[1::2]}
    assert await client.ledgers_naming("b") == set()
    assert await listed(metadata={"n": "1", "all": "x"}) == rows[1::3]
    assert await listed(metadata={"n": "3"}) == []
    assert await listed(state=State.IN_RECOVERY, log="a-log", bookie="b3") == rows[::12]


async def test_pages_cover_every_row_once_during_inserts_and_deletes(service: Service) -> None:
    rows = await made(service)
    seen: list[LedgerMetadata] = []
    after = None

    while True:
        page, after = await service.client.list(after=after, limit=5)
        seen += page
        if after is None:
            break
        # Behind the page: neither shifts it.
        await service.client.create(replace(DRAFT, ledger_id=ASSIGNED_ID_END + len(seen)))
        await service.client.create(DRAFT)

    assert [row for row in seen if row in rows] == rows
    assert len({row.ledger_id for row in seen}) == len(seen)


async def test_a_deleted_ledger_is_in_no_list(service: Service) -> None:
    row = await service.client.create(DRAFT)
    row2 = await swapped(service.client, row.closed(last_entry=-1, length=0))
    await service.client.delete(row.ledger_id, version=row2.version)

    assert await service.client.list() == ([], None)
    assert await service.client.list(bookie="b1") == ([], None)


QUERIES: list[tuple[tuple[str, list[Any]], str]] = [
    (list_query(LedgerFilter(), after=40, limit=9), "ledgers_live"),
    (list_query(LedgerFilter(state=State.IN_RECOVERY), after=0, limit=9), "ledgers_by_state"),
    (list_query(LedgerFilter(log="log-7"), after=0, limit=9), "ledgers_by_log"),
    (list_query(LedgerFilter(shown="logs/log-7*,ledgers/a"), after=0, limit=9), "ledgers_by_owner"),
    (list_query(LedgerFilter(metadata={"n": "7"}), after=0, limit=9), "ledger_tags_pkey"),
    (
        list_query(
            LedgerFilter(metadata={str(n): "7" for n in range(PAIRS_MAX)}), after=0, limit=9
        ),
        "ledger_tags_pkey",
    ),
    (list_query(LedgerFilter(bookie="b7"), after=0, limit=9), "ledger_members_pkey"),
    (list_query(LedgerFilter(bookie="b7@1"), after=0, limit=9), "ledger_members_pkey"),
    (("SELECT FROM ledgers WHERE ledger_id = $1 FOR UPDATE", [7]), "ledgers_pkey"),
    (("SELECT FROM ledgers WHERE ledger_id = $1 AND version = $2", [7, 1]), "ledgers_pkey"),
    (("DELETE FROM ledger_members WHERE ledger_id = $1", [7]), "ledger_members_of"),
    (("SELECT target FROM attempts WHERE attempt = $1", ["0" * 32]), "attempts_pkey"),
    (("SELECT FROM cookies WHERE name = $1", ["b7"]), "cookies_pkey"),
    (("SELECT FROM logs WHERE name = $1 FOR UPDATE", ["log-7"]), "logs_pkey"),
    (page_query("", None, after="log-7", limit=9), "logs_live"),
    (page_query("log-7", None, after="", limit=9), "logs_live"),
    (page_query("", "logs/log-7,logs/log-8*", after="", limit=9), "logs_by_owner"),
    ((ORPHANS, [7, 40, 9]), "unnamed_ledgers_pkey"),
    ((ORPHANS_OF_LOG, [7, 40, 9, "log-7"]), "ledgers_by_log"),
    ((KEPT, ["log-7"]), "forks_of"),
    (("SELECT FROM shared_ledgers WHERE ledger_id = $1", [7]), "shared_ledgers_of"),
    (("DELETE FROM shared_ledgers WHERE log = $1", ["log-7"]), "shared_ledgers_pkey"),
    ((CLAIM, ["w", 30.0, 2]), "repairs_in_order"),
    ((REPAIR_PAGE, [7, "b1@1", 9]), "repairs_pkey"),
    ((HURRY, []), "repairs_waiting"),
    ((NAMING, ["b7", 0, 9]), "ledger_members_pkey"),
    ((ADD, [[7], ["b7@1"], ["{[0,9]}"], [1], [True]]), "ledgers_live"),
    ((USES, ["b7", 9]), "ledger_members_pkey"),
    ((USES_COUNT, ["b7"]), "ledger_members_pkey"),
    ((REPAIRS_COUNT, ["b7"]), "repairs_by_name"),
    ((EXPIRED, [9]), "transactions_by_expiry"),
    (("SELECT FROM transactions WHERE id = $1 FOR UPDATE", ["7"]), "transactions_pkey"),
    (("SELECT FROM transaction_ledgers WHERE transaction = $1", ["7"]), "transaction_ledgers_of"),
    (("SELECT FROM app_versions WHERE log = $1 AND app = $2", ["log-7", "a"]), "app_versions_pkey"),
]

FILL = """
INSERT INTO ledgers (ledger_id, version, body) SELECT n, 1, jsonb_build_object(
    'state', CASE WHEN n % 500 = 0 THEN 'IN_RECOVERY' ELSE 'CLOSED' END,
    'log', CASE WHEN n % 50 = 0 THEN 'log-' || n / 500 END,
    'metadata', jsonb_build_object('n', (n / 10)::text))
FROM generate_series(1, 5000) n;
INSERT INTO ledger_members SELECT 'b' || n % 500, n, 1 FROM generate_series(1, 5000) n;
INSERT INTO ledger_tags SELECT decode(md5((n % 500)::text), 'hex'), n
    FROM generate_series(1, 5000) n;
INSERT INTO attempts (attempt, target) SELECT gen_random_uuid(), '' FROM generate_series(1, 5000);
INSERT INTO cookies SELECT 'b' || n, 1, '{}' FROM generate_series(1, 5000) n;
INSERT INTO logs SELECT 'log-' || n, 1, '{}' FROM generate_series(1, 5000) n;
INSERT INTO unnamed_ledgers SELECT n, now() - make_interval(secs => n)
    FROM generate_series(1, 5000) n;
INSERT INTO shared_ledgers SELECT n, 'log-' || n FROM generate_series(1, 5000) n;
INSERT INTO forks SELECT 'log-' || n, 'log-' || n / 10 FROM generate_series(1, 5000) n;
INSERT INTO repairs (ledger_id, member, ranges, survivors, failures, next_try_at)
    SELECT n, 'b' || n % 500 || '@1', '{[0,9]}', n % 9, 1,
    now() + make_interval(mins => CASE WHEN n % 500 = 0 THEN 1 ELSE -1 END)
    FROM generate_series(1, 5000) n;
INSERT INTO transactions (id, log, app, app_version, state, ttl_s, expires_at, ended_at)
    SELECT n::text, 'log-' || n, 'a', n, CASE WHEN n % 100 = 0 THEN 'OPEN' ELSE 'ABORTED' END, 9,
    now() + make_interval(secs => n - 2500), CASE WHEN n % 100 > 0 THEN now() END
    FROM generate_series(1, 5000) n;
INSERT INTO transaction_ledgers SELECT n, (n / 10 + 1)::text FROM generate_series(1, 5000) n;
INSERT INTO app_versions SELECT 'log-' || n, 'a', n, n::text FROM generate_series(1, 5000) n;
ANALYZE;
"""


async def test_an_index_serves_every_query(stores: Stores) -> None:
    async with serving(stores):
        pass  # it makes the tables, and is gone before there are rows that nobody could read
    async with connected(stores) as connection:
        await connection.execute(FILL)

        for (query, values), index in QUERIES:
            plan = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *values)
            nodes = list(_nodes(orjson.loads(plan)[0]["Plan"]))
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert scanned <= {"cluster"}, query  # of one row
            assert index in {node.get("Index Name") for node in nodes}, (query, plan)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


@pytest.mark.parametrize("limit", [1, 10_000])
async def test_pages_are_as_small_or_large_as_the_api_says(service: Service, limit: int) -> None:
    rows = [await service.client.create(DRAFT) for _ in range(2)]

    page, following = await service.client.list(limit=limit)

    assert page == rows[:limit]
    assert following == (rows[0].ledger_id if limit == 1 else None)


LARGE = """
INSERT INTO ledgers (ledger_id, version, body) SELECT 1000 + n, 1,
    jsonb_set(l.body, '{metadata}', jsonb_build_object('m', repeat('x', 15000), 'odd', (n % 2)::text))
    FROM generate_series(1, 200) n, ledgers l WHERE l.ledger_id = $1
"""
LARGE_LOGS = """
INSERT INTO logs (name, version, body) SELECT 'n' || 1000 + n, 1,
    jsonb_set(l.body, '{settings, metadata}', jsonb_build_object('m', repeat('x', 15000)))
    FROM generate_series(1, 200) n, logs l WHERE l.name = $1
"""


async def pages(service: Service, path: str) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
    """Each page's bytes and rows."""
    following = None
    while True:
        query = "limit=10000" if following is None else f"limit=10000&after={following}"
        async with service.session.get(f"{service.url}{path}{query}") as answer:
            data = await answer.read()
        page = orjson.loads(data)
        following = page.pop("next")
        (rows,) = page.values()
        yield len(data), rows
        if following is None:
            return


async def test_a_page_ends_by_bytes_and_says_the_next(service: Service, stores: Stores) -> None:
    """A row that Postgres stores compressed counts with its text."""
    ledger = await service.client.create(replace(DRAFT, log=None))
    await LogClient(service.client).create(
        LogMetadata("a", LogSettings(DRAFT.quorum), next_offset=0)
    )
    async with connected(stores) as connection:
        await connection.execute(LARGE.replace("$1", str(ledger.ledger_id)))
        await connection.execute(LARGE_LOGS.replace("$1", "'a'"))
        await connection.execute(
            "INSERT INTO ledger_members SELECT 'b9', 1000 + n, 1 FROM generate_series(1, 200) n"
        )
        # A row that is larger than a page is one nevertheless.
        await connection.execute(
            "UPDATE ledgers SET body = jsonb_set(body, '{metadata}',"
            " (SELECT jsonb_object_agg(n, repeat('x', 60000)) FROM generate_series(1, 40) n))"
            " WHERE ledger_id = 1100"
        )

    for path, key, count in (
        ("/v1/ledgers?", "ledger_id", 201),
        ("/v1/ledgers?bookie=b9&", "ledger_id", 200),
        ("/v1/ledgers?state=OPEN&", "ledger_id", 201),
        ("/v1/logs?", "name", 201),
    ):
        found = [page async for page in pages(service, path)]
        keys = [row[key] for _, rows in found for row in rows]
        assert keys == sorted(set(keys)), path
        assert len(keys) == count, path
        assert len(found) > 2, path
        for size, rows in found:
            assert len(rows) > 0, path
            # The limit counts the bodies of all rows but the last.
            others = size - len(orjson.dumps(rows[-1])) - 200 * len(rows)
            assert others < PAGE_BYTES_MAX, (path, size)


async def test_a_page_of_small_rows_ends_by_rows(service: Service, stores: Stores) -> None:
    await LogClient(service.client).create(
        LogMetadata("a", LogSettings(DRAFT.quorum), next_offset=0)
    )
    await sql(
        stores,
        "INSERT INTO logs (name, version, body) SELECT 'n' || n, 1, '{\"n\": 1}'::jsonb"
        f" FROM generate_series(1, {PAGE_ROWS_MAX}) n",
    )

    counts = [len(rows) async for _, rows in pages(service, "/v1/logs?")]

    assert counts == [PAGE_ROWS_MAX, 1]


async def test_hanging_listings_leave_room_for_creates(service: Service, stores: Stores) -> None:
    """One more than the listings' share is told to come back."""
    async with connected(stores) as connection, connection.transaction():
        await connection.execute("LOCK TABLE logs IN ACCESS EXCLUSIVE MODE")
        listings = [asyncio.ensure_future(service.send("GET", "/v1/logs")) for _ in range(30)]

        await service.client.create(DRAFT)
        done, waiting = await asyncio.wait(listings, return_when=asyncio.FIRST_COMPLETED)
        status, problem = done.pop().result()
        assert (status, problem["code"], problem["retryable"]) == (503, "metadata-busy", True)
        assert problem["outcome"] == "not-done"
        async with service.session.get(f"{service.url}/v1/ledgers") as busy:
            assert (busy.status, busy.headers["Retry-After"]) == (503, "1")
        assert waiting

    # Those that had a connection are answered.
    answers = await asyncio.gather(*listings)
    assert {status for status, _ in answers} == {200, 503}
