"""The resources /v1/bookies, /v1/cluster, /v1/rates, /v1/audit and /problems/{code}."""

import html
import inspect
from typing import Any, Final

from aiohttp import web

from quorumlog import __version__, errors
from quorumlog.net.audit import AFTER, LIMIT, SINCE, TARGET
from quorumlog.net.gateway_clients import AuditClient
from quorumlog.net.operations import JSON, Content, Reply
from quorumlog.net.parameters import Given, Parameter
from quorumlog.net.responses import html_response
from quorumlog.wire.token_bodies import AuditList
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import OPEN, Access, Named, Scope, on
from services.gateway.edge.http.media import HTML, accepted, json_value
from services.gateway.edge.models import BookieListModel
from services.gateway.engine import Engine
from services.gateway.rates import Rates


def problem_json(cls: type[errors.QuorumLogError]) -> dict[str, Any]:
    """Build the JSON object that explains an error code."""
    return {
        "code": cls.code,
        "status": cls.status,
        "title": cls.title,
        "description": " ".join(inspect.cleandoc(cls.__doc__ or cls.title).split()),
        "retryable": cls.retryable,
        "outcome": cls.outcome,
    }


def problem_page(cls: type[errors.QuorumLogError]) -> str:
    """Build the page that explains an error code, as HTML without external resources."""
    shown = problem_json(cls)
    retry = "The same request may be retried." if cls.retryable else "A retry would fail again."
    done = (
        "The request changed no data."
        if cls.outcome == errors.NOT_DONE
        else "It is unknown whether the request was carried out."
    )
    return page(
        html.escape(cls.title),
        f"<p><code>{cls.code}</code>, status {cls.status}</p>"
        f"<p>{html.escape(shown['description'])}</p><p>{done} {retry}</p>",
    )


def page(title: str, body: str) -> str:
    """Build a small HTML page. `title` and `body` must be HTML already."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{title}</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;"
        f"padding:0 1rem}}:root{{color-scheme:light dark}}</style><h1>{title}</h1>{body}</html>"
    )


CODE: Final[Parameter[str]] = Parameter(
    "code",
    "path",
    lambda text, _pointer: text,
    {"type": "string", "enum": sorted(errors.codes())},
    "The code.",
    "",
    "ledger-closed",
)

_STATUS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "status": {"type": "string"},
        "version": {"type": "string", "description": "The release of this process."},
    },
    "required": ["status", "version"],
}

_BOOKIE: Final = {
    "id": "bookie-1@1",
    "state": "writable",
    "url": "http://127.0.0.1:8101",
    "zone": "a",
    "free_bytes": 1 << 30,
}

_AUDITED: Final = {
    "number": 7,
    "at": "2026-01-02T03:04:05.678901Z",
    "id": "3d0ca315-aff9-4fc2-be61-3b76b9a2d798",
    "who": "the token orders service (5f0c2a9d41be7786)",
    "remote": "192.0.2.7",
    "operation": "deleteLog",
    "target": "logs/orders-2025",
    "via": "gateway gateway-1",
}


def _shared(
    path: str, name: str, summary: str, media: str, schema: dict[str, Any], scope: Access = OPEN
) -> op.PublicOperation:
    return op.PublicOperation(
        f"GET {path}",
        name,
        "About",
        summary,
        replies={200: Reply(summary, {media: Content(schema)})},
        scope=scope,
        errors=op.ALWAYS,
    )


_TEXT: Final[dict[str, Any]] = {"type": "string"}
SHARED: Final = (
    _shared("/health/live", "isLive", "The process runs", JSON, _STATUS),
    op.PublicOperation(
        "GET /health/ready",
        "isReady",
        "About",
        "Whether a ledger with default settings could be created now",
        scope=OPEN,
        replies=op.gives("Ready.", _STATUS, {"yes": {"status": "ready", "version": __version__}}),
        errors=(*op.ALWAYS, *(cls for cls in errors.codes().values() if cls.status == 503)),
    ),
    _shared(
        "/metrics",
        "getMetrics",
        "Metrics for Prometheus",
        "text/plain",
        _TEXT,
        on(Named.CLUSTER, Scope.READ),
    ),
    _shared("/openapi.json", "getOpenApi", "This description", JSON, {"type": "object"}),
    _shared("/docs", "getDocs", "This description for people", HTML, _TEXT),
)
"""Operations that every service offers. Their routes are in `net/service.py`."""


class ClusterRoutes(op.Handlers, tag="Cluster"):
    """HTTP handlers for the cluster's state, the audit log and the pages about errors."""

    def __init__(self, engine: Engine, rates: Rates) -> None:
        self._engine, self._audit, self._rates = engine, AuditClient(engine.metadata), rates

    @op.operation(
        "GET /v1/bookies",
        replies=op.gives("The bookies.", BookieListModel, {"one": {"bookies": [_BOOKIE]}}),
        scope=on(Named.CLUSTER, Scope.READ),
    )
    async def list_bookies(self, _request: web.Request, _given: Given) -> web.Response:
        """List registered bookies and their states.

        A bookie is `lost` if its heartbeat is overdue. Liveness is only a hint. If `stale` is true,
        the current liveness is unknown.
        """
        found = await self._engine.directory.refresh()
        shown = {"bookies", "stale"} if found.stale else {"bookies"}
        return json_value(found.model_dump(mode="json", include=shown))

    @op.operation(
        "GET /v1/cluster",
        replies=op.gives("The cluster.", {"type": "object"}, {"empty": {}}),
        scope=on(Named.CLUSTER, Scope.READ),
    )
    async def get_cluster(self, _request: web.Request, _given: Given) -> web.Response:
        """Get the state of every service, and the ledgers that lack copies.

        A service is `gone` if this gateway saw the service alive in the last hour, but not now.
        `gone` services and `lost` bookies have `last_seen_at`.
        """
        return json_value(await self._engine.cluster())

    @op.operation(
        "GET /v1/rates",
        replies=op.gives("The rates.", {"type": "object"}, {"empty": {}}),
        scope=on(Named.CLUSTER, Scope.READ),
    )
    async def get_rates(self, _request: web.Request, _given: Given) -> web.Response:
        """Get the rates of requests and appends over the last hour, of each gateway and in total.

        Each of `series` has a number for every 15 s, oldest first. `requests`, `errors` (5xx),
        `appends` and `reads`, and the `records` and `append_bytes` of logs, are counted per second.
        `append_ms` is the mean latency. Unknown numbers are null. `missing` lists the URLs of
        gateways that did not respond.
        """
        return json_value(await self._rates.collected())

    @op.operation(
        "GET /problems/{code}",
        (CODE,),
        replies={
            200: Reply(
                "The explanation.",
                {
                    HTML: Content(_TEXT),
                    JSON: Content({"type": "object"}, {"one": problem_json(errors.QuorumLogError)}),
                },
            )
        },
        errors=(errors.RouteNotFound,),
        tag="About",
        scope=OPEN,
    )
    async def get_problem(self, request: web.Request, given: Given) -> web.Response:
        """Explain an error code."""
        cls = errors.codes().get(given[CODE])
        if cls is None:
            raise errors.RouteNotFound("there is no error with this code")
        if accepted(request, (HTML, JSON)) == JSON:
            return json_value(problem_json(cls))
        return html_response(problem_page(cls))

    @op.operation(
        "GET /v1/audit",
        (SINCE, TARGET, AFTER, LIMIT),
        replies=op.gives(
            "A page of the audit log.",
            AuditList,
            {"a deletion": {"audit": [_AUDITED], "next": None}},
        ),
        errors=(errors.MetadataBusy,),
        scope=on(Named.EVERYTHING, Scope.ADMIN),
    )
    async def list_audit(self, _request: web.Request, given: Given) -> web.Response:
        """List audited requests.

        Lists requests that changed data, with their senders, sorted by number. `next` is the `after`
        of the next page, or null at the end.
        """
        page = await self._audit.page(
            after=given[AFTER], since=given[SINCE], target=given[TARGET], limit=given[LIMIT]
        )
        return json_value(page.model_dump(mode="json"))
