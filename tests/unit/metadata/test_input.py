"""Nothing that a client sends makes a 5xx: every field of every body, replaced by nasty values."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.bodies import document_of
from services.metadata.app import ROUTES
from tests.unit.metadata.support import DRAFT, Service

NASTY: list[Any] = [
    None, True, -1, 0, 1.5, 2**63 - 1, 2**63, 10**400, "", "\0", "a\0b", "\ud800", "x" * 70_000,
    "../..", "'; DROP TABLE ledgers; --", [], {}, [[]], {"": ""}, {"\0": "\0"},
]  # fmt: skip


async def bodies(service: Service) -> list[tuple[str, str, Any]]:
    """A legal request of every kind that has a body."""
    row = document_of(await service.client.create(DRAFT))
    draft = row | {"ledger_id": -1}
    missed = [{"member": "b1@1", "first": 0, "last": 4}]
    ledger_id = row["ledger_id"]
    cookie = {
        "incarnation": 1,
        "cluster_id": await service.client.cluster_id(),
        "instance": "i",
        "directories": ["/d"],
        "boots": 1,
    }
    quorum = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
    item = {"ledger_id": ledger_id, "first_offset": 0}
    log = {"name": "a-log", "settings": {"quorum": quorum}, "items": [item]}
    item = {"ledger_id": ledger_id, "member": "b1@1", "ranges": [[0, 4]], "survivors": 2}
    attempt = new_attempt()
    return [
        ("POST", "/v1/ledgers", {"row": draft, "attempt": attempt, "once": {"token": new_attempt(), "content": "0" * 32}}),
        ("PUT", f"/v1/ledgers/{ledger_id}", {"row": row, "attempt": attempt, "missed": missed}),
        ("DELETE", f"/v1/ledgers/{ledger_id}", {"version": 7, "attempt": attempt}),
        ("PUT", "/v1/bookies/b1/cookie", {"cookie": cookie, "version": 7, "attempt": attempt}),
        ("PUT", "/v1/bookies/b1/heartbeat", {"incarnation": 1, "url": "u", "zone": "z",
                                             "state": "writable", "free_bytes": 1, "ttl_s": 1}),
        ("PUT", "/v1/services/gateway/g/heartbeat", {"url": "u", "state": "s", "ttl_s": 1}),
        ("POST", "/v1/logs", {"row": log, "attempt": attempt}),
        ("PUT", "/v1/logs/a-log", {"row": log, "attempt": attempt}),
        ("DELETE", "/v1/logs/a-log", {"version": 7, "attempt": attempt}),
        ("POST", "/v1/ledger-heads", {"ledgers": [ledger_id]}),
        (
            "POST",
            "/v1/ledger-proofs",
            {"holder": "b1", "ledgers": [{"ledger_id": ledger_id, "attempts": []}]},
        ),
        ("POST", "/v1/repairs", {"items": [item]}),
        ("POST", "/v1/repairs/claim", {"worker": "w", "lease_s": 1, "limit": 1}),
        ("POST", f"/v1/repairs/{ledger_id}/b1@1/progress", {"worker": "w", "version": 1,
                                                            "ranges": [[0, 1]], "lease_s": 1}),
        ("POST", f"/v1/repairs/{ledger_id}/b1@1/fail", {"worker": "w", "version": 1,
                                                        "detail": "d"}),
        ("PUT", "/v1/leases/auditor", {"holder": "h", "ttl_s": 1}),
    ]  # fmt: skip


def spoiled(body: Any) -> Iterator[Any]:
    """The body with one of its values replaced, for every value and every nasty one."""
    if isinstance(body, dict):
        for key, value in body.items():
            yield {k: v for k, v in body.items() if k != key}
            yield from ({**body, key: inner} for inner in spoiled(value))
        yield {**body, "unknown": 1}
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from ([*body[:index], inner, *body[index + 1 :]] for inner in spoiled(value))
    yield from NASTY


async def test_no_body_makes_a_5xx(service: Service) -> None:
    failures = []

    async def send(method: str, path: str, body: Any) -> None:
        # json.dumps lets through what orjson would refuse to send.
        status, answer = await service.send(method, path, json.dumps(body).encode())
        if status >= 500:
            failures.append((status, method, path, str(body)[:500], answer))

    for method, path, legal in await bodies(service):
        for group in _grouped(spoiled(legal), 20):
            await asyncio.gather(*(send(method, path, body) for body in group))

    assert failures == []


async def test_an_object_with_two_equal_keys_is_refused(service: Service) -> None:
    for method, path, legal in await bodies(service):
        key, value = next(iter(legal.items()))
        twice = f"{{{json.dumps(key)}: {json.dumps(value)}, {json.dumps(legal)[1:]}"
        status, answer = await service.send(method, path, twice.encode())

        assert status == 400, (method, path)
        assert answer["code"] == "bad-request"


def _grouped(values: Iterator[Any], size: int) -> Iterator[list[Any]]:
    group = []
    for value in values:
        group.append(value)
        if len(group) == size:
            yield group
            group = []
    yield group


async def test_no_path_or_query_makes_a_5xx(service: Service) -> None:
    texts = [
        "",
        "%00",
        "a%00",
        "%ff",
        "%ED%A0%80",
        "9" * 30,
        "-1",
        "1.0",
        "%2e%2e",
        "a" * 5000,
        "'",
    ]
    failures = []

    for route in (each.operation for each in ROUTES):
        path = route.path.replace("{", "").replace("}", "")
        for text in texts:
            places = [f"{path}?{name}={text}" for name in ("limit", "after", "bookie", "x")]
            places += [
                route.path.replace(f"{{{name}}}", text).replace("{", "").replace("}", "")
                for name in ("ledger_id", "name", "member", "kind", "id")
                if f"{{{name}}}" in route.path
            ]
            if route.path == "/v1/changes":
                places = [f"{path}?x={text}"]
            for place in places:
                status, answer = await service.send(route.method, place)
                if status >= 500:
                    failures.append((status, route.method, place, answer))

    assert failures == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_another_media_type_is_refused(service: Service, kind: str) -> None:
    status, problem = await service.send(
        "POST", "/v1/ledgers", b"{}", headers={"Content-Type": kind}
    )

    assert (status, problem["code"]) == (415, "unsupported-media-type")


async def test_every_route_is_described(service: Service) -> None:
    _, document = await service.send("GET", "/openapi.json")

    described = {(m.upper(), path) for path, item in document["paths"].items() for m in item}
    assert described == {(r.operation.method, r.operation.path) for r in ROUTES}
    for item in document["paths"].values():
        for operation in item.values():
            assert operation["summary"]


async def test_metrics_cover_requests_and_both_databases(service: Service) -> None:
    await service.client.bookies()

    async with service.session.get(f"{service.url}/metrics") as response:
        text = await response.text()

    assert (
        'quorumlog_metadata_requests_total{method="GET",route="/v1/bookies",status="200"}' in text
    )
    assert "quorumlog_metadata_postgres_up 1.0" in text
    assert "quorumlog_metadata_redis_up 1.0" in text


async def test_methods_that_no_route_has_are_one_label_of_the_metrics(service: Service) -> None:
    for method in ("PROPFIND", "MKCOL", "PURGE"):
        async with service.session.request(method, f"{service.url}/v1/bookies") as response:
            assert response.status == 405
    async with service.session.get(f"{service.url}/metrics") as response:
        text = await response.text()

    assert 'quorumlog_metadata_requests_total{method="other",' in text
    assert "PROPFIND" not in text
