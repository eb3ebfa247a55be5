"""Services behind the gateway that do not answer as they should: what becomes of an operator's request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from loadtest.stores import StoreServers
from quorumlog import errors
from quorumlog.net.listen import listening
from quorumlog.net.responses import problem_response
from quorumlog.wire.bodies import ServiceHeartbeat
from services.gateway.app import _ROOM
from services.gateway.edge.operators import ANSWER_BYTES_MAX
from tests.support.waiting import until
from tests.unit.gateway.engine.support import World, world_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
async def test_a_refusal_of_the_gateway_is_not_the_clients_fault(
    odd: Odd, error: errors.QuorumLogError
) -> None:
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
async def test_a_status_that_is_no_object_is_shown_as_that_process_s_error(
    odd: Odd, text: str
) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    status, found = await odd.listed(answer)

    assert status == 200
    assert {one["id"]: one["error"] for one in found}["b"].startswith("it does not answer with")


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
