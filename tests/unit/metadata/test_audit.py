"""Each change of a row keeps an audit row, and none is made while the database lacks an answered change (rule 18a)."""

import asyncio
import base64
import json
import secrets
from base64 import b64encode
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import pytest

from loadtest.stores import Stores
from quorumlog.header import AUDITED
from quorumlog.net.gateway_clients import LogClient, TokenClient, TransactionClient
from quorumlog.net.metadata_client import RepairClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of, witness_of
from quorumlog.wire.repair_bodies import RepairAdd
from quorumlog.wire.token_bodies import AuditedRequest, TokenFields
from services.metadata import audit
from services.metadata.app import ROUTES
from services.metadata.database import Database
from services.metadata.tokens import AuditStore
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import (
    DRAFT,
    PATIENT_S,
    WAITING,
    Service,
    is_ready,
    serving,
    swapped,
)
from tests.unit.metadata.test_bookies import beat, cookie
from tests.unit.metadata.test_went_back import NOBODY, is_reported

AUDITED_ROUTES = {one.operation.key for one in ROUTES if one.operation.is_audited}
KEPT_ELSEWHERE = {
    "POST /v1/keys/reseal": "test_sealing.py",
    "POST /v1/rebuild": "test_accepted_losses.py",
}
REPEATED = {"PATCH /v1/repair-settings", "POST /v1/witnesses/accept"}
"""Routes whose repeat is another change: they have no attempt."""


def reported(**changed: str) -> dict[str, str]:
    """The header of a gateway's request for somebody."""
    fields = {"id": str(uuid4()), "who": "ann", "remote": "192.0.2.1", "operation": "createToken"}
    return {AUDITED: json.dumps({**fields, "target": "tokens", **changed})}


def ask_here(**changed: str) -> None:
    """This test makes changes for somebody's request."""
    request = AuditedRequest.model_validate_json(reported(**changed)[AUDITED])
    audit._ASKED.set((request, ""))


async def rows(service: Service, query: str = "") -> list[dict[str, Any]]:
    status, page = await service.send("GET", f"/v1/audit?{query}")
    assert status == 200, page
    found: list[dict[str, Any]] = page["audit"]
    return found


async def make_token(service: Service, headers: dict[str, str] | None = None) -> str:
    """An audited request. Returns its target."""
    token_id, digest = secrets.token_hex(8), base64.b64encode(secrets.token_bytes(32)).decode()
    token = {"id": token_id, "hash": digest, "name": "ci", "grants": ["read:*"]}
    body = {"token": token, "attempt": new_attempt()}
    status, _ = await service.send("POST", "/v1/tokens", body, headers=headers or {})
    assert status == 201
    return f"tokens/{token_id}"


async def test_a_change_keeps_for_whom_a_gateway_asks(service: Service) -> None:
    await make_token(service, reported(target="tokens/1", later="a field of a later release"))

    (row,) = await rows(service, "target=tokens/1")

    shown = {name: row[name] for name in ("who", "remote", "operation", "via")}
    assert shown == {
        "who": "ann",
        "remote": "192.0.2.1",
        "operation": "createToken",
        "via": "anonymous",
    }


async def test_a_caller_who_speaks_for_nobody_is_kept_itself(service: Service) -> None:
    target = await make_token(service)
    other = await make_token(service, {AUDITED: "no JSON"})

    found = await rows(service, f"target={target}") + await rows(service, f"target={other}")

    assert [(row["who"], row["remote"], row["via"]) for row in found] == [
        ("anonymous", "127.0.0.1", "")
    ] * 2


async def test_a_request_is_kept_once_and_only_with_a_change(service: Service) -> None:
    row, _ = await LogClient(service.client).create(LOG)
    refused = {"version": row.version + 1, "attempt": new_attempt()}
    deleted = {"version": row.version, "attempt": new_attempt()}
    whose = reported(operation="deleteLog", target="logs/a-log")

    assert (await service.send("DELETE", "/v1/logs/a-log", refused, headers=whose))[0] == 412
    before = await rows(service, "target=logs/a-log")
    for _ in range(2):
        assert (await service.send("DELETE", "/v1/logs/a-log", deleted, headers=whose))[0] == 204

    found = await rows(service, "target=logs/a-log")
    assert [one["operation"] for one in before] == ["create_log"]
    assert [one["operation"] for one in found] == ["create_log", "deleteLog"]


async def test_each_audited_route_keeps_a_row_and_a_repeat_of_it_none(stores: Stores) -> None:
    async with serving(stores, expiry_every_s=1000) as service:
        async with connected(stores) as database:
            accept: Any = ("POST", "/v1/witnesses/accept", "/v1/witnesses/accept", {"lost": ["b7"]})
            sent = [*await requests_of(service, database), accept]
        tried = {f"{method} {route}" for method, route, _, _ in sent} & AUDITED_ROUTES
        assert tried | KEPT_ELSEWHERE.keys() == AUDITED_ROUTES

        for method, route, path, body in sent:
            name = f"{method} {route}"
            before = len(await rows(service, "limit=1000"))
            for kept in (name in AUDITED_ROUTES, name in AUDITED_ROUTES and name in REPEATED):
                status, problem = await service.send(method, path, body)
                if name in AUDITED_ROUTES:
                    assert status < 300, (name, problem)
                before += kept
                assert len(await rows(service, "limit=1000")) == before, (name, kept)


async def test_a_reader_by_number_misses_no_later_commit(service: Service, stores: Stores) -> None:
    async with connected(stores) as slow:
        transaction = slow.transaction()
        await transaction.start()
        ask_here(target="slow")
        await audit.keep(slow)

        making = asyncio.create_task(make_token(service))

        async def is_made_or_waits() -> bool:
            return making.done() or bool(await slow.fetchval(WAITING))

        await until(is_made_or_waits, "the other change is made, or waits")
        seen = await rows(service)
        await transaction.commit()
    target = await making

    seen += await rows(service, f"after={seen[-1]['number'] if seen else 0}")
    assert [row["target"] for row in seen] == ["slow", target]


async def test_the_steps_of_one_request_use_up_no_numbers(stores: Stores, service: Service) -> None:
    """The last rows that are kept are counted by numbers."""
    async with connected(stores) as connection:
        ask_here()
        for _ in range(10):
            await audit.keep(connection)

    await make_token(service)

    assert [row["number"] for row in await rows(service)] == [1, 2]


async def test_pages_go_on_after_a_number_and_begin_at_a_time(service: Service) -> None:
    targets = [await make_token(service) for _ in range(3)]

    status, first = await service.send("GET", "/v1/audit?limit=2")
    second = await rows(service, f"after={first['next']}")
    all_rows = [*first["audit"], *second]

    assert status == 200
    assert [row["target"] for row in all_rows] == targets
    since = await rows(service, f"since={all_rows[1]['at']}")
    assert since == all_rows[1:]
    assert await rows(service, "since=2999-01-01T00:00:00Z") == []
    for end in ("0001-01-01T00:00:00%2B23:59", "9999-12-31T23:59:59-23:59", "2026-W48-1T10:00:00Z"):
        assert (await service.send("GET", f"/v1/audit?since={end}"))[0] == 422
    assert len(await rows(service, "since=0001-01-01T00:00:00Z")) == 3
    assert await rows(service, "since=9999-12-31T23:59:59Z") == []


async def test_what_is_old_and_all_but_the_last_rows_are_deleted(stores: Stores) -> None:
    async with serving(stores, audit_rows_max=1000, expiry_every_s=0.05) as service:
        targets = [await make_token(service) for _ in range(2)]
        async with connected(stores) as connection:
            await connection.execute(
                "UPDATE audit SET at = now() - interval '91 days' WHERE target = $1", targets[0]
            )

            async def kept() -> list[str]:
                found = await connection.fetch("SELECT target FROM audit ORDER BY number")
                return [record["target"] for record in found]

            await until(lambda: _equal(kept, [targets[1]]), "the old row is deleted")
            await connection.execute(
                "INSERT INTO audit (id, who, remote, via, operation, target)"
                " SELECT gen_random_uuid(), '', '', '', '', '' FROM generate_series(1, 1000)"
            )

            async def count() -> int:
                found: int = await connection.fetchval("SELECT count(*) FROM audit")
                return found

            await until(lambda: _equal(count, 1000), "the row beyond the last ones is deleted")
            assert targets[1] not in await kept()


async def test_one_round_deletes_all_that_is_too_old(service: Service, stores: Stores) -> None:
    """However fast rows come, no more are left."""
    await make_token(service)
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=PATIENT_S)
    database.is_open = True
    await database.run(
        lambda connection: connection.execute(
            "INSERT INTO audit (id, who, remote, via, operation, target)"
            " SELECT gen_random_uuid(), '', '', '', '', '' FROM generate_series(1, 5000)"
        )
    )
    database.asked_about = database.server

    await AuditStore(database, days=90, rows_max=1000).trim()

    assert [row["number"] for row in await rows(service, "limit=1000")] == list(range(4002, 5002))
    await database.close()


async def _equal(found: Any, wanted: object) -> bool:
    return bool(await found() == wanted)


LOG: Final = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))
UNCHECKED: Final = {
    ("PUT", "/v1/bookies/{name}/heartbeat"): "liveness is Redis's",
    ("PUT", "/v1/services/{kind}/{id}/heartbeat"): "liveness is Redis's",
    ("POST", "/v1/ledger-heads"): "changes nothing",
    ("POST", "/v1/shared-ledgers"): "changes nothing",
    ("POST", "/v1/ledger-proofs"): "changes nothing but what is noted for operators",
    ("POST", "/v1/keys/reseal"): "changes nothing of what rows say",
    (
        "POST",
        "/v1/rebuild",
    ): "is for a database that went back: it writes what came of its rows only",
    ("POST", "/v1/witnesses/accept"): "ends the state",
}
_COPIES: Final = "/v1/witnesses/copies"
TABLES: Final = (
    "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT IN"
    " ('attempts', 'migrations') ORDER BY tablename"
)

Sent = tuple[str, str, str, object]
"""A request: method, route, path, body."""


async def content(database: Any) -> dict[str, Any]:
    """Every row of every table, but for the tokens of the service's own marks."""
    tables = [record["tablename"] for record in await database.fetch(TABLES)]
    return {
        table: await database.fetchval(f"SELECT array_agg(t::text ORDER BY t::text) FROM {table} t")
        for table in tables
    }


async def requests_of(service: Service, database: Any) -> list[Sent]:
    """A request that would change something for each route that can, in an order in which all succeed."""
    client = service.client
    logs, repairs = LogClient(client), RepairClient(client, "a-worker")
    log, _ = await logs.create(LOG)
    b1 = await cookie(service, process="p")
    await client.put_cookie("b1", b1, version=None)
    row = await client.create(DRAFT)
    unnamed = await client.create(replace(DRAFT, log="a-log"))
    named = await client.create(replace(DRAFT, log="a-log"))
    closed = await swapped(client, (await client.create(DRAFT)).closed(last_entry=-1, length=0))
    begun, _ = await TransactionClient(client).begin(
        "a-log", app=None, version=None, expires_in_s=3600
    )
    other, _ = await TransactionClient(client).begin(
        "a-log", app=None, version=None, expires_in_s=3600
    )
    await database.execute("UPDATE transactions SET expires_at = now() + interval '10 minutes'")
    for member in ("b1@1", "b2@1", "b3@1"):
        item = RepairAdd(ledger_id=row.ledger_id, member=member, ranges=((0, 1),))
        await repairs.add([item])
    (progressing,) = await repairs.claim(lease_s=3600)
    (failing,) = await repairs.claim(lease_s=3600)
    (waiting,) = await repairs.claim(lease_s=3600)
    await repairs.fail(waiting, "it waits")
    await database.execute(
        "UPDATE repairs SET next_try_at = now() + interval '1 hour' WHERE worker IS NULL"
    )
    await TokenClient(client).create(
        TokenFields.model_validate(_token("1" * 16), strict=False), expires_in_s=None
    )
    b8 = await client.put_cookie("b8", await cookie(service), version=None)
    later = replace(log, items=(LogItem(named.ledger_id, 0),))
    one, attempt = f"/v1/ledgers/{row.ledger_id}", new_attempt

    def item_of(found: Any) -> str:
        return f"/v1/repairs/{found.ledger_id}/{found.member}"

    def claimed(found: Any) -> dict[str, object]:
        return {"worker": "a-worker", "version": found.version}

    of_ledger, of_item = "/v1/ledgers/{ledger_id}", "/v1/repairs/{ledger_id}/{member}"
    of_transaction = "/v1/transactions/{id}"
    return [
        _sent("POST", "/v1/ledgers", {"row": document_of(DRAFT), "attempt": attempt()}),
        ("PUT", of_ledger, one, {"row": document_of(row.in_recovery()), "attempt": attempt()}),
        ("DELETE", of_ledger, f"/v1/ledgers/{closed.ledger_id}", {"version": closed.version, "attempt": attempt()}),
        ("PUT", "/v1/bookies/{name}/log-end", "/v1/bookies/b1/log-end", {"process": "p", "log_end": 7}),
        ("PUT", "/v1/bookies/{name}/cookie", "/v1/bookies/b8/cookie",
         {"cookie": document_of(b8.cookie), "version": b8.version, "attempt": attempt()}),
        ("DELETE", "/v1/bookies/{name}/cookie", "/v1/bookies/b8/cookie", None),
        _sent("POST", "/v1/logs", {"row": document_of(replace(LOG, name="b-log")), "attempt": attempt()}),
        ("PUT", "/v1/logs/{name}", "/v1/logs/a-log", {"row": document_of(later), "attempt": attempt()}),
        ("DELETE", "/v1/orphans/{ledger_id}", f"/v1/orphans/{unnamed.ledger_id}", None),
        _sent("POST", "/v1/repairs", {"items": [{"ledger_id": row.ledger_id, "member": "b9@1", "ranges": [[0, 1]]}]}),
        ("POST", f"{of_item}/progress", f"{item_of(progressing)}/progress", {**claimed(progressing), "ranges": [[0, 0]]}),
        ("POST", f"{of_item}/fail", f"{item_of(failing)}/fail", claimed(failing)),
        _sent("POST", "/v1/repairs/hurry", None),
        _sent("POST", "/v1/repairs/claim", {"worker": "another"}),
        _sent("POST", "/v1/repairs/trigger", None),
        _sent("PATCH", "/v1/repair-settings", {"paused": True}),
        ("PUT", "/v1/leases/{name}", "/v1/leases/another", {"holder": "another"}),
        _sent("POST", "/v1/transactions", {"id": "a-transaction", "log": "a-log", "expires_in_s": 60}),
        _sent("POST", "/v1/tokens", {"token": _token("0" * 16), "attempt": attempt()}),
        ("DELETE", "/v1/tokens/{id}", f"/v1/tokens/{'1' * 16}", {"attempt": attempt()}),
        ("POST", f"{of_transaction}/renew", f"/v1/transactions/{begun.id}/renew", None),
        ("POST", f"{of_transaction}/commit", f"/v1/transactions/{begun.id}/commit",
         {"ledgers": [], "row": None, "attempt": attempt()}),
        ("POST", f"{of_transaction}/abort", f"/v1/transactions/{other.id}/abort", None),
        ("DELETE", "/v1/logs/{name}", "/v1/logs/a-log", {"version": log.version + 1, "attempt": attempt()}),
        _sent("POST", "/v1/witnesses", None),
        _sent("POST", _COPIES, {"witnesses": [witness_of(await client.cluster_id(), row.attempt)], "holder": "b1"}),
    ]  # fmt: skip


def _sent(method: str, path: str, body: object) -> Sent:
    return method, path, path, body


def _token(token_id: str) -> dict[str, object]:
    digest = b64encode(token_id.encode() * 2).decode()
    return {"id": token_id, "hash": digest, "name": "a", "grants": ["read:*"]}


async def test_no_route_changes_a_row_while_an_answered_change_is_missing(stores: Stores) -> None:
    async with serving(stores, expiry_every_s=1000) as service, connected(stores) as database:
        sent = await requests_of(service, database)
        tried = {(method, route) for method, route, _, _ in sent} | UNCHECKED.keys()
        known = {(r.operation.method, r.operation.path) for r in ROUTES}
        assert tried == {route for route in known if route[0] != "GET"}, "a route is not tried"
        before = await content(database)
        service.client.witnesses = (witness_of(await service.client.cluster_id(), NOBODY),)
        with pytest.raises(Exception, match="lacks"):
            await service.client.confirm()
        assert await is_reported(service)

        for method, _, path, body in sent:
            status, problem = await service.send(method, path, body)
            assert (status, (problem or {}).get("code")) == (503, "database-went-back"), path
            assert await content(database) == before, (method, path)
        await service.client.send_bookie_heartbeat("b1", beat())

        await database.execute("INSERT INTO attempts VALUES ($1, 'it is back')", NOBODY)
        await until(lambda: is_ready(service), "the database is back")
        for method, _, path, body in sent:
            status, problem = await service.send(method, path, body)
            assert status < 300, (method, path, problem)
            if path not in {"/v1/witnesses", _COPIES}:
                before, old = await content(database), before
                assert before != old, f"{method} {path} is no change"
