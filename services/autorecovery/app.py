"""Builds autorecovery: one auditor, some workers, and what an operator may ask of them."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import Any, Final, TypeVar
from uuid import uuid4

import aiohttp
from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field, ValidationError

from quorumlog.errors import InvalidRequest, QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import Ports, Times
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.bodies import Body, ServiceHeartbeat
from quorumlog.wire.repair_bodies import RepairSettingsPut
from services.autorecovery.auditor import Auditor
from services.autorecovery.check import Report
from services.autorecovery.checker import Checker
from services.autorecovery.config import Config
from services.autorecovery.drains import decommissioned, drain_of
from services.autorecovery.losses import Losses, answers_json
from services.autorecovery.pace import EndlessTimers, PacedBookies
from services.autorecovery.steering import Steering
from services.autorecovery.worker import Done, Workers
from services.autorecovery.writers import Writers

B = TypeVar("B", bound=Body)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HEARTBEAT_S: Final = 1.0
_COPY_BYTES: Final = 1 << 20
"""Read at a time: with a limit on the rate, no more than this goes out at once."""


class Delay(Body):
    """`PUT /v1/lost-bookie-delay`: the same value again means: look now."""

    seconds: float = Field(ge=0, le=86_400, strict=False)


class Parts:
    """What this process is made of, once it runs."""

    auditor: Auditor
    checker: Checker
    losses: Losses
    metadata: MetadataClient
    pace: PacedBookies
    repairs: RepairClient
    steering: Steering
    workers: Workers


def build(config: Config) -> web.Application:
    """The application; its work begins with it and ends with it."""
    app = web.Application(middlewares=[answers_problems])
    parts = Parts()
    done = Done()

    async def work(_app: web.Application) -> AsyncIterator[None]:
        name = str(uuid4())
        tasks, timers = Tasks(), Timers(asyncio.get_running_loop())
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            metadata = parts.metadata = MetadataClient(config.metadata_urls, session)
            directory = Directory(metadata.bookies)
            bookies = BookieClient(directory.address, session, failed=directory.quarantine.failed)
            pace = parts.pace = PacedBookies(bookies)
            repairs = parts.repairs = RepairClient(metadata, name)
            steering = parts.steering = Steering(config, metadata, repairs, pace)
            ports = Ports(bookies, metadata, directory, timers, tasks)
            paced = Ports(
                pace,
                metadata,
                directory,
                EndlessTimers(timers),
                tasks,
                Times(quorum_s=inf),
                read_bytes_max=_COPY_BYTES,
            )
            auditor = parts.auditor = Auditor(
                name, config, metadata, repairs, ports, Writers(session), steering
            )
            losses = parts.losses = Losses(HoldingsClient(directory, session))
            checker = parts.checker = Checker(config, metadata, repairs, directory, session, losses)
            workers = parts.workers = Workers(
                repairs, directory, paced, session, done, steering, losses
            )
            tasks.start(_tell_that_it_lives(metadata, name, config.url))
            tasks.start(metadata.keep_confirmed(_HEARTBEAT_S))
            tasks.start(steering.follow(auditor.trigger))
            tasks.start(directory.follow())
            tasks.start(auditor.run())
            tasks.start(checker.run(lambda: auditor.is_auditor))
            tasks.start(pace.run())
            tasks.start(workers.run(tasks))
            yield
            await tasks.close()
            timers.close()
            await bookies.close()

    async def ready() -> None:
        return

    add_shared_routes(app, ready=ready, openapi=lambda: _description(routes))
    routes = _routes(parts, done)
    for method, path, _, handler in routes:
        app.router.add_route(method, path, handler)
    app.cleanup_ctx.append(work)
    app[METRICS].register(_Measures(parts, done))
    return app


def _routes(parts: Parts, done: Done) -> Sequence[tuple[str, str, str, _Handler]]:
    async def status(_request: web.Request) -> web.Response:
        auditor, steering = parts.auditor, parts.steering
        return web.json_response(
            {
                "auditor": auditor.is_auditor,
                "lost": list(auditor.lost),
                "draining": list(auditor.draining),
                "paused": steering.is_paused,
                "lost_bookie_delay_s": steering.lost_bookie_delay_s,
                "bytes_per_s": steering.bytes_per_s,
                "concurrency": steering.concurrency,
                "working": parts.workers.working,
                "copied_bytes": parts.pace.copied_bytes,
                "repaired": done.repaired,
                "failed": done.failed,
                "audit_s": auditor.audit_s,
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
                "misplaced": parts.checker.misplaced_count,
                "queue": (await parts.repairs.summary()).model_dump(mode="json"),
            }
        )

    async def get_drain(request: web.Request) -> web.Response:
        drain = await drain_of(request.match_info["bookie"], parts.metadata)
        return web.json_response(drain.model_dump(mode="json"))

    async def decommission(request: web.Request) -> web.Response:
        await decommissioned(request.match_info["bookie"], parts.metadata)
        return web.Response(status=204)

    async def trigger(_request: web.Request) -> web.Response:
        await parts.repairs.trigger()
        return web.json_response({}, status=202)

    async def put_delay(request: web.Request) -> web.Response:
        delay = _parsed(Delay, await request.read())
        await parts.steering.change(RepairSettingsPut(lost_bookie_delay_s=delay.seconds))
        await parts.repairs.trigger()
        return web.json_response({"seconds": delay.seconds})

    async def patch_settings(request: web.Request) -> web.Response:
        await parts.steering.change(_parsed(RepairSettingsPut, await request.read()))
        return await status(request)

    async def verify(request: web.Request) -> web.Response:
        report = await parts.checker.verify(_ledger_id(request), queue=request.method == "POST")
        return web.json_response(_report_json(report))

    async def check_all(_request: web.Request) -> web.Response:
        parts.checker.trigger()
        return web.json_response({}, status=202)

    async def list_repairs(request: web.Request) -> web.Response:
        items, following = await parts.repairs.list(after=request.query.get("after"))
        return web.json_response(
            {"repairs": [item.model_dump(mode="json") for item in items], "next": following}
        )

    return (
        ("GET", "/v1/status", "What this process does and has done", status),
        ("GET", "/v1/repairs", "What lacks copies, and why it still does", list_repairs),
        ("POST", "/v1/checks", "Compare all copies of all ledgers now", check_all),
        ("GET", "/v1/checks/{ledger_id}", "Compare a ledger's copies", verify),
        ("POST", "/v1/checks/{ledger_id}", "The same, and have mended what lacks", verify),
        ("GET", "/v1/drains/{bookie}", "What still names a bookie, and why", get_drain),
        ("DELETE", "/v1/bookies/{bookie}", "Decommission a dead bookie", decommission),
        ("POST", "/v1/audits", "Look at everything now, and try again what waits", trigger),
        ("PUT", "/v1/lost-bookie-delay", "How long a bookie may be away", put_delay),
        ("PATCH", "/v1/settings", "Pause, resume, limit; for all processes", patch_settings),
    )


def _ledger_id(request: web.Request) -> int:
    text = request.match_info["ledger_id"]
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", text) or int(text) > ID_MAX:
        raise InvalidRequest("ledger_id is no ledger's id")
    return int(text)


def _report_json(report: Report) -> dict[str, Any]:
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


def _parsed(model: type[B], body: bytes) -> B:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(str(error.errors()[0]["msg"])) from error


class _Measures(Collector):
    """What operators watch, read when somebody scrapes."""

    def __init__(self, parts: Parts, done: Done) -> None:
        self._parts = parts
        self._done = done

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        if not hasattr(self._parts, "workers"):
            return
        parts, done = self._parts, self._done
        gauges: tuple[tuple[str, str, float], ...] = (
            ("is_auditor", "This process audits", parts.auditor.is_auditor),
            ("lost_bookies", "Bookies whose copies are made again", len(parts.auditor.lost)),
            ("draining_bookies", "Bookies that are being emptied", len(parts.auditor.draining)),
            ("paused", "1: nothing is copied", parts.steering.is_paused),
            ("working", "Repairs under way", parts.workers.working),
            ("audit_seconds", "How long the last audit took", parts.auditor.audit_s),
            ("check_seconds", "How long the last check of all copies took", parts.checker.pass_s),
            ("lost_entries", "Nobody can serve them: accept it", parts.losses.entries),
            ("misplaced_ledgers", "In fewer zones than possible", parts.checker.misplaced_count),
            ("copy_limit_bytes", "Bytes a second; 0: no limit", parts.steering.bytes_per_s or 0),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"quorumlog_autorecovery_{name}", text, value=value)
        counters: tuple[tuple[str, str, float], ...] = (
            ("repaired", "Items mended", done.repaired),
            ("failed", "Items put off", done.failed),
            ("copied_bytes", "Bytes written to repaired members", parts.pace.copied_bytes),
            ("copied_entries", "Entries of these", parts.pace.copied_entries),
            ("checked_ledgers", "Ledgers whose copies were compared", parts.checker.checked),
            ("lacking_ranges", "Ranges found lacking by a check", parts.checker.lacking),
            ("differing_ranges", "Ranges whose copies differ: an alarm", parts.checker.differing),
            ("checks_unanswered", "Members that a check heard nothing of", parts.checker.unknown),
            ("audits", "Audits", parts.auditor.audits),
            ("recoveries", "Abandoned ledgers recovered", parts.auditor.recovered),
            ("recoveries_failed", "Recoveries that were put off", parts.auditor.blocked_count),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"quorumlog_autorecovery_{name}", text, value=value)


async def _tell_that_it_lives(metadata: MetadataClient, name: str, url: str) -> None:
    while True:
        with contextlib.suppress(QuorumLogError):  # its own log line says that it is away
            await metadata.service_lives("autorecovery", name, ServiceHeartbeat(url=url))
        await asyncio.sleep(_HEARTBEAT_S)


def _description(routes: Iterable[tuple[str, str, str, _Handler]]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for method, path, text, _ in routes:
        responses = {"default": {"description": "JSON"}}
        paths.setdefault(path, {})[method.lower()] = {"summary": text, "responses": responses}
    return {
        "openapi": "3.1.0",
        "info": {"title": "quorumlog autorecovery", "version": "0.1.0"},
        "paths": paths,
    }
