"""The resources /v1/bookies, /v1/cluster, /v1/audit and /problems."""

from typing import Any, Final

from aiohttp import web

from quorumlog.errors import RouteNotFound, codes
from quorumlog.net.audit_client import AFTER, LIMIT, SINCE, TARGET, AuditClient
from quorumlog.net.listen import html_response
from quorumlog.net.operations import JSON, Route
from quorumlog.net.parameters import Given
from services.gateway.edge import cluster_operations as op
from services.gateway.edge.answers import json_value
from services.gateway.edge.media import HTML, accepted
from services.gateway.edge.problem_pages import page, problem_json, problem_page
from services.gateway.interface import EngineInterface

_INDEX: Final = page(
    "A gateway of quorumlog",
    "<p>Append-only ledgers and logs over HTTP.</p><ul>"
    + "".join(
        f'<li><a href="{path}"><code>{path}</code></a>: {what}'
        for path, what in (
            ("/docs", "every operation, with its parameters, bodies and errors"),
            ("/v1/cluster", "the services and their states"),
            ("/v1/logs", "the logs"),
            ("/health/ready", "whether this gateway can create a ledger now"),
        )
    )
    + "</ul>",
)


class ClusterRoutes:
    """Handlers about the cluster, and the pages that explain problems."""

    def __init__(self, engine: EngineInterface, audit: AuditClient | None) -> None:
        self._engine, self._audit = engine, audit

    async def bookies(self, _request: web.Request, _given: Given) -> web.Response:
        """GET /v1/bookies."""
        found = await self._engine.bookies()
        shown: dict[str, Any] = {
            "bookies": [bookie.model_dump(mode="json") for bookie in found.bookies]
        }
        if found.stale:
            shown["stale"] = True
        return json_value(shown)

    async def cluster(self, _request: web.Request, _given: Given) -> web.Response:
        """GET /v1/cluster."""
        return json_value(await self._engine.cluster())

    async def audit(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/audit."""
        assert self._audit is not None, "there is such a route"
        page = await self._audit.page(
            after=given[AFTER],
            since=given[SINCE],
            target=given[TARGET],
            limit=given[LIMIT],
        )
        return json_value(page.model_dump(mode="json"))

    async def index(self, _request: web.Request, _given: Given) -> web.Response:
        """GET /: for a person who tries the address in a browser."""
        return html_response(_INDEX)

    async def problem(self, request: web.Request, given: Given) -> web.Response:
        """GET /problems/{code}."""
        cls = codes().get(given[op.CODE])
        if cls is None:
            raise RouteNotFound("there is no problem of this code")
        if accepted(request, (HTML, JSON)) == JSON:
            return json_value(problem_json(cls))
        return html_response(problem_page(cls))

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        routes = [
            Route(op.BOOKIES, self.bookies),
            Route(op.CLUSTER, self.cluster),
            Route(op.PROBLEM, self.problem),
            Route(op.INDEX, self.index),
        ]
        if self._audit is not None:
            routes.append(Route(op.AUDIT, self.audit))
        return routes
