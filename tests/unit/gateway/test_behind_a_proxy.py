"""Behind a proxy that it trusts, a gateway counts and notes clients by their own addresses."""

import logging
from ipaddress import ip_network

import pytest

from quorumlog.net.connections import ListenLimits
from quorumlog.net.proxies import Proxies
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import within
from tests.unit.gateway.conftest import received, running
from tests.unit.gateway.test_budgets import OCTETS, ask, strangers, until_gauge

ENTRIES = "/v1/ledgers/1/entries"
LISTEN = ListenLimits(
    drain_timeout_s=0.5,
    proxies=Proxies([ip_network("127.0.0.0/8")], "x-forwarded-for"),
)


def by(client: str) -> dict[str, str]:
    return {"X-Forwarded-For": client}


async def test_each_client_of_a_proxy_has_its_own_share() -> None:
    limits = Limits(
        waiters_max=8, peer_waiters_max=1, held_bytes_max=800_000, peer_held_bytes_max=1
    )
    path = f"{ENTRIES}?wait_ms=60000"
    async with running(limits=limits, listen=LISTEN) as gateway:
        await gateway.create()
        gateway.engine.wait_s_min = 3600.0
        one = ask(path).replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n")
        async with strangers(gateway, 7, one):
            await until_gauge(gateway, "waiters", 7, "seven of one client wait")
            gateway.engine.wait_s_min = 0.0

            greedy = await gateway.ask("GET", f"{ENTRIES}?wait_ms=10", headers=by("192.0.2.1"))
            fair = await gateway.ask("GET", f"{ENTRIES}?wait_ms=10", headers=by("192.0.2.2"))

        assert (greedy.status, greedy.code) == (429, "overloaded")
        assert fair.status == 200
        # What is answered without a task is counted by the client's address too.
        done = await gateway.ask("POST", ENTRIES, b"x", headers={**OCTETS, **by("192.0.2.3")})
        assert done.status == 201
        await until_gauge(gateway, "held_bytes", 0, "all is given back")
        assert gateway.listener.connections.of("127.0.0.1") == 0


async def test_streams_and_sockets_pass_a_proxy() -> None:
    async with running(listen=LISTEN) as gateway:
        ledger_id = await gateway.create()
        path = f"{gateway.url}/v1/ledgers/{ledger_id}"
        lines = {"Content-Type": "application/x-ndjson", **by("192.0.2.1")}
        streamed = await gateway.ask("POST", ENTRIES, b'{"json":1}\n{"json":2}\n', headers=lines)
        async with gateway.session.ws_connect(f"{path}/ws", headers=by("192.0.2.2")) as sent:
            await sent.send_str('{"text":"a"}')
            acknowledged = await received(sent)
        accept = {"Accept": "text/event-stream", **by("192.0.2.3")}
        async with (
            within("an event comes"),
            gateway.session.get(f"{path}/entries", headers=accept) as tail,
        ):
            event = await tail.content.readuntil(b"\n\n")

    assert (streamed.status, acknowledged["last_entry"]) == (200, 2)
    assert b"data: " in event


async def test_the_audit_log_names_the_client_s_address(caplog: pytest.LogCaptureFixture) -> None:
    async with running(listen=LISTEN) as gateway:
        ledger_id = await gateway.create()
        with caplog.at_level(logging.INFO, "audit"):
            path = f"/v1/ledgers/{ledger_id}"
            said = by("203.0.113.1, 192.0.2.7")
            assert (await gateway.ask("POST", f"{path}/close", headers=said)).status == 200
            assert (await gateway.ask("DELETE", path, headers=said)).status == 204

    found = [line.__dict__["remote"] for line in caplog.records if line.name == "audit"]
    assert found
    assert set(found) == {"192.0.2.7"}
