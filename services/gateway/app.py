"""Builds the gateway's public and internal applications around an engine."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from aiohttp import hdrs, web

from quorumlog import errors
from quorumlog.net.aiohttp_parts import DIRECT
from quorumlog.net.connections import ListenLimits
from quorumlog.net.directory import QuarantineRule
from quorumlog.net.gateway_clients import LogClient, TokenClient, TransactionClient
from quorumlog.net.hosts import Hosts
from quorumlog.net.identity import Authenticator
from quorumlog.net.listen import bind
from quorumlog.net.operations import Errors, Operation, Route, add_routes
from quorumlog.net.ports import MachineTimes
from quorumlog.net.service import DRAINING, HOSTS, METRICS, Listening, add_shared_routes
from quorumlog.net.timers import Tasks, restarted
from quorumlog.wire.versions import CHANNEL, shown
from services.gateway.config import GatewaySettings
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.guard import Guard, table_of
from services.gateway.edge.access.scopes import OPEN
from services.gateway.edge.cluster import SHARED, ClusterRoutes
from services.gateway.edge.console import ConsoleRoutes
from services.gateway.edge.consumers import ConsumerRoutes
from services.gateway.edge.direct import DirectRequests
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.http.body import ignore_expect
from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.http.middleware import Metrics, allow_origins, edge_middleware
from services.gateway.edge.ledgers import LedgerRoutes
from services.gateway.edge.log_keys import KeyRoutes
from services.gateway.edge.log_records import RecordRoutes
from services.gateway.edge.logs import LogRoutes
from services.gateway.edge.operations import CONTENT_ENCODING, PublicOperation, checked
from services.gateway.edge.operators import OperatorRoutes
from services.gateway.edge.queues import QueueRoutes
from services.gateway.edge.tokens import TokenRoutes
from services.gateway.edge.transactions import TransactionRoutes
from services.gateway.engine import Engine
from services.gateway.interface import EngineConfig
from services.gateway.internal import ledger_routes, log_routes, rate_routes
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import LogTimes
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.sweep import Sweep
from services.gateway.logs.transactions import Transactions
from services.gateway.metrics import EngineMetrics, LogMetrics, counts_of
from services.gateway.rates import Rates
from services.gateway.streams.operations import log_of
from services.gateway.streams.routes import StreamRoutes, stream_headers
from services.gateway.streams.subscriptions import SubscriptionRoutes
from services.gateway.streams.webhooks import Networks

_DESCRIPTION = (
    "Replicated, append-only ledgers over HTTP: the BookKeeper protocol. Errors are problem "
    "documents (RFC 9457) with a `code`, and say whether the request may be sent again "
    "(`retryable`) and what became of it (`outcome`). Each GET has a HEAD, each path OPTIONS."
)

_FORMATS: Final = {"channel": shown(CHANNEL)}

_TAGS: Final = (
    *(
        "Ledgers",
        "Entries",
        "Logs",
        "Records",
        "Consumers",
        "Queues",
        "Transactions",
        "Durable Streams",
    ),
    *("Tokens", "Cluster", "Operators", "About"),
)
"""The order of the resources in the API's documentation. Routes are tried in a different order."""

_ROOM: Final = web.AppKey("room", Room)
_ROUTES: Final = web.AppKey("routes", Sequence[Route])
_METRICS: Final = web.AppKey("request_metrics", Metrics)
_RATES: Final = web.AppKey("rates", Rates)


def build_app(
    engine: Engine,
    limits: Limits,
    *,
    logs: LogManager | None = None,
    transactions: Transactions | None = None,
    callers: Callers | None = None,
    cors_origins: Iterable[str] = (),
    hosts: Hosts | None = None,
    webhook_networks: Networks = (),
) -> web.Application:
    """Builds the public application. The caller starts and stops the engine and the logs.
    `callers`: verifies access tokens; if None, requests need no token. `webhook_networks`: private
    networks to which webhooks may be sent.
    """
    app = web.Application()
    room = app[_ROOM] = Room(limits)
    console = ConsoleRoutes()
    rates = app[_RATES] = Rates(engine, lambda: counts_of(app[_METRICS], logs))
    app.cleanup_ctx.append(partial(_sampling, rates))
    routes = _routes(engine, room, logs, transactions, callers, rates)
    if logs is not None:
        subscriptions = SubscriptionRoutes(logs, room, webhook_networks)
        app.on_cleanup.append(subscriptions.close)
        # The subscriptions' routes come first, because the routes of streams match the same paths.
        routes[:0] = [checked(route, room) for route in subscriptions.routes()]
    routes += console.routes()
    app[_ROUTES] = routes
    declared = [*(route.operation for route in routes), *SHARED]
    # `table_of` raises an error for a route without a declared scope, so the gateway doesn't start.
    operations = [one for one in declared if isinstance(one, PublicOperation)]

    async def drain() -> None:
        room.end_waits()
        if logs is not None:
            await logs.ownership.drain()
        await engine.drain()

    def waits_for() -> Sequence[str]:
        return [*(() if logs is None else logs.ownership.waits_for()), *engine.waits_for()]

    add_shared_routes(
        app,
        map(_described, operations),
        title="quorumlog gateway",
        description=_DESCRIPTION,
        has_tokens=True,
        ready=engine.ready,
        drain=drain,
        waits_for=waits_for,
        hosts=hosts,
        formats=_FORMATS,
        documentation=console.documentation,
        tags=_TAGS,
    )
    app[_METRICS] = Metrics(app[METRICS], room)
    origins = frozenset(cors_origins)
    if origins:
        app.on_response_prepare.append(allow_origins(origins))
    if callers is not None:
        # Caches must not serve one caller's response to another.
        app.on_response_prepare.append(_adds(hdrs.VARY, hdrs.AUTHORIZATION))
    if logs is not None:
        app.on_response_prepare.append(stream_headers)
        app[METRICS].register(LogMetrics(logs, transactions))
    add_routes(app, routes, has_heads=True, expect_handler=ignore_expect)
    table, guard = table_of(app, operations), None
    if callers is not None:
        guard = Guard(
            table,
            callers,
            ledger=engine.rows.row,
            transactions=transactions,
            stream_log=log_of,
            body_bytes_max=max(limits.frames_bytes_max, limits.body_bytes_max),
        )
    else:
        app[DIRECT] = DirectRequests(
            engine.appends,
            None if logs is None else logs.consumers,
            room,
            app[_METRICS],
            hosts=app[HOSTS],
            # Hooks that change responses need the regular path. The fast path serves no streams, so
            # it can ignore the hook for their headers.
            is_regular=lambda: (
                app[DRAINING].is_set()
                or any(hook is not stream_headers for hook in app.on_response_prepare)
            ),
        )
    app.middlewares.append(
        edge_middleware(
            room,
            app[_METRICS],
            is_draining=app[DRAINING].is_set,
            cors_origins=origins,
            hosts=app[HOSTS],
            guard=guard,
        )
    )
    return app


def build_internal_app(
    public: web.Application,
    engine: Engine,
    logs: LogManager,
    *,
    hosts: Hosts | None = None,
    authenticator: Authenticator | None = None,
) -> web.Application:
    """Builds the internal application. It shares the public application's budgets and metrics."""
    room = public[_ROOM]
    instance = engine.writer.id
    routes = [
        *ledger_routes(engine, instance, public[_ROUTES]),
        *log_routes(logs, instance, room),
        *rate_routes(public[_RATES], instance),
    ]
    app = web.Application()
    add_shared_routes(
        app,
        (route.operation for route in routes),
        title="quorumlog gateway, internal listener",
        ready=engine.ready,
        hosts=hosts,
        authenticator=authenticator,
        registry=public[METRICS],
        formats=_FORMATS,
    )
    app.middlewares.append(
        edge_middleware(
            room,
            public[_METRICS],
            is_draining=public[DRAINING].is_set,
            hosts=app[HOSTS],
            is_internal=True,
        )
    )
    add_routes(app, routes, expect_handler=ignore_expect)
    return app


async def _sampling(rates: Rates, _app: web.Application) -> AsyncIterator[None]:
    """Samples the rates until the application's cleanup."""
    tasks = Tasks()
    tasks.start(restarted(rates.run))
    yield
    await tasks.close()


def _adds(name: str, value: str) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Returns a hook for aiohttp that adds a header to every response."""

    async def add(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(name, value)

    return add


def _described(operation: PublicOperation) -> Operation:
    """Returns an operation as OpenAPI shows it. The edge adds the errors of shutdown and of access
    control, and the parameter `Content-Encoding`.
    """
    more: Errors = () if operation.method == "GET" else (errors.ShuttingDown,)
    description = operation.description
    if operation.scope is not OPEN:
        more = (*more, errors.Unauthenticated, errors.MetadataUnavailable)
        description = f"{description} Where tokens are required: {operation.scope}.".lstrip()
    coded = (CONTENT_ENCODING,) if operation.body and operation.method != "DELETE" else ()
    return replace(
        operation,
        errors=(*operation.errors, *more),
        description=description,
        parameters=(*operation.parameters, *coded),
    )


def _routes(
    engine: Engine,
    room: Room,
    logs: LogManager | None,
    transactions: Transactions | None,
    callers: Callers | None,
    rates: Rates,
) -> list[Route]:
    """Returns the public routes. aiohttp tries them in this order: appends and reads come first."""
    routes = [
        *EntryRoutes(engine, room, transactions).routes(),
        *LedgerRoutes(engine, room, transactions).routes(),
        *ClusterRoutes(engine, rates).routes(),
        *OperatorRoutes(engine, room).routes(),
    ]
    if logs is not None:
        routes += [
            *RecordRoutes(logs, room).routes(),
            *KeyRoutes(logs, room).routes(),
            *LogRoutes(logs, room).routes(),
            *ConsumerRoutes(logs.consumers, room).routes(),
            *QueueRoutes(logs.queues, room).routes(),
            *StreamRoutes(logs, room).routes(),
        ]
    if transactions is not None:
        routes += TransactionRoutes(transactions, room).routes()
    routes += TokenRoutes(TokenClient(engine.metadata), room, callers).routes()
    return [checked(route, room) for route in routes]


@contextlib.asynccontextmanager
async def running_logs(
    engine: Engine, times: LogTimes
) -> AsyncIterator[tuple[LogManager, Transactions]]:
    """Runs the logs and transactions of an engine. The logs must be drained before the engine."""
    transactions = TransactionClient(engine.metadata)
    store = MetadataLogs(LogClient(engine.metadata, engine.database_clock), transactions)
    logs = LogManager(engine=engine, store=store, peers=LogPeers(engine.peers), times=times)
    engine.rows.on_gap += [logs.rows.gap, logs.subscriptions.gap]
    engine.rows.on_log += [logs.rows.heard, logs.subscriptions.heard]
    sweep = Sweep(logs, store)
    for work in (sweep.run, sweep.run_orphans, logs.subscriptions.run):
        _ = logs.ownership.task(restarted(work))
    try:
        yield logs, Transactions(engine=engine, logs=logs, store=store, client=transactions)
    finally:
        await logs.ownership.stop()


async def create_apps(settings: GatewaySettings) -> Sequence[Listening]:
    """Builds both applications of a gateway process.

    The internal application listens first and ends last, so that other processes can reach this
    process while it may be a ledger's writer. The engine runs until that application's cleanup.
    """
    stack = contextlib.AsyncExitStack()
    bound = bind(settings.internal_host, settings.internal_port)
    internal_port = bound.getsockname()[1]
    internal_url = settings.internal_url(internal_port)
    config = EngineConfig(
        url=settings.url,
        internal_url=internal_url,
        credentials=settings.credentials,
        metadata_urls=settings.metadata_urls,
        ledger_in_flight_bytes_max=settings.ledger_in_flight_bytes_max,
        gateway_in_flight_bytes_max=settings.gateway_in_flight_bytes_max,
        open_ledgers_max=settings.open_ledgers_max,
        peer_open_ledgers_max=settings.peer_open_ledgers_max,
        delays_ensemble_change=settings.delay_ensemble_change,
        clock_difference_s=settings.clock_difference_s,
        zones_min=settings.zones_min,
        enforces_zones=settings.enforce_zones,
        quarantine=QuarantineRule(
            settings.quarantine_failures, settings.quarantine_window_s, settings.quarantine_s
        ),
        times=MachineTimes(add_s=settings.silent_bookie_s, quorum_s=settings.quorum_timeout_s),
    )
    engine = await stack.enter_async_context(Engine.running(config))
    logs, transactions = await stack.enter_async_context(
        running_logs(
            engine,
            LogTimes(
                consumer_expiry_s=settings.consumer_expiry_s, orphan_age_s=settings.orphan_age_s
            ),
        )
    )
    callers = None
    if settings.require_tokens:
        known = Callers.running(TokenClient(engine.metadata), settings.jwts)
        callers = await stack.enter_async_context(known)
    app = build_app(
        engine,
        settings,
        logs=logs,
        transactions=transactions,
        callers=callers,
        cors_origins=settings.cors_origins,
        hosts=settings.hosts,
        webhook_networks=settings.webhook_networks,
    )
    app[METRICS].register(EngineMetrics(engine))
    if settings.hsts_s:
        # A browser that has received this header connects only with TLS.
        demand = _adds("Strict-Transport-Security", f"max-age={settings.hsts_s}")
        app.on_response_prepare.append(demand)
    internal = build_internal_app(
        app,
        engine,
        logs,
        hosts=Hosts(internal_url, settings.allowed_hosts),
        authenticator=settings.authenticator,
    )

    async def end(_app: web.Application) -> None:
        await stack.aclose()

    internal.on_cleanup.append(end)
    limits = settings.listen_limits()
    inside = ListenLimits(drain_timeout_s=settings.drain_s)
    return (
        Listening(internal, settings.internal_host, internal_port, inside, bound, tls=settings.tls),
        Listening(app, settings.host, settings.port, limits, tls=settings.public_tls),
    )
