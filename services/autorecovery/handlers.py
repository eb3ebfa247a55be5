"""The HTTP routes of autorecovery. Operators call them directly or through a gateway."""

import re
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from pydantic import Field

from quorumlog.errors import NoSuchBookie, VersionConflict
from quorumlog.net import bodies
from quorumlog.net.bodies import answer, parsed
from quorumlog.net.holdings import answers_json
from quorumlog.net.identity import GATEWAYS, OPERATORS
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, Parameter, path_id, query_text
from quorumlog.protocol.values import BOOKIE_NAME
from quorumlog.wire.bodies import Body
from quorumlog.wire.repair_bodies import REPAIR_PLACE, RepairList, RepairSettingsPut
from services.autorecovery.auditor import Auditor
from services.autorecovery.check import ReplicaReport
from services.autorecovery.checker import Checker
from services.autorecovery.drains import Drain, drain_of
from services.autorecovery.findings import KnownLosses
from services.autorecovery.steering import PacedBookies, Steering
from services.autorecovery.worker import Worker


@dataclass(frozen=True, slots=True)
class AutorecoveryParts:
    """The components that handlers use; `app.py` builds them once."""

    auditor: Auditor
    checker: Checker
    losses: KnownLosses
    metadata: MetadataClient
    pace: PacedBookies
    repairs: RepairClient
    steering: Steering
    worker: Worker


PARTS: Final = web.AppKey("parts", AutorecoveryParts)


class Delay(Body):
    """The body of `PUT /v1/lost-bookie-delay`. Each request also starts a full audit."""

    seconds: float = Field(ge=0, le=86_400, strict=False)


def _bookie(name: str, _pointer: str) -> str:
    if not re.fullmatch(BOOKIE_NAME, name):
        raise NoSuchBookie("the path needs a bookie's name without @incarnation", bookie=name)
    return name


LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
BOOKIE: Final = Parameter(
    "bookie",
    "path",
    _bookie,
    {"type": "string", "pattern": f"^{BOOKIE_NAME}$"},
    "The bookie's name, without an incarnation.",
    "",
    "bookie-1",
)
AFTER: Final = query_text(
    "after", REPAIR_PLACE, "Return only items after this one, as `ledger_id:member`."
)


_ROLES: Final = OPERATORS | GATEWAYS
"""The list includes gateways, because gateways forward operators' requests."""
_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_CHECK: Final = "/v1/checks/{ledger_id}"
ROUTES: Final = Routes()


@ROUTES.add("GET /v1/status", roles=_ROLES, gives=_OBJECT)
async def get_status(request: web.Request, _given: Given) -> web.Response:
    """Return this process's state and counters."""
    return web.json_response(await _status_json(request.app[PARTS]))


@ROUTES.add("GET /v1/repairs", AFTER, roles=_ROLES, gives=RepairList)
async def list_repairs(request: web.Request, given: Given) -> web.Response:
    """List the items of the repair queue, with the errors of failed attempts."""
    items, following = await request.app[PARTS].repairs.list(after=given[AFTER])
    return answer(RepairList(repairs=items, next=following))


@ROUTES.add("POST /v1/checks", roles=_ROLES, gives=_OBJECT, status=202)
async def check_all(request: web.Request, _given: Given) -> web.Response:
    """Start a comparison of all copies of all ledgers."""
    request.app[PARTS].checker.trigger()
    return web.json_response({}, status=202)


@ROUTES.add(f"GET {_CHECK}", LEDGER_ID, roles=_ROLES, gives=_OBJECT)
async def check_ledger(request: web.Request, given: Given) -> web.Response:
    """Compare the copies of a ledger's entries, without queueing repairs."""
    report = await request.app[PARTS].checker.verify_on_request(given[LEDGER_ID], queue=False)
    return web.json_response(_report_json(report))


@ROUTES.add(f"POST {_CHECK}", LEDGER_ID, roles=_ROLES, gives=_OBJECT)
async def mend_ledger(request: web.Request, given: Given) -> web.Response:
    """Compare the copies of a ledger's entries, and queue repairs of missing and damaged copies."""
    report = await request.app[PARTS].checker.verify_on_request(given[LEDGER_ID], queue=True)
    return web.json_response(_report_json(report))


@ROUTES.add("GET /v1/drains/{bookie}", BOOKIE, roles=_ROLES, gives=Drain)
async def get_drain(request: web.Request, given: Given) -> web.Response:
    """Return a drain's progress, with the ledgers that still name the bookie, and why."""
    parts = request.app[PARTS]
    return answer(await drain_of(given[BOOKIE], parts.metadata, is_paused=parts.steering.is_paused))


@ROUTES.add("DELETE /v1/bookies/{bookie}", BOOKIE, roles=_ROLES, status=204, is_audited=True)
async def decommission(request: web.Request, given: Given) -> web.Response:
    """Decommission a stopped bookie that no ledger's metadata and no repair references."""
    try:
        await request.app[PARTS].metadata.retire(given[BOOKIE])
    except VersionConflict as error:
        raise error.replace(status=409) from error
    return web.Response(status=204)


@ROUTES.add("POST /v1/audits", roles=_ROLES, gives=_OBJECT, status=202)
async def trigger_audit(request: web.Request, _given: Given) -> web.Response:
    """Start a full audit, and retry waiting repairs."""
    await request.app[PARTS].repairs.trigger()
    return web.json_response({}, status=202)


@ROUTES.add("PUT /v1/lost-bookie-delay", roles=OPERATORS, takes=Delay, gives=Delay, is_audited=True)
async def put_delay(request: web.Request, _given: Given) -> web.Response:
    """Set how long a bookie may be absent before its entries are copied to other bookies."""
    parts, delay = request.app[PARTS], parsed(await bodies.read(request), Delay)
    await parts.steering.change(RepairSettingsPut(lost_bookie_delay_s=delay.seconds))
    await parts.repairs.trigger()
    return answer(delay)


@ROUTES.add(
    "PATCH /v1/settings", roles=_ROLES, takes=RepairSettingsPut, gives=_OBJECT, is_audited=True
)
async def patch_settings(request: web.Request, _given: Given) -> web.Response:
    """Pause, resume or limit repairs in all processes."""
    parts = request.app[PARTS]
    await parts.steering.change(parsed(await bodies.read(request), RepairSettingsPut))
    return web.json_response(await _status_json(parts))


async def _status_json(parts: AutorecoveryParts) -> dict[str, Any]:
    auditor, steering = parts.auditor, parts.steering
    return {
        "auditor": auditor.is_auditor,
        "lost": list(auditor.lost),
        "draining": list(auditor.draining),
        "liveness_age_s": auditor.liveness_age_s,
        "paused": steering.is_paused,
        "lost_bookie_delay_s": steering.lost_bookie_delay_s,
        "bytes_per_s": steering.bytes_per_s,
        "concurrency": steering.concurrency,
        "working": parts.worker.working,
        "copied_bytes": parts.pace.copied_bytes,
        "repaired": parts.worker.repaired,
        "failed": parts.worker.failed,
        "audit_s": auditor.audit_s,
        "blocked": len(auditor.blocked_ledgers),
        "blocked_recoveries": [
            {
                "ledger_id": ledger_id,
                "bookie": error.bookie,
                "entry_id": error.entry_id,
                "why": error.detail,
            }
            for ledger_id, error in auditor.blocked.items()
        ],
        "lost_entries": parts.losses.json(),
        "checked": parts.checker.checked,
        "check_s": parts.checker.pass_s,
        "check_runs": parts.checker.is_passing,
        "check_ledgers": parts.checker.pass_ledgers,
        "check_ledgers_before": parts.checker.former_ledgers,
        "misplaced": parts.checker.misplaced_count,
        "queue": (await parts.repairs.summary()).model_dump(mode="json"),
    }


def _report_json(report: ReplicaReport) -> dict[str, Any]:
    return {
        "ledger_id": report.ledger_id,
        "whole": report.is_whole,
        "entries": report.entries,
        "open_from": report.open_from,
        "lacking": [
            {"bookie": lack.member, "first": lack.first, "last": lack.last, "why": lack.why}
            for lack in report.lacks
        ],
        "differing": [{"first": first, "last": last} for first, last in report.differing],
        "silent": report.silent,
        "lost": [answers_json(lost) for lost in report.lost],
    }
