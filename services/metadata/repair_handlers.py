"""The routes of the repair queue and of leases."""

from typing import Final

from aiohttp import web

from quorumlog.wire.bodies import BOOKIE_NAME, LOG_NAME
from quorumlog.wire.repair_bodies import (
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
from services.metadata.http import (
    answer,
    integer,
    ledger_id_of,
    limit_of,
    matching,
    parsed,
    query_of,
)
from services.metadata.routes import Route

_MEMBER: Final = rf"{BOOKIE_NAME}@(0|[1-9][0-9]{{0,17}})"


async def list_repairs(request: web.Request) -> web.Response:
    """What members lack, by ledger and member; `after` is `ledger_id:member`."""
    query = query_of(request, ("limit", "after"))
    after = (-1, "")
    if "after" in query:
        ledger_id, _, member = query["after"].partition(":")
        after = (integer(ledger_id, "after"), matching(member, "after", _MEMBER))
    found, last = await request.app[PARTS].repairs.page(after=after, limit=limit_of(query))
    following = None if last is None else f"{last[0]}:{last[1]}"
    return answer(RepairList(repairs=tuple(found), next=following))


async def add_repairs(request: web.Request) -> web.Response:
    """Add to what members lack."""
    query_of(request, ())
    await request.app[PARTS].repairs.add((await parsed(request, RepairsAdd)).items)
    return web.Response(status=204)


async def claim_repairs(request: web.Request) -> web.Response:
    """Claim items that nobody works on, those with the fewest survivors first."""
    query_of(request, ())
    found = await request.app[PARTS].repairs.claim(await parsed(request, RepairClaim))
    return answer(RepairList(repairs=tuple(found)))


async def progress_repair(request: web.Request) -> web.Response:
    """Take off what is done and hold on to the rest; nothing left ends the item."""
    query_of(request, ())
    body = await parsed(request, RepairProgress)
    ranges = await request.app[PARTS].repairs.progress(
        ledger_id_of(request), _member(request), body
    )
    return answer(RepairRemaining(ranges=ranges))


async def fail_repair(request: web.Request) -> web.Response:
    """Let go of an item until a pause is over."""
    query_of(request, ())
    body = await parsed(request, RepairFail)
    await request.app[PARTS].repairs.fail(ledger_id_of(request), _member(request), body)
    return web.Response(status=204)


async def summarize_repairs(request: web.Request) -> web.Response:
    """The whole queue in numbers."""
    query_of(request, ())
    return answer(await request.app[PARTS].repairs.summary())


async def get_repair_settings(request: web.Request) -> web.Response:
    """What operators set for all of autorecovery."""
    query_of(request, ())
    return answer(await request.app[PARTS].repair_settings.get())


async def patch_repair_settings(request: web.Request) -> web.Response:
    """Change what is named, for all of autorecovery and over restarts."""
    query_of(request, ())
    change = await parsed(request, RepairSettingsPut)
    return answer(await request.app[PARTS].repair_settings.change(change))


async def hurry_repairs(request: web.Request) -> web.Response:
    """Have what waits after a failure tried again now."""
    query_of(request, ())
    await request.app[PARTS].repairs.hurry()
    return web.Response(status=204)


async def trigger_repairs(request: web.Request) -> web.Response:
    """Have everything looked at now, and what waits after a failure tried again."""
    query_of(request, ())
    parts = request.app[PARTS]
    await parts.repairs.hurry()
    return answer(await parts.repair_settings.trigger())


async def take_lease(request: web.Request) -> web.Response:
    """Take a lease that is free, or hold on to one's own; tells who holds it."""
    query_of(request, ())
    body = await parsed(request, LeaseTake)
    return answer(await request.app[PARTS].leases.take(_lease(request), body))


async def give_lease(request: web.Request) -> web.Response:
    """Give a lease back, if this holder still has it."""
    query_of(request, ())
    await request.app[PARTS].leases.give(_lease(request), await parsed(request, LeaseGive))
    return web.Response(status=204)


def _member(request: web.Request) -> str:
    return matching(request.match_info["member"], "member", _MEMBER)


def _lease(request: web.Request) -> str:
    return matching(request.match_info["name"], "name", LOG_NAME)


_ITEM: Final = "/v1/repairs/{ledger_id}/{member}"

ROUTES: Final = (
    Route("GET", "/v1/repairs", list_repairs, None, RepairList, query=("limit", "after")),
    Route("POST", "/v1/repairs", add_repairs, RepairsAdd, None, 204),
    Route("POST", "/v1/repairs/claim", claim_repairs, RepairClaim, RepairList),
    Route("POST", f"{_ITEM}/progress", progress_repair, RepairProgress, RepairRemaining),
    Route("POST", f"{_ITEM}/fail", fail_repair, RepairFail, None, 204),
    Route("GET", "/v1/repairs/summary", summarize_repairs, None, RepairSummary),
    Route("POST", "/v1/repairs/hurry", hurry_repairs, None, None, 204),
    Route("POST", "/v1/repairs/trigger", trigger_repairs, None, RepairSettings),
    Route("GET", "/v1/repair-settings", get_repair_settings, None, RepairSettings),
    Route("PATCH", "/v1/repair-settings", patch_repair_settings, RepairSettingsPut, RepairSettings),
    Route("PUT", "/v1/leases/{name}", take_lease, LeaseTake, Lease),
    Route("DELETE", "/v1/leases/{name}", give_lease, LeaseGive, None, 204),
)
