"""The route of the audit log."""

from typing import Final

from aiohttp import web

from quorumlog.net.audit_client import AFTER, LIMIT, SINCE, TARGET
from quorumlog.net.identity import GATEWAYS, OPERATORS
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given
from quorumlog.wire.audit_bodies import AuditList
from services.metadata.handlers import PARTS

ROUTES: Final = Routes()


@ROUTES.add(
    "GET /v1/audit", SINCE, TARGET, AFTER, LIMIT, roles=GATEWAYS | OPERATORS, gives=AuditList
)
async def list_audit(request: web.Request, given: Given) -> web.Response:
    """Requests of the audit log that changed something, in the order of their numbers."""
    page = await request.app[PARTS].audit.page(
        after=given[AFTER], since=given[SINCE], target=given[TARGET], limit=given[LIMIT]
    )
    return answer(page)
