"""The route of sealed keys."""

from typing import Final

from aiohttp import web

from quorumlog.net.identity import OPERATORS
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given
from quorumlog.wire.bodies import Resealed
from services.metadata.handlers import AFTER, PARTS

ROUTES: Final = Routes()


@ROUTES.add("POST /v1/keys/reseal", AFTER, roles=OPERATORS, gives=Resealed, is_audited=True)
async def reseal(request: web.Request, given: Given) -> web.Response:
    """Encrypt the keys of some ledgers above `after` under the first key of the key file."""
    after = given[AFTER]
    return answer(await request.app[PARTS].sealing.reseal(after=-1 if after is None else after))
