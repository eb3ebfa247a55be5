"""The routes of the repair queue and of leases."""

from typing import Final

from aiohttp import web

from quorumlog.net.bodies import answer
from quorumlog.net.identity import HEALERS, OPERATORS, SERVICES, WRITERS, check_name
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, Parameter, integer, matching, path_text
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.values import LOG_NAME, MEMBER
from quorumlog.wire.repair_bodies import (
    REPAIR_PLACE,
    Lease,
    LeaseGive,
    LeaseTake,
    RepairClaim,
    RepairFail,
    RepairList,
    RepairProgress,
    RepairRemaining,
    RepairsAdd,
    RepairSettings,
    RepairSettingsPut,
    RepairSummary,
)
from services.metadata.handlers import PARTS
from services.metadata.http import LEDGER_ID, LIMIT, parsed


def _item(text: str, pointer: str) -> tuple[int, str]:
    ledger_id, _, member = matching(text, pointer, REPAIR_PLACE).partition(":")
    return integer(ledger_id, pointer), member


AFTER: Final = Parameter(
    "after",
    "query",
    _item,
    {"type": "string", "pattern": f"^{REPAIR_PLACE}$"},
    "Only items after this one: `ledger_id:member`.",
    (-1, ""),
)
MEMBER_ID: Final = path_text("member", MEMBER, "The member.", "bookie-1@1")
LEASE: Final = path_text("name", LOG_NAME, "The lease.", "auditor")


_ITEM: Final = "/v1/repairs/{ledger_id}/{member}"
_OF_ITEM: Final = (LEDGER_ID, MEMBER_ID)
_LEASE: Final = "/v1/leases/{name}"
ROUTES: Final = Routes()


@ROUTES.add("GET /v1/repairs", LIMIT, AFTER, roles=WRITERS | OPERATORS, gives=RepairList)
async def list_repairs(request: web.Request, given: Given) -> web.Response:
    """Items of the queue, by ledger and member; `after` is `ledger_id:member`."""
    found, last = await request.app[PARTS].repairs.page(after=given[AFTER], limit=given[LIMIT])
    following = None if last is None else f"{last[0]}:{last[1]}"
    return answer(RepairList(repairs=tuple(found), next=following))


@ROUTES.add("POST /v1/repairs", roles=SERVICES, takes=RepairsAdd, status=204)
async def add_repairs(request: web.Request, _given: Given) -> web.Response:
    """Queue entries that members lack."""
    items = (await parsed(request, RepairsAdd)).items
    for item in items:
        check_name(request, member_name(item.member))
    await request.app[PARTS].repairs.add(items)
    return web.Response(status=204)


@ROUTES.add("POST /v1/repairs/claim", roles=HEALERS, takes=RepairClaim, gives=RepairList)
async def claim_repairs(request: web.Request, _given: Given) -> web.Response:
    """Claim unclaimed items, those with the fewest survivors first."""
    found = await request.app[PARTS].repairs.claim(await parsed(request, RepairClaim))
    return answer(RepairList(repairs=tuple(found)))


@ROUTES.add(
    f"POST {_ITEM}/progress", *_OF_ITEM, roles=HEALERS, takes=RepairProgress, gives=RepairRemaining
)
async def progress_repair(request: web.Request, given: Given) -> web.Response:
    """Remove repaired ranges and keep the claim on the rest; an item without a rest is deleted."""
    body = await parsed(request, RepairProgress)
    ranges = await request.app[PARTS].repairs.progress(given[LEDGER_ID], given[MEMBER_ID], body)
    return answer(RepairRemaining(ranges=ranges))


@ROUTES.add(f"POST {_ITEM}/fail", *_OF_ITEM, roles=HEALERS, takes=RepairFail, status=204)
async def fail_repair(request: web.Request, given: Given) -> web.Response:
    """Release an item after a failure; it is retried after a pause."""
    body = await parsed(request, RepairFail)
    await request.app[PARTS].repairs.fail(given[LEDGER_ID], given[MEMBER_ID], body)
    return web.Response(status=204)


@ROUTES.add("GET /v1/repairs/summary", roles=WRITERS | OPERATORS, gives=RepairSummary)
async def summarize_repairs(request: web.Request, _given: Given) -> web.Response:
    """Numbers of the whole queue."""
    return answer(await request.app[PARTS].repairs.summary())


@ROUTES.add("GET /v1/repair-settings", roles=HEALERS | OPERATORS, gives=RepairSettings)
async def get_repair_settings(request: web.Request, _given: Given) -> web.Response:
    """Operators' settings for all processes of autorecovery."""
    return answer(await request.app[PARTS].repair_settings.get())


@ROUTES.add(
    "PATCH /v1/repair-settings",
    roles=HEALERS,
    takes=RepairSettingsPut,
    gives=RepairSettings,
    is_audited=True,
)
async def patch_repair_settings(request: web.Request, _given: Given) -> web.Response:
    """Change the given settings of autorecovery, for all processes and over restarts."""
    change = await parsed(request, RepairSettingsPut)
    return answer(await request.app[PARTS].repair_settings.change(change))


@ROUTES.add("POST /v1/repairs/hurry", roles=HEALERS, status=204)
async def hurry_repairs(request: web.Request, _given: Given) -> web.Response:
    """Retry now the items that wait after a failure."""
    await request.app[PARTS].repairs.hurry()
    return web.Response(status=204)


@ROUTES.add("POST /v1/repairs/trigger", roles=HEALERS, gives=RepairSettings)
async def trigger_repairs(request: web.Request, _given: Given) -> web.Response:
    """Request a full audit, and retry now the items that wait after a failure."""
    parts = request.app[PARTS]
    await parts.repairs.hurry()
    return answer(await parts.repair_settings.trigger())


@ROUTES.add(f"PUT {_LEASE}", LEASE, roles=HEALERS, takes=LeaseTake, gives=Lease)
async def take_lease(request: web.Request, given: Given) -> web.Response:
    """Take a free lease, or renew one's own; returns the present holder."""
    body = await parsed(request, LeaseTake)
    return answer(await request.app[PARTS].leases.take(given[LEASE], body))


@ROUTES.add(f"DELETE {_LEASE}", LEASE, roles=HEALERS, takes=LeaseGive, status=204)
async def give_lease(request: web.Request, given: Given) -> web.Response:
    """Release a lease, if this holder still has it."""
    await request.app[PARTS].leases.give(given[LEASE], await parsed(request, LeaseGive))
    return web.Response(status=204)
