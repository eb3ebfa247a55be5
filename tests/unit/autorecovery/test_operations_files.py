"""Dashboard, alert rules and runbook speak of what is there."""

import re
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from loadtest.waiting import DeadlineMissed
from quorumlog.client import Client
from quorumlog.net import trace
from services.local.config import ROOT
from tests.support.answering import answering
from tests.support.scrape import scraped
from tests.support.waiting import until

FOLDER = ROOT / "deploy" / "monitoring"
RUNBOOK = "docs/guides/runbook.md"
NAME = re.compile(r"\b(?:quorumlog|bookie|process)_[a-z0-9_]+")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def rules() -> list[dict[str, str]]:
    """The alerts, by the few lines that each of them has."""
    blocks = (FOLDER / "alerts.yml").read_text().split("- alert: ")[1:]
    found = []
    for block in blocks:
        lines = dict(re.findall(r"^ +(expr|labels|runbook): (.+)$", block, re.MULTILINE))
        found.append(lines | {"alert": block.split("\n", 1)[0]})
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads((FOLDER / "dashboard.json").read_bytes())["panels"]
    return found


def test_every_alert_has_its_section_in_the_runbook() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    for rule in rules():
        page, _, anchor = rule["runbook"].strip('"').partition("#")
        assert (page, anchor in anchors) == (RUNBOOK, True), rule["alert"]
        assert re.fullmatch(r"{severity: (info|warning|critical)}", rule["labels"])
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_panels_have_places_of_their_own() -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()}
    assert len(places) == len(panels()) == len({panel["id"] for panel in panels()})


async def exported(cluster: Cluster, session: aiohttp.ClientSession) -> set[str]:
    """The names of all series that the services export, one service of each kind."""
    names: set[str] = set()
    for name in ("metadata-1", "bookie-1", "gateway-1", "autorecovery-1"):
        url = f"{cluster.url(name)}/metrics"
        async with session.get(url) as answer:
            lines = (await answer.text()).splitlines()
        names |= {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    return names


async def test_every_metric_they_name_is_exported(stores: Stores) -> None:
    texts = [rule["expr"] for rule in rules()]
    texts += [target["expr"] for panel in panels() for target in panel["targets"]]
    named = {name for text in texts for name in NAME.findall(text)}
    assert len(named) > 30
    async with (
        # Certificates have metrics too.
        running(stores, bookies=3, gateways=1, tls=True) as cluster,
        Client(*cluster.gateways) as client,
        cluster.session() as session,
    ):
        ledger = await client.create_ledger()
        await ledger.append(b"one")
        # Records are counted by log once there are some, and so are consumers and queues.
        log = await client.create_log("log")
        await log.append(b"one")
        await log.queue("mail").create()
        async with log.consumer("me"):
            pass

        async def missing() -> set[str]:
            return named - await exported(cluster, session)

        async def is_all_there() -> bool:
            return not await missing()

        try:
            await until(is_all_there, "all names are exported")
        except DeadlineMissed as late:
            late.add_note(f"missing: {await missing()}")
            raise
        found = await scraped("prometheus-tls.yml", cluster.data)
        assert {*found} == {name for name in cluster.names if name not in ("postgres", "redis")}


async def test_a_trace_continues_in_the_next_service() -> None:
    heard: list[str | None] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(request.headers.get(trace.HEADER))
        return web.Response()

    async with (
        answering(hear) as url,
        aiohttp.ClientSession(trace_configs=[trace.config()]) as session,
    ):
        for traceparent in (TRACEPARENT, None):
            trace.begin("r", traceparent)
            async with session.get(url) as answer:
                assert answer.status == 200
    first, second = heard
    assert first is not None
    assert first.split("-")[1] == TRACEPARENT.split("-")[1]
    assert first != TRACEPARENT  # this hop has an id of its own
    assert second is None


def test_valid_traces_are_logged_and_invalid_ones_are_not() -> None:
    trace.begin("r-1", TRACEPARENT)
    reported = trace.in_logs()
    assert (reported["request_id"], reported["trace_id"]) == (
        "r-1",
        "4bf92f3577b34da6a3ce929d0e0e4736",
    )
    assert reported["span_id"] != "00f067aa0ba902b7"
    for invalid in (None, "", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "01-abc", "x" * 4000):
        trace.begin("r-2", invalid)
        assert trace.in_logs() == {"request_id": "r-2"}
