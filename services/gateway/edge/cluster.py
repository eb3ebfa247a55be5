"""The cluster as the gateway sees it, and the pages that explain problems."""

import html
import inspect
from typing import Any, Final

from aiohttp import web

from quorumlog.errors import NOT_DONE, QuorumLogError, RouteNotFound, codes
from services.gateway.edge import operations as op
from services.gateway.edge import params
from services.gateway.edge.answers import json_value
from services.gateway.edge.models import BookieListModel
from services.gateway.edge.params import JSON
from services.gateway.interface import EngineInterface

_HTML: Final = "text/html"
_PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Vary": "Accept",
}


class Cluster:
    """Handlers of what is not a ledger."""

    def __init__(self, engine: EngineInterface) -> None:
        self._engine = engine

    async def bookies(self, request: web.Request) -> web.Response:
        """GET /v1/bookies."""
        params.query(request)
        params.accepted(request)
        found = await self._engine.bookies()
        shown: dict[str, Any] = {
            "bookies": [bookie.model_dump(mode="json") for bookie in found.bookies]
        }
        if found.stale:
            shown["stale"] = True
        return json_value(shown)

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /v1/cluster."""
        params.query(request)
        params.accepted(request)
        return json_value(await self._engine.cluster())

    async def problem(self, request: web.Request) -> web.Response:
        """GET /problems/{code}."""
        params.query(request)
        cls = codes().get(request.match_info["code"])
        if cls is None:
            raise RouteNotFound("there is no problem of this code")
        if params.accepted(request, (_HTML, JSON)) == JSON:
            return json_value(problem_json(cls))
        return web.Response(text=_problem_page(cls), content_type=_HTML, headers=_PAGE_HEADERS)

    def routes(self) -> list[op.Route]:
        """The operations with their handlers."""
        return [(BOOKIES, self.bookies), (CLUSTER, self.cluster), (PROBLEM, self.problem)]


def problem_json(cls: type[QuorumLogError]) -> dict[str, Any]:
    """What a code stands for."""
    return {
        "code": cls.code,
        "status": cls.status,
        "title": cls.title,
        "description": " ".join(inspect.cleandoc(cls.__doc__ or cls.title).split()),
        "retryable": cls.retryable,
        "outcome": cls.outcome,
    }


def _problem_page(cls: type[QuorumLogError]) -> str:
    shown = problem_json(cls)
    retry = "It may be sent again as it is." if cls.retryable else "Sent again, it fails again."
    done = (
        "Nothing was done."
        if cls.outcome == NOT_DONE
        else "Nobody can say whether the request was done."
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{cls.code}</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;"
        "padding:0 1rem}:root{color-scheme:light dark}</style>"
        f"<h1>{html.escape(cls.title)}</h1>"
        f"<p><code>{cls.code}</code>, status {cls.status}</p>"
        f"<p>{html.escape(shown['description'])}</p><p>{done} {retry}</p></html>"
    )


_ERRORS: Final = (*op.ALWAYS, *op.ANSWERING)
_STATUS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"status": {"type": "string"}},
    "required": ["status"],
}

BOOKIES: Final = op.Operation(
    "GET",
    "/v1/bookies",
    "listBookies",
    "Cluster",
    "Every registered bookie with its state",
    "`lost`: no heartbeat in time. Liveness is advice: `stale` says that it can't be learned now.",
    answers={
        200: op.Answer(
            "The bookies.",
            {
                JSON: op.Content(
                    BookieListModel,
                    {
                        "one": {
                            "bookies": [
                                {
                                    "id": "bookie-1@1",
                                    "state": "writable",
                                    "url": "http://127.0.0.1:8101",
                                    "zone": "a",
                                    "free_bytes": 1 << 30,
                                }
                            ]
                        }
                    },
                )
            },
        )
    },
    errors=(*_ERRORS, *op.WITH_METADATA),
)
CLUSTER: Final = op.Operation(
    "GET",
    "/v1/cluster",
    "getCluster",
    "Cluster",
    "Every service with its state, and the ledgers that lack copies",
    answers={200: op.Answer("The cluster.", {JSON: op.Content({"type": "object"}, {"empty": {}})})},
    errors=(*_ERRORS, *op.WITH_METADATA),
)
PROBLEM: Final = op.Operation(
    "GET",
    "/problems/{code}",
    "getProblem",
    "About",
    "What a problem's code stands for",
    parameters=(
        op.Parameter(
            "code",
            "path",
            {"type": "string", "enum": sorted(codes())},
            "The code.",
            "ledger-closed",
        ),
    ),
    answers={
        200: op.Answer(
            "The explanation.",
            {
                _HTML: op.Content({"type": "string"}),
                JSON: op.Content({"type": "object"}, {"one": problem_json(QuorumLogError)}),
            },
        )
    },
    errors=(*_ERRORS, RouteNotFound),
)


def _shared(path: str, name: str, summary: str, media: str, schema: dict[str, Any]) -> op.Operation:
    return op.Operation(
        "GET",
        path,
        name,
        "About",
        summary,
        answers={200: op.Answer(summary, {media: op.Content(schema)})},
        errors=op.ALWAYS,
    )


_TEXT: Final[dict[str, Any]] = {"type": "string"}
SHARED: Final = (
    _shared("/health/live", "isLive", "The process runs", JSON, _STATUS),
    op.Operation(
        "GET",
        "/health/ready",
        "isReady",
        "About",
        "A default ledger could be created now",
        answers={
            200: op.Answer("Ready.", {JSON: op.Content(_STATUS, {"yes": {"status": "ready"}})})
        },
        errors=(
            *op.ALWAYS,
            *(cls for cls in codes().values() if cls.status == 503),
        ),
    ),
    _shared("/metrics", "getMetrics", "Metrics for Prometheus", "text/plain", _TEXT),
    _shared("/openapi.json", "getOpenApi", "This description", JSON, {"type": "object"}),
    _shared("/docs", "getDocs", "This description for people", _HTML, _TEXT),
)
"""What every service has: the routes come from `net/service.py`."""
