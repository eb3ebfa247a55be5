"""While the database lacks an answered change, no route changes a row (rule 18a): every one is tried."""

from base64 import b64encode
from dataclasses import replace
from typing import Any, Final

import pytest

from loadtest.stores import Stores
from quorumlog.net.gateway_clients import LogClient, TokenClient, TransactionClient
from quorumlog.net.metadata_client import RepairClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of, witness_of
from quorumlog.wire.repair_bodies import RepairAdd
from quorumlog.wire.token_bodies import TokenFields
from services.metadata.app import ROUTES
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, is_ready, serving, swapped
from tests.unit.metadata.test_bookies import beat, cookie
from tests.unit.metadata.test_went_back import NOBODY, is_reported

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


async def test_no_route_changes_a_row_while_the_database_lacks_an_answered_change(
    stores: Stores,
) -> None:
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
