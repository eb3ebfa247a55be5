"""The operations on the cluster, on problems, and those that every service has."""

from typing import Any, Final

from quorumlog import errors
from quorumlog.net.audit_client import AFTER, LIMIT, SINCE, TARGET
from quorumlog.net.operations import JSON, Content, Operation, Reply
from quorumlog.net.parameters import Parameter
from quorumlog.wire.audit_bodies import AuditList
from quorumlog.wire.versions import RELEASE
from services.gateway.edge.media import HTML
from services.gateway.edge.models import BookieListModel
from services.gateway.edge.operations import ALWAYS, ANSWERING, WITH_METADATA, gives
from services.gateway.edge.problem_pages import problem_json

CODE: Final[Parameter[str]] = Parameter(
    "code",
    "path",
    lambda text, _pointer: text,
    {"type": "string", "enum": sorted(errors.codes())},
    "The code.",
    "",
    "ledger-closed",
)

_ERRORS: Final = (*ALWAYS, *ANSWERING)
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

BOOKIES: Final = Operation(
    "GET",
    "/v1/bookies",
    "listBookies",
    "Cluster",
    "Every registered bookie with its state",
    "`lost`: no heartbeat in time. Liveness is advice: `stale` says that it can't be learned now.",
    replies=gives("The bookies.", BookieListModel, {"one": {"bookies": [_BOOKIE]}}),
    errors=(*_ERRORS, *WITH_METADATA),
)
CLUSTER: Final = Operation(
    "GET",
    "/v1/cluster",
    "getCluster",
    "Cluster",
    "Every service with its state, and the ledgers that lack copies",
    replies=gives("The cluster.", {"type": "object"}, {"empty": {}}),
    errors=(*_ERRORS, *WITH_METADATA),
)
AUDIT: Final = Operation(
    "GET",
    "/v1/audit",
    "listAudit",
    "Cluster",
    "Who changed what",
    "Audited requests that changed something, by their numbers. `next` is the next `after`, null at the end.",
    (SINCE, TARGET, AFTER, LIMIT),
    replies=gives(
        "A page of the audit log.", AuditList, {"a deletion": {"audit": [_AUDITED], "next": None}}
    ),
    errors=(*_ERRORS, *WITH_METADATA, errors.MetadataBusy),
)
PROBLEM: Final = Operation(
    "GET",
    "/problems/{code}",
    "getProblem",
    "About",
    "What a problem's code stands for",
    parameters=(CODE,),
    replies={
        200: Reply(
            "The explanation.",
            {
                HTML: Content({"type": "string"}),
                JSON: Content({"type": "object"}, {"one": problem_json(errors.QuorumLogError)}),
            },
        )
    },
    errors=(*_ERRORS, errors.RouteNotFound),
)


def _shared(path: str, name: str, summary: str, media: str, schema: dict[str, Any]) -> Operation:
    return Operation(
        "GET",
        path,
        name,
        "About",
        summary,
        replies={200: Reply(summary, {media: Content(schema)})},
        errors=ALWAYS,
    )


_TEXT: Final[dict[str, Any]] = {"type": "string"}
INDEX: Final = _shared("/", "getIndex", "A start page for people", HTML, _TEXT)
SHARED: Final = (
    _shared("/health/live", "isLive", "The process runs", JSON, _STATUS),
    Operation(
        "GET",
        "/health/ready",
        "isReady",
        "About",
        "A default ledger could be created now",
        replies=gives("Ready.", _STATUS, {"yes": {"status": "ready", "version": RELEASE}}),
        errors=(*ALWAYS, *(cls for cls in errors.codes().values() if cls.status == 503)),
    ),
    _shared("/metrics", "getMetrics", "Metrics for Prometheus", "text/plain", _TEXT),
    _shared("/openapi.json", "getOpenApi", "This description", JSON, {"type": "object"}),
    _shared("/docs", "getDocs", "This description for people", HTML, _TEXT),
)
"""What every service has: the routes come from `net/service.py`."""
