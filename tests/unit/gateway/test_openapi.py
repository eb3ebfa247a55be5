"""The description says what the gateway does: every route, every answer, and nothing else."""

import re
from typing import Any

import pytest
from aiohttp import web

from quorumlog.errors import codes
from quorumlog.wire import problems
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fake_engine import FakeEngine


@pytest.fixture
async def description(gateway: Gateway) -> dict[str, Any]:
    answer = await gateway.ask("GET", "/openapi.json")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def operations(description: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, item in description["paths"].items()
        for method, operation in item.items()
    ]


async def test_routes_and_description_are_the_same(description: dict[str, Any]) -> None:
    app = build_app(FakeEngine(), Limits())
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if isinstance(route, web.ResourceRoute) and route.resource is not None
    }

    described = {(method, path) for method, path, _ in operations(description)}
    heads = {("HEAD", path) for method, path in described if method == "GET"}

    assert routes == described | heads


async def test_each_operation_tells_its_errors_with_examples(description: dict[str, Any]) -> None:
    for _method, path, operation in operations(description):
        for status, response in operation["responses"].items():
            assert "X-Request-Id" in response["headers"], path
            if int(status) < 400:
                continue
            examples = response["content"][problems.CONTENT_TYPE]["examples"]
            assert examples, path
            for code, example in examples.items():
                assert codes()[code].status == int(status), (path, code)
                assert f"`{code}`" in response["description"], (path, code)
                assert example["value"]["code"] == code, (path, code)
        if "429" in operation["responses"]:
            assert "Retry-After" in operation["responses"]["429"]["headers"], path


async def test_the_pages_name_no_other_host(gateway: Gateway) -> None:
    for path in ("/docs", "/problems/invalid"):
        page = (await gateway.ask("GET", path)).body.decode()

        assert "<html" in page
        assert not re.findall(r"(?:https?:)?//[a-z]", page), path


async def test_without_tokens_the_caller_is_everyone(gateway: Gateway) -> None:
    answer = await gateway.ask("GET", "/v1/caller")

    assert answer.json == {
        "who": "everyone",
        "requires_tokens": False,
        "grants": ["admin:*"],
        "expires_at": None,
    }
