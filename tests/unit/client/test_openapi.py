"""The API's description, metrics and answers, as a stranger sees them."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.outside.attack import hostile, slow
from tests.outside.attack.arena import Arena, attack
from tests.outside.attack.meters import Meters
from tests.outside.attack.report import Report
from tests.support.scrape import scraped

pytestmark = pytest.mark.asyncio(loop_scope="package")

CONFIG = Path(__file__).with_name("schemathesis.toml")


async def test_examples_are_what_their_schemas_say(cluster: Cluster) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{cluster.gateways[0]}/openapi.json") as answer,
    ):
        description = await answer.json()
    checked = 0
    for path, item in description["paths"].items():
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
    assert checked > 100


async def test_generated_requests_get_described_answers(cluster: Cluster, tmp_path: Path) -> None:
    async with Client(*cluster.gateways) as client:
        for state in ("empty", "with an entry", "closed", "with a password"):
            ledger = await client.create_ledger(password="p" if "password" in state else None)
            if state != "empty":
                await ledger.append(b'{"json":"too"}')
            if state == "closed":
                await ledger.close()
        await (await client.create_log("events")).append(b'{"in":"events"}')

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(CONFIG), "run", cluster.gateways[0] + "/openapi.json",
        "--phases", "examples,coverage,fuzzing", "--checks", "all", "--max-examples", "3",
        "--generation-deterministic", "--no-color", "--suppress-health-check", "all",
        "--request-timeout", "300", "--max-response-time", "300", "--workers", "1",
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.unit.client.schemathesis_hooks"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode(errors="replace")[-20_000:]


SEED = 1
CAMPAIGNS = {
    "numbers": hostile.numbers,
    "requests": hostile.requests,
    "framing": hostile.framing,
    "aborts": slow.aborts,
}
"""Those that are over when the last answer is there: no deadline has to pass."""


async def test_strangers_get_documented_answers_unnoticed_by_others(cluster: Cluster) -> None:
    report = Report(seed=SEED)
    arena = Arena(cluster, Meters(cluster), report, requests=200, seconds=600.0)

    await attack(arena, CAMPAIGNS, before_s=0.5)

    assert not report.findings, report.page()
    assert report.requests > 600
    assert report.bystander["appends"] > 0
    assert report.bystander["followed"] >= report.bystander["appends"]


async def test_the_scrape_config_gets_the_metrics_of_every_service(cluster: Cluster) -> None:
    found = await scraped("prometheus.yml", cluster.data)

    assert {*found} == {name for name in cluster.names if name not in ("postgres", "redis")}
    assert all("process_cpu_seconds_total" in text for text in found.values())
