"""The routes of witnesses, and the middleware that takes and returns them (rule 18a)."""

from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from quorumlog import header
from quorumlog.net.bodies import answer
from quorumlog.net.identity import BOOKIES, GATEWAYS, OPERATORS, SERVICES, check_name
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given
from quorumlog.wire.bodies import CopyWitnesses, KeptLedgers, WitnessAccept, WitnessState
from quorumlog.wire.rebuild_bodies import RebuildLine
from quorumlog.wire.witnesses import from_header, to_header
from services.metadata.handlers import AFTER, PARTS
from services.metadata.http import LIMIT, parsed
from services.metadata.memory import PRESENTED, Presented
from services.metadata.operator_handlers import LINES, told_in_lines
from services.metadata.rebuild import Tell


@web.middleware
async def presents_witnesses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep the request's witnesses for the database's check, and return their replacements."""
    given = request.headers.get(header.WITNESSES)
    # An unreadable list is treated as one invalid witness, so that the request is refused.
    witnesses = () if not given else from_header(given) or (given,)
    presented = Presented(witnesses, holder=request.remote or "somebody")
    PRESENTED.set(presented)
    response = await handler(request)
    if presented.answer and not response.prepared:
        response.headers[header.WITNESSES] = to_header(presented.answer)
    return response


ROUTES: Final = Routes()


@ROUTES.add("POST /v1/witnesses", roles=SERVICES, gives=WitnessState)
async def confirm_witnesses(request: web.Request, _given: Given) -> web.Response:
    """Check that the database has the changes of the request's witnesses; returns replacements."""
    return answer(await request.app[PARTS].witnesses.confirm())


@ROUTES.add("POST /v1/witnesses/copies", roles=BOOKIES, takes=CopyWitnesses, gives=WitnessState)
async def confirm_copies(request: web.Request, _given: Given) -> web.Response:
    """Check as well that the database has the changes that copies of rows are of, which bookies hold."""
    body = await parsed(request, CopyWitnesses)
    check_name(request, body.holder)
    presented = PRESENTED.get()
    assert presented is not None, "the middleware runs before"
    presented.witnesses += body.witnesses
    presented.holder = body.holder
    return answer(await request.app[PARTS].witnesses.confirm())


@ROUTES.add("GET /v1/kept-ledgers", AFTER, LIMIT, roles=GATEWAYS | OPERATORS, gives=KeptLedgers)
async def get_kept_ledgers(request: web.Request, given: Given) -> web.Response:
    """How many ledgers bookies keep, since the database lacks changes of which they hold copies; and the first ones."""
    kept = await request.app[PARTS].kept.list(after=given[AFTER], limit=given[LIMIT])
    return answer(kept)


@ROUTES.add("GET /v1/witnesses", roles=GATEWAYS | OPERATORS, gives=WitnessState)
async def get_witnesses(request: web.Request, _given: Given) -> web.Response:
    """The witnesses held by this process, and those that the database lacked at the last check."""
    return answer(request.app[PARTS].witnesses.state())


@ROUTES.add(
    "POST /v1/witnesses/accept",
    roles=OPERATORS,
    takes=WitnessAccept,
    gives=WitnessState,
    is_audited=True,
)
async def accept_lost(request: web.Request, _given: Given) -> web.StreamResponse:
    """Accept the loss of the changes of these witnesses: an operator decides (see the runbook). All bookies' copies are
    looked at before, so whoever accepts `application/x-ndjson` gets lines of progress.
    """
    body = await parsed(request, WitnessAccept)
    accept = partial(
        request.app[PARTS].witnesses.accept, body.witnesses, lost=body.lost, ledgers=body.ledgers
    )
    if request.headers.get("Accept") != LINES:
        return answer(await accept(tell=_quiet))

    async def work(tell: Tell) -> RebuildLine:
        return RebuildLine(state=await accept(tell=tell))

    return await told_in_lines(request, work)


async def _quiet(_line: RebuildLine) -> None:
    """Nobody is told of the progress."""
