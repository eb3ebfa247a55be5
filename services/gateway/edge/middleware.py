"""The middleware of every request: its id, its place among the requests in work, errors as problem documents,
metrics. Handlers contain no `try`: the errors that they raise become answers here.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quorumlog.errors import (
    BadRequest,
    MethodNotAllowed,
    QuorumLogError,
    ShuttingDown,
)
from quorumlog.net import audit, trace
from quorumlog.net.budget import PEER, peer_of
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import error_of_http, forgotten, problem_response, request_id
from quorumlog.net.service import check_caller
from services.gateway.edge.guard import Guard
from services.gateway.edge.room import Room
from services.gateway.edge.sending import large_bytes, send_whole

log = logging.getLogger(__name__)

REQUEST_ID: Final = web.RequestKey("request_id", str)
_SAFE: Final = frozenset((hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS))
_KNOWN: Final = _SAFE | {hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_DELETE, hdrs.METH_PATCH}
_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """Metrics of requests: their count, their time, and what is in work."""

    def __init__(self, registry: CollectorRegistry, room: Room) -> None:
        labels = ("method", "route", "status")
        self._count = Counter(
            "quorumlog_http_requests", "Answered requests.", labels, registry=registry
        )
        self._seconds = Histogram(
            "quorumlog_http_request_seconds",
            "From a request's head to its answer.",
            ("method", "route"),
            registry=registry,
            buckets=_BUCKETS,
        )
        for name, text, read in (
            ("requests_in_work", "Requests in work.", lambda: room.requests.used),
            ("waiters", "Long polls and tails.", lambda: room.waiters.used),
            ("held_bytes", "Bodies in memory.", lambda: room.bodies.used),
            ("answers_bytes", "Answers that wait for readers.", lambda: room.answers.used),
        ):
            gauge = Gauge(f"quorumlog_http_{name}", text, registry=registry)
            gauge.set_function(read)
        self._known: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        key = (method if method in _KNOWN else "other", route, status)
        known = self._known.get(key)
        if known is None:
            known = (
                self._count.labels(key[0], route, str(status)),
                self._seconds.labels(key[0], route),
            )
            self._known[key] = known
        known[0].inc()
        known[1].observe(seconds)


def edge_middleware(
    room: Room,
    metrics: Metrics,
    *,
    is_draining: Callable[[], bool],
    cors_origins: frozenset[str] = frozenset(),
    hosts: Hosts,
    is_internal: bool = False,
    guard: Guard | None = None,
) -> Middleware:
    """The one middleware of a gateway's listener, the public or the internal one. Without a guard everyone may do
    everything.
    """

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        instance = request_id(request.headers.get("X-Request-Id"))
        request[REQUEST_ID] = instance
        trace.begin(instance, request.headers.get(trace.HEADER))
        resource = request.match_info.route.resource
        route = "none" if resource is None else resource.canonical
        peer = peer_of(request.remote)
        PEER.set(peer)
        audited = audit.begin(request)
        place = large = 0
        response: web.StreamResponse | None = None
        try:
            try:
                hosts.check(request)
                hosts.check_origin(request, cors_origins)
                if is_internal:
                    # Takes no place: it must not starve behind those of clients.
                    check_caller(request)
                else:
                    _admit(request, is_draining)
                    if not request.path.startswith("/health"):
                        room.requests.take(peer)
                        place = 1
                    if guard is not None:
                        await guard.admit(request, route)
                response = await handler(request)
                if size := large_bytes(response):
                    room.keep(request, size)
                    large = size
            except QuorumLogError as error:
                response = problem_response(error, instance)
            except web.HTTPException as error:
                response = _answer_to(request, error, instance)
            except (asyncio.CancelledError, ConnectionError):
                raise
            except web.RequestPayloadError:
                response = problem_response(BadRequest("the body is broken or cut short"), instance)
            except Exception:
                log.exception(
                    "unhandled-error", extra={"request_id": instance, "path": request.path}
                )
                response = problem_response(QuorumLogError(), instance)
            finally:
                if place:
                    room.requests.give(peer)
                if guard is not None:
                    guard.leave(request, response)
                if audited is not None:
                    audited.end(response)
                room.release(request)
            metrics.observe(request.method, route, response.status, time.perf_counter() - started)
            if not response.prepared:
                response.headers["X-Request-Id"] = instance
                if large and isinstance(response, web.Response):
                    return await send_whole(request, response)
            return response
        except ConnectionError as error:
            raise forgotten(error) from None
        finally:
            room.let_go(request)

    return edge


def _admit(request: web.Request, is_draining: Callable[[], bool]) -> None:
    """Refuse a request that can't be taken now, before a byte of its body is read."""
    if is_draining() and request.method not in _SAFE:
        raise ShuttingDown("this gateway is about to end; ask another one")


def _answer_to(request: web.Request, error: web.HTTPException, instance: str) -> web.StreamResponse:
    """The answer to an error of aiohttp's: a problem, and for OPTIONS the methods of the path."""
    problem = error_of_http(error, request.method, request.path)
    if request.method == hdrs.METH_OPTIONS and isinstance(problem, MethodNotAllowed):
        allow = problem.headers["Allow"]
        return web.Response(status=204, headers={"Allow": allow, "Cache-Control": "no-store"})
    return problem_response(problem, instance)
