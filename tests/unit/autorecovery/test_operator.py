"""Operators: their commands to bookies, and the alerts, panels and traces that they look at."""

import asyncio
import os
import re
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from loadtest.cluster import Cluster, running
from loadtest.ports import free_ports
from loadtest.stores import Stores
from loadtest.waiting import DeadlineMissed
from quorumlog.client import Client, Ledger, Record
from quorumlog.errors import NotEnoughBookies
from quorumlog.net import trace
from services.local.config import ROOT
from tests.support.answering import answering
from tests.support.commands import told
from tests.support.scrape import scraped
from tests.support.waiting import MENDED_S, UNHURRIED, until
from tests.unit.autorecovery.test_heal import contents, written

PATIENT = {"ABANDONED_S": "3600", "SILENT_S": "3600", "IN_RECOVERY_S": "3600", "AUDIT_S": "0.5"}
"""No gateway counts as gone, however slow it is: a ledger is fenced only by mistake."""
IN_FLIGHT_BYTES = 1 << 20
FIT = 16
"""Appends of 64 KiB."""
SETTINGS = {
    "ZONES_MIN": "3",
    **UNHURRIED,
    "LEDGER_IN_FLIGHT_BYTES_MAX": str(IN_FLIGHT_BYTES),
}


async def quorumlog(cluster: Cluster, *words: str) -> tuple[int, Any]:
    """What an operator's command ends with, and the JSON that it prints."""
    environment = os.environ | {
        "QUORUMLOG_GATEWAY": cluster.gateways[0],
        "CLUSTER_SECRET_FILE": str(cluster.secret_file),
    }
    status, out, _ = await told(*words, "--json", environment=environment)
    return status, orjson.loads(out) if out else None


async def until_state(client: Client, name: str, state: str) -> None:
    async def has_state() -> bool:
        states = {found["id"].split("@")[0]: found["state"] for found in await client.bookies()}
        return bool(states.get(name) == state)

    await until(has_state, f"the cluster knows that {name} is {state}", MENDED_S)


async def until_told(cluster: Cluster, *words: str) -> None:
    """A command again and again, where a machine is so slow that a service seems silent."""

    async def is_reported() -> bool:
        return (await quorumlog(cluster, *words))[0] == 0

    await until(is_reported, " ".join(words), MENDED_S)


async def members(client: Client, ledger: Ledger) -> set[str]:
    row = await client.ledger(ledger.ledger_id).info()
    return {member for fragment in row["fragments"] for member in fragment["bookies"]}


async def test_operators_commands_to_bookies_are_carried_out(stores: Stores) -> None:
    # Nobody counts as lost here: what moves is moved by the drain.
    async with (
        running(
            stores,
            bookies=5,
            gateways=1,
            zones=("a", "b", "c"),
            environment=PATIENT | SETTINGS,
            lost_bookie_delay_s=3600,
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledgers = [await written(client, 20) for _ in range(6)]
        ledgers.append((await client.create_ledger(), []))
        spread = 0
        for ledger, _ in ledgers:
            first = (await ledger.info())["fragments"][0]["bookies"]
            if not (await ledger.info()).get("degraded"):  # told, where a bookie was silent
                zones = {"abc"[(int(member[len("bookie-")]) - 1) % 3] for member in first}
                assert zones == {"a", "b", "c"}
                spread += 1
        if not spread:
            raise DeadlineMissed("a bookie of each zone lives", spread, MENDED_S)
        for ledger, _ in ledgers[:3]:
            await ledger.close()
        await a_read_only_bookie_takes_nothing_and_too_few_zones_are_told(cluster, client, ledgers)
        await a_bookie_tells_its_damage_and_pauses_its_scrub(cluster)
        await a_drained_bookie_is_named_by_nothing(cluster, client, ledgers)
        await a_bookie_that_fails_is_quarantined(cluster, client)
        await slow_bookies_are_felt_as_429(cluster, client)


async def a_read_only_bookie_takes_nothing_and_too_few_zones_are_told(
    cluster: Cluster, client: Client, ledgers: list[tuple[Ledger, list[bytes]]]
) -> None:
    await until_told(cluster, "bookie", "readonly", "bookie-3")  # the only one in its zone
    await until_state(client, "bookie-3", "read-only")

    async def is_reported() -> bool:
        made = await client.create_ledger()
        return "bookie-3@1" not in await members(client, made) and bool(
            (await made.info()).get("degraded")
        )

    await until(is_reported, "new ledgers are elsewhere, and told to be degraded", MENDED_S)
    for ledger, payloads in ledgers:
        assert await contents(ledger) == payloads
    await until_told(cluster, "bookie", "writable", "bookie-3")
    await until_state(client, "bookie-3", "writable")


async def a_bookie_tells_its_damage_and_pauses_its_scrub(cluster: Cluster) -> None:
    reported: dict[str, Any] = {}

    async def has(*words: str) -> bool:
        nonlocal reported
        status, reported = await quorumlog(cluster, "bookie", *words, "bookie-2")
        return status == 0

    await until(lambda: has("damage"), "nothing is damaged", MENDED_S)
    assert reported == {"bookie": "bookie-2@1", "entries": [], "stretches": [], "is_cut": False}
    for command, paused in (("pause", True), ("resume", False)):
        await until(lambda command=command: has(command), f"{command} is obeyed", MENDED_S)  # type: ignore[misc]
        assert (reported["bookie"], reported["paused"]) == ("bookie-2@1", paused)


async def a_drain_that_waits_says_why(cluster: Cluster) -> None:
    async def is_reported() -> bool:
        _, left = await quorumlog(cluster, "bookie", "drain", "bookie-1")
        return bool(left and left.get("why", "").startswith("copying is paused"))

    await until(is_reported, "the command says that copying is paused", MENDED_S)

    def is_logged() -> bool:
        lines = cluster.log("autorecovery-1").splitlines()
        return any('"drain-waits"' in line and "copying is paused" in line for line in lines)

    await until(is_logged, "the log says so too", MENDED_S)


async def a_drained_bookie_is_named_by_nothing(
    cluster: Cluster, client: Client, ledgers: list[tuple[Ledger, list[bytes]]]
) -> None:
    # It lives, and ledgers name it.
    assert (await quorumlog(cluster, "bookie", "decommission", "bookie-1"))[0] != 0
    assert (await quorumlog(cluster, "bookie", "info", "bookie-9"))[0] == 4
    await until_told(cluster, "repair", "pause")
    await until_told(cluster, "bookie", "drain", "bookie-1")
    await a_drain_that_waits_says_why(cluster)
    await until_told(cluster, "repair", "resume")
    await until_state(client, "bookie-1", "draining")
    for ledger, payloads in ledgers[3:]:
        payloads.append(b"while it is drained")
        await ledger.append(payloads[-1])

    async def has(verb: str) -> bool:
        # Again, where a machine is so slow that a command finds a service silent.
        wait = ("--wait", "--timeout", "20")
        status, left = await quorumlog(cluster, "bookie", verb, "bookie-1", *wait)
        return status == 0 and left["done"] is True and left["ledgers"] == 0

    await until(lambda: has("drain"), "nothing names the bookie", MENDED_S)
    for ledger, payloads in ledgers[3:]:  # none of them was fenced
        payloads.append(b"after")
        await ledger.append(payloads[-1])

    await cluster.kill("bookie-1")

    await until(lambda: has("decommission"), "it is decommissioned", MENDED_S)
    assert "bookie-1@1" not in {found["id"] for found in await client.bookies()}
    for ledger, payloads in ledgers:
        assert "bookie-1@1" not in await members(client, ledger)
        assert await contents(ledger) == payloads


async def a_bookie_that_fails_is_quarantined(cluster: Cluster, client: Client) -> None:
    """It tells that it lives, and can't be reached where it says that it is."""
    await cluster.stop("gateway-1")
    cluster.notify("gateway-1", QUARANTINE_FAILURES="1", QUARANTINE_S="3600")
    await cluster.restart("gateway-1")
    await cluster.stop("bookie-5")
    cluster.notify("bookie-5", ADVERTISED_URL=f"http://127.0.0.1:{free_ports(1)[0]}")
    cluster.start("bookie-5")

    async def is_quarantined() -> bool:
        all_four = await client.create_ledger(ensemble_size=4, write_quorum=3)
        await all_four.append(b"one of them does not get it")
        status, found = await quorumlog(cluster, "cluster", "status")
        return status == 0 and "bookie-5" in found["quarantined"]

    await until(is_quarantined, "it is told", MENDED_S, passing=(NotEnoughBookies,))
    await until_state(client, "bookie-5", "writable")
    named = [await members(client, await client.create_ledger()) for _ in range(3)]
    found = (await quorumlog(cluster, "cluster", "status"))[1]["quarantined"]
    if found != ["bookie-5"]:  # then there are too few others
        raise DeadlineMissed("the others answer in time", found, MENDED_S)
    assert "bookie-5@1" not in set().union(*named)


async def slow_bookies_are_felt_as_429(cluster: Cluster, client: Client) -> None:
    """Two of three stand still: what can't be acknowledged is refused, not kept without bounds."""
    ledger = await client.create_ledger()
    slow = sorted(await members(client, ledger))[:2]
    url = f"{cluster.gateways[0]}/v1/ledgers/{ledger.ledger_id}/entries"
    body = {"data": bytes(64 << 10), "headers": {"Content-Type": "application/octet-stream"}}
    async with aiohttp.ClientSession() as session:

        async def status() -> tuple[int, str | None]:
            async with session.post(url, **body) as answer:  # type: ignore[arg-type]
                await answer.read()
                return answer.status, answer.headers.get("Retry-After")

        for member in slow:
            cluster.pause(member.partition("@")[0])
        sent = [asyncio.create_task(status()) for _ in range(60)]
        try:
            await until(lambda: sum(task.done() for task in sent) >= 60 - FIT, "the rest is told")
            async with session.get(f"{cluster.gateways[0]}/metrics") as answer:
                metrics = await answer.text()
        finally:
            for member in slow:
                cluster.resume(member.partition("@")[0])
        answers = await asyncio.gather(*sent)
    taken = re.search(r"^quorumlog_gateway_append_in_flight_bytes (\S+)", metrics, re.MULTILINE)
    assert taken is not None
    assert float(taken[1]) <= IN_FLIGHT_BYTES
    refused = [retry_after for code, retry_after in answers if code == 429]
    assert None not in refused
    assert len(refused) >= 60 - FIT


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
        compacted = await client.create_log("compacted", cleanup_policy="compact")
        await compacted.append(Record(b"one", key=b"key"))

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
