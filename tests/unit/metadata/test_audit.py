"""The audit log in the database: one row of each audited request that changed something, for a while."""

import asyncio
import base64
import json
import secrets
from typing import Any
from uuid import uuid4

from loadtest.stores import Stores
from quorumlog.header import AUDITED
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.token_bodies import AuditedRequest
from services.metadata import audit
from services.metadata.app import ROUTES
from services.metadata.database import Database
from services.metadata.tokens import AuditStore
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import PATIENT_S, WAITING, Service, serving
from tests.unit.metadata.test_unchecked import LOG, requests_of

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


async def test_a_reader_that_goes_on_after_a_number_misses_no_row_that_is_committed_later(
    service: Service, stores: Stores
) -> None:
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


async def test_one_round_deletes_all_that_is_kept_no_longer(
    service: Service, stores: Stores
) -> None:
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
