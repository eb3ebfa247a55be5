"""The routes of witnesses, and how each request presents its own (rule 18a)."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import route
from quorumlog.net.parameters import Given
from quorumlog.wire.bodies import WitnessAccept, WitnessState
from quorumlog.wire.witnesses import HEADER, from_header, to_header
from services.metadata.handlers import PARTS
from services.metadata.http import parsed
from services.metadata.memory import PRESENTED, Presented


@web.middleware
async def presents_witnesses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have the database asked for what the request presents, and hand back what stands for it."""
    given = request.headers.get(HEADER)
    # A list that can't be read is one witness that counts for nothing, and so is refused.
    witnesses = () if not given else from_header(given) or (given,)
    presented = Presented(witnesses, holder=request.remote or "somebody")
    PRESENTED.set(presented)
    response = await handler(request)
    if presented.answer and not response.prepared:
        response.headers[HEADER] = to_header(presented.answer)
    return response


async def confirm_witnesses(request: web.Request, _given: Given) -> web.Response:
    """See that the database has what the request's header presents; gives what stands for it."""
    return answer(await request.app[PARTS].witnesses.confirm())


async def get_witnesses(request: web.Request, _given: Given) -> web.Response:
    """What this service holds, and what the database lacked when it was looked at last."""
    return answer(request.app[PARTS].witnesses.state())


async def accept_lost(request: web.Request, _given: Given) -> web.Response:
    """Go on without the changes of these witnesses: an operator's word, see the runbook."""
    body = await parsed(request, WitnessAccept)
    return answer(await request.app[PARTS].witnesses.accept(body.witnesses))


ROUTES: Final = (
    route("POST", "/v1/witnesses", confirm_witnesses, gives=WitnessState),
    route("GET", "/v1/witnesses", get_witnesses, gives=WitnessState),
    route("POST", "/v1/witnesses/accept", accept_lost, takes=WitnessAccept, gives=WitnessState),
)
