"""The middleware of every request: request id, budgets, errors as problem documents, metrics.

Handlers contain no `try`, because the middleware converts their errors to responses. CORS headers
are added just before a response is sent. Thus every response has these headers, including errors,
streams and sockets.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import accumulate
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quorumlog import errors, header
from quorumlog.net import audit, responses, trace
from quorumlog.net.budget import PEER, peer_of
from quorumlog.net.connections import as_sent
from quorumlog.net.hosts import Hosts
from quorumlog.net.service import check_caller
from services.gateway.edge import arrow
from services.gateway.edge.access.guard import Guard
from services.gateway.edge.http.codings import PACKS, pack
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.sending import large_bytes, send_whole

EXPOSED: Final = (
    hdrs.ALLOW,
    "ETag",
    "First-Offset",
    "Lac-Source",
    header.LAST_ADD_CONFIRMED,
    header.LEDGER_CLOSED,
    hdrs.LOCATION,
    "Log-Closed",
    "Log-Created-At",
    header.NEXT_ENTRY_ID,
    header.NEXT_OFFSET,
    header.PRODUCER_DUPLICATE,
    header.PRODUCER_EPOCH,
    header.PRODUCER_EXPECTED_SEQ,
    header.PRODUCER_SEQ,
    "Producer-Received-Seq",
    hdrs.RETRY_AFTER,
    header.REQUEST_ID,
    "Stream-Closed",
    "Stream-Cursor",
    "Stream-Expires-At",
    "Stream-Next-Offset",
    "Stream-Sse-Data-Encoding",
    "Stream-Up-To-Date",
    hdrs.WWW_AUTHENTICATE,
)
"""Additional response headers that a browser exposes to pages of other origins."""

_EXPOSED: Final = ", ".join(EXPOSED)
_MAX_AGE_S: Final = "600"


def allow_origins(
    origins: frozenset[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Create an `on_response_prepare` handler that adds CORS headers for `origins` (`*`: any)."""

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not ("*" in origins or origin in origins):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method == hdrs.METH_OPTIONS and asked is not None:
            # For a preflight request, allow every method and header that the path accepts.
            allowed = response.headers.get(hdrs.ALLOW, "")
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = allowed
            if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
            response.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = _MAX_AGE_S

    return allow


log = logging.getLogger(__name__)

_SAFE: Final = frozenset((hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS))
_KNOWN: Final = _SAFE | {hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_DELETE, hdrs.METH_PATCH}
_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_BUCKET_NAMES: Final = (*(str(float(end)) for end in _BUCKETS), "+Inf")


class Metrics(Collector):
    """Request metrics: counts, latencies, and the use of the budgets."""

    def __init__(self, registry: CollectorRegistry, room: Room) -> None:
        for name, text, read in (
            ("requests_in_work", "Requests in progress.", lambda: room.requests.used),
            ("waiters", "Long polls and tails.", lambda: room.waiters.used),
            ("held_bytes", "Bytes of request bodies in memory.", lambda: room.bodies.used),
            ("answers_bytes", "Bytes of responses not yet read.", lambda: room.answers.used),
        ):
            gauge = Gauge(f"quorumlog_http_{name}", text, registry=registry)
            gauge.set_function(read)
        zeros = [0] * len(_BUCKET_NAMES)
        self._counts = defaultdict[tuple[str, str, int], list[int]](zeros.copy)
        """Latency histogram by method, route and status."""
        self._sums_s = defaultdict[tuple[str, str, int], float](float)
        registry.register(self)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record the status and latency of a request."""
        key = (method if method in _KNOWN else "other", route, status)
        self._counts[key][bisect_left(_BUCKETS, seconds)] += 1
        self._sums_s[key] += seconds

    def totals(self) -> Iterable[tuple[str, str, int, int, float]]:
        """Yield the count and total latency in seconds for each method, route and status."""
        for key, counts in self._counts.items():
            yield *key, sum(counts), self._sums_s[key]

    def collect(self) -> Iterable[Metric]:
        """Yield the current values of the request counter and the latency histogram."""
        requests = CounterMetricFamily(
            "quorumlog_http_requests", "Answered requests.", labels=("method", "route", "status")
        )
        seconds = HistogramMetricFamily(
            "quorumlog_http_request_seconds",
            "Seconds from a request's head to its response.",
            labels=("method", "route"),
        )
        routes = defaultdict[tuple[str, str], list[tuple[str, str, int]]](list)
        for key, counts in self._counts.items():
            method, route, status = key
            requests.add_metric((method, route, str(status)), sum(counts))
            routes[method, route].append(key)
        for labels, keys in routes.items():
            totals = map(sum, zip(*[self._counts[key] for key in keys], strict=True))
            buckets = list(zip(_BUCKET_NAMES, accumulate(totals), strict=True))
            seconds.add_metric(labels, buckets, sum(self._sums_s[key] for key in keys))
        yield requests
        yield seconds


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
    """Create the only middleware of a gateway's listener, public or internal. `guard` checks
    access; without it, all requests are allowed.
    """

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        request = as_sent(request)
        instance = responses.request_id(request.headers.get("X-Request-Id"))
        request[responses.REQUEST_ID] = instance
        trace.begin(instance, request.headers.get(trace.HEADER))
        resource = request.match_info.route.resource
        route = "none" if resource is None else resource.canonical
        peer = peer_of(request.remote)
        PEER.set(peer)
        audited = audit.begin(request, route)
        request[PACKS] = not is_internal
        place = large = 0
        response: web.StreamResponse | None = None
        try:
            try:
                hosts.check(request)
                hosts.check_origin(request, cors_origins)
                if is_internal:
                    # Internal requests have no budget, so that clients can't starve them.
                    check_caller(request)
                else:
                    # All checks come before any byte of the body is read.
                    if is_draining() and request.method not in _SAFE:
                        raise errors.ShuttingDown("this gateway is stopping: use another gateway")
                    if not request.path.startswith("/health"):
                        room.requests.take(peer)
                        place = 1
                    if guard is not None:
                        await guard.admit(request, route)
                await arrow.load(request)
                response = await handler(request)
                if size := large_bytes(response):
                    room.keep(request, size)
                    large = size
                elif isinstance(response, web.Response):
                    pack(request, room, response)
            except errors.QuorumLogError as error:
                response = responses.problem_response(error, instance)
                if isinstance(error, errors.MetadataUnavailable):
                    # A load balancer may direct the next connection to a gateway that can reach
                    # the metadata service.
                    response.force_close()
            except web.HTTPException as error:
                response = _answer_to(request, error, instance)
            except (asyncio.CancelledError, ConnectionError):
                raise
            except web.RequestPayloadError:
                response = responses.problem_response(
                    errors.BadRequest("the body is truncated or malformed: resend it"), instance
                )
            except Exception:
                log.exception(
                    "unhandled-error", extra={"request_id": instance, "path": request.path}
                )
                response = responses.problem_response(errors.QuorumLogError(), instance)
            finally:
                if place:
                    room.requests.give(peer)
                if guard is not None:
                    guard.leave(request, response)
                if audited is not None:
                    audited.end(response)
                room.release(request)
            if not large and (large := large_bytes(response)):
                room.keep(request, large, is_problem=True)
            metrics.observe(request.method, route, response.status, time.perf_counter() - started)
            if not response.prepared:
                response.headers["X-Request-Id"] = instance
                if large and isinstance(response, web.Response):
                    return await send_whole(request, room, response)
            return response
        except ConnectionError as error:
            raise responses.forgotten(error) from None
        finally:
            room.let_go(request)

    return edge


def _answer_to(request: web.Request, error: web.HTTPException, instance: str) -> web.StreamResponse:
    """Convert aiohttp's error to a problem, or for OPTIONS to a response with allowed methods."""
    problem = responses.error_of_http(error, request.method, request.path)
    is_server = request.raw_path == "*"  # the server as a whole (RFC 9110, 9.3.7)
    if request.method == hdrs.METH_OPTIONS and (
        is_server or isinstance(problem, errors.MethodNotAllowed)
    ):
        allow = ", ".join(sorted(_KNOWN)) if is_server else problem.headers["Allow"]
        return web.Response(status=204, headers={"Allow": allow, "Cache-Control": "no-store"})
    return responses.problem_response(problem, instance)
