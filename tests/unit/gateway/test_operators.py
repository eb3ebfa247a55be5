"""What a gateway asks other services for an operator, and what it makes of odd answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog import errors
from quorumlog.header import AUDITED
from quorumlog.net.listen import listening
from quorumlog.net.responses import problem_response
from quorumlog.wire.bodies import ServiceHeartbeat
from services.gateway.app import _ROOM
from services.gateway.edge.operators import ANSWER_BYTES_MAX, BODY_BYTES_MAX
from tests.outside.attack.arena import made_token
from tests.support.waiting import MENDED_S, UNHURRIED, until
from tests.unit.gateway.engine.support import World, world_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"Content-Type": "application/json"}
LINES = {"Accept": "application/x-ndjson"}


@dataclass
class Operated:
    """A cluster whose gateway requires tokens, and an operator with a token for everything."""

    cluster: Cluster
    session: aiohttp.ClientSession
    token: str

    async def ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and body of an answer: JSON, or a list of lines."""
        url, data = self.cluster.gateways[0] + path, body
        if body is not None and not isinstance(body, bytes):
            data = orjson.dumps(body)
        shown = {"Authorization": f"Bearer {token or self.token}", **headers}
        if body is not None:
            shown |= JSON
        async with self.session.request(method, url, data=data, headers=shown) as answer:
            text = await answer.read()
            if answer.content_type == "application/x-ndjson":
                return answer.status, [orjson.loads(line) for line in text.splitlines()]
            return answer.status, orjson.loads(text) if text else None

    async def until_state(self, bookie: str, state: str) -> None:
        async def has_state() -> bool:
            _, found = await self.ask("GET", "/v1/bookies")
            states = {one["id"].partition("@")[0]: one["state"] for one in found["bookies"]}
            return bool(states.get(bookie) == state)

        await until(has_state, f"{bookie} is {state}", MENDED_S)

    def audited(self, service: str, operation: str) -> list[dict[str, Any]]:
        """The lines of a service's audit log about an operation."""
        lines = [orjson.loads(line) for line in self.cluster.log(service).splitlines() if line]
        return [one for one in lines if one.get("logger") == "audit" and one["event"] == operation]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operated(servers: StoreServers) -> AsyncIterator[Operated]:
    environment = {**UNHURRIED, "REQUIRE_TOKENS": "1"}
    async with (
        running(
            servers.fresh(), bookies=4, gateways=2, environment=environment, tls=True
        ) as cluster,
        aiohttp.ClientSession() as session,
    ):
        yield Operated(cluster, session, await made_token(cluster, "admin:*"))


async def ledger(operated: Operated) -> int:
    status, made = await operated.ask("POST", "/v1/ledgers", {})
    assert status == 201
    path = f"/v1/ledgers/{made['ledger_id']}"
    assert (await operated.ask("POST", f"{path}/entries", {"text": "an entry"}))[0] == 201
    assert (await operated.ask("POST", f"{path}/close"))[0] == 200
    return int(made["ledger_id"])


async def test_a_bookie_tells_its_state_and_takes_another_one(operated: Operated) -> None:
    status, found = await operated.ask("GET", "/v1/bookies/bookie-1")
    assert (status, found["bookie"], found["state"]) == (200, "bookie-1@1", "writable")

    for state in ("read-only", "writable"):
        path = "/v1/bookies/bookie-1/state"
        status, found = await operated.ask("PUT", path, {"state": state})
        assert (status, found["state"]) == (200, state)
        await operated.until_state("bookie-1", state)
    for paused in (True, False):
        path = "/v1/bookies/bookie-1/maintenance"
        status, found = await operated.ask("PUT", path, {"paused": paused})
        assert (status, found["scrub"]["paused"]) == (200, paused)
    status, found = await operated.ask("GET", "/v1/bookies/bookie-1/damage")
    assert (status, found["entries"]) == (200, [])
    status, found = await operated.ask("GET", "/v1/bookies/bookie-1/drain")
    assert (status, found["bookie"], found["state"]) == (200, "bookie-1", "writable")


async def test_the_service_behind_names_the_client_and_not_the_gateway(operated: Operated) -> None:
    await operated.ask("PUT", "/v1/bookies/bookie-2/state", {"state": "writable"})
    await operated.ask("PATCH", "/v1/autorecovery", {"concurrency": 2})

    [put] = operated.audited("bookie-2", "put_state")
    [patched] = operated.audited("autorecovery-1", "patch_settings")
    stored = operated.audited("metadata-1", "patch_repair_settings")
    _, log = await operated.ask("GET", "/v1/audit?target=autorecovery")
    for line in (put, patched, stored[-1]):
        assert line["who"].startswith("the token attack ("), line
        assert line["remote"] == "127.0.0.1"
    [row] = log["audit"]
    assert (row["operation"], row["who"]) == ("patchAutorecovery", put["who"])
    assert row["via"].startswith("autorecovery ")


async def test_a_caller_that_is_no_gateway_speaks_for_itself(operated: Operated) -> None:
    asked = {
        "id": "3d0ca315-aff9-4fc2-be61-3b76b9a2d798",
        "who": "another client",
        "remote": "192.0.2.1",
        "operation": "x",
        "target": "y",
    }
    url = f"{operated.cluster.url('bookie-3')}/v1/state"
    async with (
        operated.cluster.session() as session,
        session.put(
            url, json={"state": "writable"}, headers={AUDITED: orjson.dumps(asked).decode()}
        ) as answer,
    ):
        assert answer.status == 200

    [line] = operated.audited("bookie-3", "put_state")
    assert line["who"].startswith("operator ")


async def test_autorecovery_tells_its_state_and_takes_settings(operated: Operated) -> None:
    status, found = await operated.ask("PATCH", "/v1/autorecovery", {"bytes_per_s": 1 << 20})
    assert (status, found["bytes_per_s"]) == (200, 1 << 20)
    await operated.ask("PATCH", "/v1/autorecovery", {"bytes_per_s": None, "concurrency": None})

    status, found = await operated.ask("GET", "/v1/autorecovery")
    [process] = found["autorecovery"]
    assert (status, process["url"]) == (200, operated.cluster.url("autorecovery-1"))
    assert {"id", "paused", "auditor", "queue"} <= process.keys()
    assert await operated.ask("GET", "/v1/repairs?after=0:bookie-1@1") == (
        200,
        {"repairs": [], "next": None},
    )
    assert await operated.ask("POST", "/v1/audits") == (202, {})
    assert await operated.ask("POST", "/v1/checks") == (202, {})


async def test_the_copies_of_a_ledger_are_compared(operated: Operated) -> None:
    path = f"/v1/ledgers/{await ledger(operated)}/check"

    async def is_whole() -> bool:
        reports = [await operated.ask(method, path) for method in ("GET", "POST")]
        return all(status == 200 and found["whole"] for status, found in reports)

    await until(is_whole, "all copies are there", MENDED_S)
    status, found = await operated.ask("GET", "/v1/ledgers/999999/check")
    assert (status, found["code"]) == (404, "no-such-ledger")


async def test_requested_checks_beyond_the_limit_get_overloaded(operated: Operated) -> None:
    path = f"/v1/ledgers/{await ledger(operated)}/check"

    async def is_refused() -> bool:
        statuses = [
            status
            for status, _ in await asyncio.gather(*(operated.ask("GET", path) for _ in range(30)))
        ]
        assert set(statuses) <= {200, 429}
        return 429 in statuses

    await until(is_refused, "more checks are requested than run at once")
    assert (await operated.ask("GET", path))[0] == 200


async def test_lines_of_progress_are_passed_on(operated: Operated) -> None:
    assert await operated.ask("GET", "/v1/rebuild") == (
        200,
        {"is_empty": False, "was_rebuilt": False},
    )
    await ledger(operated)

    status, lines = await operated.ask("POST", "/v1/rebuild", {"dry_run": True}, **LINES)

    assert status == 200
    assert len(lines) > 1
    assert lines[-1]["report"]["dry_run"] is True
    status, found = await operated.ask("GET", "/v1/witnesses")
    assert (status, found["missing"]) == (200, [])
    status, found = await operated.ask("POST", "/v1/witnesses/accept", {"lost": ["bookie-9"]})
    assert (status, found["missing"]) == (200, [])
    status, lines = await operated.ask(
        "POST", "/v1/witnesses/accept", {"lost": ["bookie-9"]}, **LINES
    )
    assert (status, lines[-1]["state"]["missing"]) == (200, [])


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/v1/bookies/bookie-1/state", {"state": "gone"}, 422),
        ("PUT", "/v1/bookies/bookie-1/state", b'{"state":"writable","state":"writable"}', 400),
        ("PUT", "/v1/bookies/bookie-1/state", b"[]", 422),
        ("PUT", "/v1/bookies/bookie-1/state", b"{" + b" " * BODY_BYTES_MAX + b"}", 413),
        ("PUT", "/v1/bookies/bookie-1/maintenance", {}, 422),
        ("PATCH", "/v1/autorecovery", {"concurrency": 0}, 422),
        ("POST", "/v1/rebuild", {"after": -1}, 422),
        ("POST", "/v1/witnesses/accept", {"lost": "bookie-1"}, 422),
        ("POST", "/v1/audits", {"a": 1}, 422),
        ("GET", "/v1/repairs?after=bookie-1", None, 422),
        ("GET", "/v1/bookies/bookie-9", None, 404),
        ("PUT", "/v1/bookies/bookie-9/state", {"state": "writable"}, 404),
        ("DELETE", "/v1/bookies/bookie-9", None, 404),
        ("DELETE", "/v1/bookies/bookie-1", None, 412),
    ],
)
async def test_what_a_service_refuses_is_the_clients_error(
    operated: Operated, method: str, path: str, body: Any, status: int
) -> None:
    got, problem = await operated.ask(method, path, body)

    assert got == status, problem
    if status == 422 and b"state" in orjson.dumps(str(body)) and isinstance(body, dict):
        assert problem["errors"][0]["pointer"] == "/state"


async def test_a_token_that_may_only_read_changes_nothing(operated: Operated) -> None:
    token = await made_token(operated.cluster, "read:*")

    refused = [
        (await operated.ask(method, path, body, token=token))[0]
        for method, path, body in (
            ("PUT", "/v1/bookies/bookie-1/state", {"state": "draining"}),
            ("DELETE", "/v1/bookies/bookie-1", None),
            ("PATCH", "/v1/autorecovery", {"paused": True}),
            ("POST", "/v1/rebuild", {}),
            ("GET", "/v1/ledgers/1/check", None),
        )
    ]

    assert refused == [403] * 5
    assert (await operated.ask("GET", "/v1/autorecovery", token=token))[0] == 200


async def test_a_rebuild_ends_when_its_client_leaves(operated: Operated) -> None:
    for _ in range(3):
        await ledger(operated)
    operated.cluster.pause("bookie-1")  # the rebuild waits for its answer
    try:
        asked = asyncio.create_task(operated.ask("POST", "/v1/rebuild", {"dry_run": True}, **LINES))

        async def waiters() -> float:
            url = f"{operated.cluster.gateways[0]}/metrics"
            shown = {"Authorization": f"Bearer {operated.token}"}
            async with operated.session.get(url, headers=shown) as answer:
                text = await answer.text()
            return float(text.partition("\nquorumlog_http_waiters ")[2].partition("\n")[0])

        async def is_following() -> bool:
            return await waiters() == 1

        async def is_over() -> bool:
            return await waiters() == 0

        await until(is_following, "the gateway follows the rebuild")
        asked.cancel()
        await until(is_over, "the gateway has let the rebuild go")
    finally:
        operated.cluster.resume("bookie-1")
    await operated.until_state("bookie-1", "writable")


async def test_a_dead_service_is_unavailable(operated: Operated) -> None:
    """The last test: it kills."""
    await operated.cluster.kill("bookie-4")
    await operated.cluster.kill("autorecovery-1")

    for method, path, body in (
        ("GET", "/v1/bookies/bookie-4", None),
        ("PUT", "/v1/bookies/bookie-4/state", {"state": "writable"}),
        ("GET", "/v1/repairs", None),
        ("POST", "/v1/checks", None),
        ("GET", "/v1/bookies/bookie-4/drain", None),
    ):
        status, problem = await operated.ask(method, path, body)
        assert (status, problem["code"]) == (503, "service-unavailable"), problem
        assert problem["outcome"] == "not-done"


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Odd:
    """A service that answers as a test tells it to, at the place of autorecovery."""

    def __init__(self, world: World, session: aiohttp.ClientSession) -> None:
        self.world, self._session = world, session
        self.answer: Answer

    async def serve(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request)

    async def ask(self, method: str, path: str, answer: Answer) -> tuple[int, str, str]:
        """Status, code and outcome of what a gateway's client gets, if this is what the service answers."""
        self.answer = answer
        async with self._session.request(method, self.world.engine.writer.url + path) as got:
            problem = orjson.loads(await got.read())
        return got.status, problem["code"], problem["outcome"]

    async def listed(self, answer: Answer) -> tuple[int, list[dict[str, str]]]:
        """The status of the response, and the processes of autorecovery that it lists."""
        self.answer = answer
        url = f"{self.world.engine.writer.url}/v1/autorecovery"
        async with self._session.get(url) as got:
            return got.status, orjson.loads(await got.read())["autorecovery"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd(servers: StoreServers) -> AsyncIterator[Odd]:
    async with world_of(servers.fresh(), gateways=1) as world, aiohttp.ClientSession() as session:
        found = Odd(world, session)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", found.serve)
        async with listening(app, host="127.0.0.1", port=0) as listener:
            for name, port in (("a", 1), ("b", listener.port)):  # nothing listens at the first
                alive = ServiceHeartbeat(url=f"http://127.0.0.1:{port}", ttl_s=3600)
                await world.metadata.send_service_heartbeat("autorecovery", name, alive)

            async def is_listed() -> bool:
                return len((await world.metadata.services()).services) == 3

            await until(is_listed, "both are listed")
            yield found


def problem(error: errors.QuorumLogError) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return problem_response(error, "1")

    return answer


@pytest.mark.parametrize(
    "error",
    [
        errors.Unauthenticated(),
        errors.Forbidden(),
        errors.ForeignHost(),
        errors.RouteNotFound(),
        errors.CallerRefused(),
    ],
)
async def test_a_gateways_refusal_is_its_own_fault(odd: Odd, error: errors.QuorumLogError) -> None:
    found = await odd.ask("GET", "/v1/repairs", problem(error))

    assert found == (503, "service-unavailable", "not-done")


async def test_a_defect_of_the_service_leaves_the_outcome_unknown(odd: Odd) -> None:
    found = await odd.ask("POST", "/v1/audits", problem(errors.QuorumLogError()))

    assert found == (503, "service-unavailable", "unknown")


async def test_the_services_error_is_the_clients(odd: Odd) -> None:
    found = await odd.ask("GET", "/v1/repairs", problem(errors.MetadataBusy(retry_after_s=7)))

    assert found == (503, "metadata-busy", "not-done")


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_broken_connection_leaves_the_outcome_of_a_change_unknown(odd: Odd) -> None:
    assert await odd.ask("GET", "/v1/repairs", broken) == (503, "service-unavailable", "not-done")
    assert await odd.ask("POST", "/v1/audits", broken) == (503, "service-unavailable", "unknown")


async def test_an_answer_that_is_too_large_is_refused(odd: Odd) -> None:
    async def large(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"a": "x" * ANSWER_BYTES_MAX})

    assert await odd.ask("GET", "/v1/repairs", large) == (503, "service-unavailable", "not-done")


@pytest.mark.parametrize("text", ["no JSON", "[1]", ""])
async def test_a_status_that_is_no_object_is_that_processs_error(odd: Odd, text: str) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    status, found = await odd.listed(answer)

    assert status == 200
    assert {one["id"]: one["error"] for one in found}["b"].startswith(
        "the process did not respond with"
    )


async def test_the_check_of_a_ledger_ends_when_its_client_leaves(odd: Odd) -> None:
    over, waiters = asyncio.Event(), odd.world.gateways[0].app[_ROOM].waiters

    async def waiting(_request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    asked = asyncio.create_task(odd.ask("GET", "/v1/ledgers/1/check", waiting))
    await until(lambda: waiters.used == 1, "the gateway waits for the check")
    asked.cancel()

    await until(lambda: waiters.used == 0, "the gateway has let the check go")
    over.set()
