"""The routes of the repair queue and of leases."""

from typing import Final

from aiohttp import web

from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import route
from quorumlog.net.parameters import Given, Parameter, integer, matching, path_text
from quorumlog.net.roles import check_name
from quorumlog.protocol.ids import member_name
from quorumlog.wire.bodies import LOG_NAME, MEMBER
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


async def list_repairs(request: web.Request, given: Given) -> web.Response:
    """Items of the queue, by ledger and member; `after` is `ledger_id:member`."""
    found, last = await request.app[PARTS].repairs.page(after=given[AFTER], limit=given[LIMIT])
    following = None if last is None else f"{last[0]}:{last[1]}"
    return answer(RepairList(repairs=tuple(found), next=following))


async def add_repairs(request: web.Request, _given: Given) -> web.Response:
    """Queue entries that members lack."""
    items = (await parsed(request, RepairsAdd)).items
    for item in items:
        check_name(request, member_name(item.member))
    await request.app[PARTS].repairs.add(items)
    return web.Response(status=204)


async def claim_repairs(request: web.Request, _given: Given) -> web.Response:
    """Claim unclaimed items, those with the fewest survivors first."""
    found = await request.app[PARTS].repairs.claim(await parsed(request, RepairClaim))
    return answer(RepairList(repairs=tuple(found)))


async def progress_repair(request: web.Request, given: Given) -> web.Response:
    """Remove repaired ranges and keep the claim on the rest; an item without a rest is deleted."""
    body = await parsed(request, RepairProgress)
    ranges = await request.app[PARTS].repairs.progress(given[LEDGER_ID], given[MEMBER_ID], body)
    return answer(RepairRemaining(ranges=ranges))


async def fail_repair(request: web.Request, given: Given) -> web.Response:
    """Release an item after a failure; it is retried after a pause."""
    body = await parsed(request, RepairFail)
    await request.app[PARTS].repairs.fail(given[LEDGER_ID], given[MEMBER_ID], body)
    return web.Response(status=204)


async def summarize_repairs(request: web.Request, _given: Given) -> web.Response:
    """Numbers of the whole queue."""
    return answer(await request.app[PARTS].repairs.summary())


async def get_repair_settings(request: web.Request, _given: Given) -> web.Response:
    """Operators' settings for all processes of autorecovery."""
    return answer(await request.app[PARTS].repair_settings.get())


async def patch_repair_settings(request: web.Request, _given: Given) -> web.Response:
    """Change the given settings of autorecovery, for all processes and over restarts."""
    change = await parsed(request, RepairSettingsPut)
    return answer(await request.app[PARTS].repair_settings.change(change))


async def hurry_repairs(request: web.Request, _given: Given) -> web.Response:
    """Retry now the items that wait after a failure."""
    await request.app[PARTS].repairs.hurry()
    return web.Response(status=204)


async def trigger_repairs(request: web.Request, _given: Given) -> web.Response:
    """Request a full audit, and retry now the items that wait after a failure."""
    parts = request.app[PARTS]
    await parts.repairs.hurry()
    return answer(await parts.repair_settings.trigger())


async def take_lease(request: web.Request, given: Given) -> web.Response:
    """Take a free lease, or renew one's own; returns the present holder."""
    body = await parsed(request, LeaseTake)
    return answer(await request.app[PARTS].leases.take(given[LEASE], body))


async def give_lease(request: web.Request, given: Given) -> web.Response:
    """Release a lease, if this holder still has it."""
    await request.app[PARTS].leases.give(given[LEASE], await parsed(request, LeaseGive))
    return web.Response(status=204)


_ITEM: Final = "/v1/repairs/{ledger_id}/{member}"
_OF_ITEM: Final = (LEDGER_ID, MEMBER_ID)
_LEASE: Final = "/v1/leases/{name}"

ROUTES: Final = (
    route("GET", "/v1/repairs", list_repairs, LIMIT, AFTER, gives=RepairList),
    route("POST", "/v1/repairs", add_repairs, takes=RepairsAdd, status=204),
    route("POST", "/v1/repairs/claim", claim_repairs, takes=RepairClaim, gives=RepairList),
    route(
        "POST",
        f"{_ITEM}/progress",
        progress_repair,
        *_OF_ITEM,
        takes=RepairProgress,
        gives=RepairRemaining,
    ),
    route("POST", f"{_ITEM}/fail", fail_repair, *_OF_ITEM, takes=RepairFail, status=204),
    route("GET", "/v1/repairs/summary", summarize_repairs, gives=RepairSummary),
    route("POST", "/v1/repairs/hurry", hurry_repairs, status=204),
    route("POST", "/v1/repairs/trigger", trigger_repairs, gives=RepairSettings),
    route("GET", "/v1/repair-settings", get_repair_settings, gives=RepairSettings),
    route(
        "PATCH",
        "/v1/repair-settings",
        patch_repair_settings,
        takes=RepairSettingsPut,
        gives=RepairSettings,
    ),
    route("PUT", _LEASE, take_lease, LEASE, takes=LeaseTake, gives=Lease),
    route("DELETE", _LEASE, give_lease, LEASE, takes=LeaseGive, status=204),
)
