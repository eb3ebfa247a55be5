"""The description of logs is held against what the gateway does."""

import asyncio
import os
import sys
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.logs.support import Http
from tests.logs.test_http import ENTRIES, appended, http, log

__all__ = ["http", "log"]

CONFIG = Path(__file__).with_name("schemathesis.toml")


async def test_examples_are_what_their_schemas_say(http: Http) -> None:
    description = (await http.ask("GET", "/openapi.json")).json
    checked = 0
    for path, item in description["paths"].items():
        if not path.startswith("/v1/logs"):
            continue
        for method, operation in item.items():
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


@pytest.mark.timeout(900)
async def test_generated_requests_are_answered_as_described(log: Http, tmp_path: Path) -> None:
    await log.ask("PUT", "/v1/logs/events", {})
    await appended(log, {"json": {"in": "log"}})
    await log.ask("POST", ENTRIES.replace("/log/", "/events/"), {"json": {"in": "events"}})

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(CONFIG), "run", log.urls[0] + "/openapi.json",
        "--include-path-regex", "^/v1/logs", "--phases", "examples,coverage,fuzzing",
        "--checks", "all", "--max-examples", "3", "--generation-deterministic", "--no-color",
        "--suppress-health-check", "all", "--request-timeout", "300", "--workers", "1",
        "--max-response-time", "300",
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.gateway.schemathesis_hooks"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode(errors="replace")[-20_000:]
