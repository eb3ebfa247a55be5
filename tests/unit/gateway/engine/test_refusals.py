"""What a gateway makes of another one that refuses it: never a verdict on the ledger."""

from http import HTTPStatus

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    Forbidden,
    ForeignHost,
    Outcome,
    QuorumLogError,
    RouteNotFound,
    Unauthenticated,
    WriterLost,
)
from quorumlog.protocol.metadata import Writer
from quorumlog.wire import problems
from services.gateway.engine.peers import Peers
from services.gateway.interface import FRAMES


def refusal(error: QuorumLogError) -> web.Response:
    body = problems.to_bytes(error)
    return web.Response(status=error.status, body=body, content_type=problems.CONTENT_TYPE)


REFUSALS = (Unauthenticated(), Forbidden(), ForeignHost(), RouteNotFound())
"""By the gateway itself, or by another service at its address."""

STRANGERS = [HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND, HTTPStatus.BAD_GATEWAY]
"""By whatever is between the two."""


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        *((refusal(error), NOT_DONE) for error in REFUSALS),
        *((web.Response(status=status, text="no"), UNKNOWN) for status in STRANGERS),
    ],
    ids=lambda value: str(value.status) if isinstance(value, web.Response) else str(value),
)
async def test_a_writer_that_refuses_a_gateway_is_lost_to_it_and_says_nothing_of_the_ledger(
    answer: web.Response, outcome: Outcome
) -> None:
    async def answers(_request: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        peers, writer = Peers(session), Writer("w", url, url)

        with pytest.raises(WriterLost) as reported:
            await peers.send(writer, "POST", "/v1/ledgers/7/entries", 5.0, media=FRAMES)

    assert reported.value.outcome == outcome
