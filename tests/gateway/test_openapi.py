"""The description says what the gateway does: every route, every answer, and nothing else."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from aiohttp import web

from quorumlog.errors import codes
from quorumlog.wire import problems
from services.gateway.app import build_app
from services.gateway.edge.limits import Limits
from tests.gateway.conftest import Gateway
from tests.gateway.fake_engine import FakeEngine

HIDDEN = re.compile(r"/internal/")
CONFIG = Path(__file__).with_name("schemathesis.toml")


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


async def test_examples_are_what_their_schemas_say(description: dict[str, Any]) -> None:
    checked = 0
    for method, path, operation in operations(description):
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        for content in (body.get("content", {}) for body in bodies):
            for media in content.values():
                schema = media["schema"] | {"components": description["components"]}
                for name, example in media.get("examples", {}).items():
                    try:
                        jsonschema.validate(example["value"], schema)
                    except jsonschema.ValidationError as error:
                        pytest.fail(f"{method} {path} {name}: {error.message}")
                    checked += 1
    assert checked > 50


async def test_the_pages_name_no_other_host(gateway: Gateway) -> None:
    for path in ("/docs", "/problems/invalid"):
        page = (await gateway.ask("GET", path)).body.decode()

        assert "<html" in page
        assert not re.findall(r"(?:https?:)?//[a-z]", page), path


@pytest.mark.timeout(900)
async def test_generated_requests_are_answered_as_described(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.engine.wait_s_max = 0.01
    for state in ("empty", "with an entry", "closed", "with a password"):
        ledger_id = await gateway.create(password="p" if "password" in state else None)
        if state != "empty":
            gateway.engine.entries[ledger_id].append(b'{"json":"too"}')
        if state == "closed":
            await gateway.engine.close(ledger_id)

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(CONFIG), "run", gateway.url + "/openapi.json",
        "--phases", "examples,coverage,fuzzing", "--checks", "all", "--max-examples", "5",
        "--generation-deterministic", "--no-color",
        "--suppress-health-check", "all", "--request-timeout", "300", "--workers", "1",
        "--max-response-time", "300",
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.gateway.schemathesis_hooks"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode(errors="replace")[-20_000:]
