"""The routes of a rebuild (rule 18d). Internal: an operator's command asks, and bookies whose cookies are missing."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.identity import BOOKIES, OPERATORS
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given
from quorumlog.wire.rebuild_bodies import RebuildAsk, RebuildLine, RebuildState
from services.metadata.handlers import PARTS
from services.metadata.http import parsed
from services.metadata.rebuild import Tell

log = logging.getLogger(__name__)

LINES: Final = "application/x-ndjson"


ROUTES: Final = Routes()


@ROUTES.add("GET /v1/rebuild", roles=BOOKIES | OPERATORS, gives=RebuildState)
async def get_state(request: web.Request, _given: Given) -> web.Response:
    """Whether the database is empty, or was rebuilt."""
    return answer(await request.app[PARTS].rebuilder.store.state())


@ROUTES.add(
    "POST /v1/rebuild",
    roles=OPERATORS,
    takes=RebuildAsk,
    gives=RebuildLine,
    media=LINES,
    is_audited=True,
)
async def rebuild(request: web.Request, _given: Given) -> web.StreamResponse:
    """Rebuild what bookies prove: a line of progress at a time, and at last the report or why there is none. Ends when
    the caller goes; what is written stays.
    """
    ask = await parsed(request, RebuildAsk)

    async def work(tell: Tell) -> RebuildLine:
        return RebuildLine(report=await request.app[PARTS].rebuilder.run(ask, tell))

    return await told_in_lines(request, work)


async def told_in_lines(
    request: web.Request, work: Callable[[Tell], Awaitable[RebuildLine]]
) -> web.StreamResponse:
    """A line of progress at a time, and at last what `work` returns or why it ended early."""
    response = web.StreamResponse(headers={"Content-Type": LINES})
    await response.prepare(request)

    async def tell(line: RebuildLine) -> None:
        await response.write(line.model_dump_json(exclude_defaults=True).encode() + b"\n")

    try:
        await tell(await work(tell))
    except ConnectionResetError:
        log.warning("rebuild-cancelled", extra={"path": request.path})
    except QuorumLogError as error:
        await tell(RebuildLine(error=error.detail, code=error.code))
    except Exception as error:
        log.exception("rebuild-failed", extra={"path": request.path})
        await tell(RebuildLine(error=repr(error)))
    return response
