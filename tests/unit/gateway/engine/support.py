"""Engines on a real metadata service and on bookies in memory, which follow the real rules
(protocol.replica) and misbehave as a test tells them to.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.errors import QuorumLogError
from quorumlog.net.connections import ListenLimits
from quorumlog.net.listen import listening
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    LacAsked,
    LacReported,
    ReadAsked,
    Replica,
    RowReported,
    Verdict,
)
from quorumlog.wire.bodies import BookieHeartbeat, Cookie
from quorumlog.wire.frames import Message, Op, Request
from services.gateway.app import build_app, build_internal_app, running_logs
from services.gateway.edge.http.limits import Limits
from services.gateway.engine import Engine
from services.gateway.interface import EngineConfig, LedgerOptions
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import LogTimes
from tests.support.framed import Line
from tests.support.proxy import Proxy, proxy_to
from tests.support.replicas import HeldEntries, ask, memory_replica
from tests.support.waiting import until
from tests.unit.metadata.support import PATIENT_S, Service, serving
from tests.unit.net.peer import Peer, ok, read_body

NO_SWEEP = LogTimes(sweep_every_s=86_400, orphans_every_s=86_400)


class MemoryBookie(Peer):
    """A bookie without a disk."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ledgers: dict[int, Replica] = {}
        self.behave = self.obey
        self.is_silent = False

    @property
    def member(self) -> str:
        return f"{self.name}@1"

    def entries(self, ledger_id: int) -> list[int]:
        """The ids that it holds."""
        replica = self.ledgers.get(ledger_id)
        if replica is None:
            return []
        assert isinstance(replica.holdings, HeldEntries)
        return sorted(replica.holdings.entries)

    async def obey(self, request: Request, _line: Line) -> Message | None:
        """What a bookie that behaves answers."""
        if self.is_silent:
            return None
        replica = self.ledgers.setdefault(request.ledger_id, memory_replica(self.member))
        verdict = _judge(replica, request)
        body = b""
        if request.op is Op.READ and verdict.status is Status.OK:
            assert isinstance(replica.holdings, HeldEntries)
            body = read_body(replica.holdings.run(verdict.present), verdict.absent)
        return ok(request, verdict.status, verdict.last_add_confirmed, body)


class Gate:
    """Bookies that answer nothing until it opens."""

    def __init__(self, bookies: list[MemoryBookie]) -> None:
        self._opened = asyncio.Event()
        for bookie in bookies:
            bookie.behave = partial(self._wait, bookie)

    def open(self) -> None:
        self._opened.set()

    async def _wait(self, bookie: MemoryBookie, request: Request, line: Line) -> Message | None:
        await self._opened.wait()
        return await bookie.obey(request, line)


def _judge(replica: Replica, request: Request) -> Verdict:
    member, key = request.member, request.ledger_key
    match request.op:
        case Op.ADD:
            assert request.run is not None
            asked = AddAsked(
                member,
                request.run,
                key,
                request.recovery,
                named_by=request.named_by,
                row=request.row,
            )
            return ask(replica, asked)
        case Op.READ:
            first, last = request.first, request.last
            return replica.step(ReadAsked(member, first, last, request.fence, key))
        case Op.FENCE:
            return replica.step(FenceAsked(member, key))
        case Op.READ_LAC:
            return replica.step(LacAsked(member))
        case Op.WRITE_LAC:
            return replica.step(LacReported(member, request.last, key))
        case Op.KEEP_ROW:
            assert request.row is not None
            return replica.step(RowReported(member, request.row, key))


@dataclass
class Gateway:
    """One engine that listens for its peers."""

    engine: Engine
    ends: AsyncExitStack
    logs: LogManager
    proxy: Proxy
    """Between it and the metadata service."""
    app: web.Application
    """The public one."""

    async def kill(self) -> None:
        """End without a goodbye: nothing is settled, nothing is closed."""
        await self.ends.aclose()


@dataclass
class World:
    """What a test moves."""

    service: Service
    proxy: Proxy
    """Between the gateways and the metadata service."""
    bookies: dict[str, MemoryBookie] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.gateways[0].engine

    @property
    def other(self) -> Engine:
        return self.gateways[1].engine

    @property
    def metadata(self) -> MetadataClient:
        return self.service.client

    def of(self, row: LedgerMetadata) -> list[MemoryBookie]:
        """The bookies of a ledger's last ensemble, in its order."""
        return [self.bookies[member.split("@")[0]] for member in row.last_fragment.bookies]

    def outage(self) -> AbstractAsyncContextManager[None]:
        """The metadata service can't be reached."""
        return outage(self.proxy)

    def collect(self, ledger_id: int) -> None:
        """Every bookie gives a deleted ledger up with all that it knew of it, its fence too: as they
        did before rule 16a, and as one does that has lost its disk.
        """
        for bookie in self.bookies.values():
            bookie.ledgers.pop(ledger_id, None)

    async def register(self, bookie: MemoryBookie) -> None:
        """Let the metadata service know of a bookie, for the time of a test."""
        self.bookies[bookie.name] = bookie
        cookie = Cookie(
            incarnation=1, cluster_id=await self.metadata.cluster_id(), instance=bookie.name
        )
        await self.metadata.put_cookie(bookie.name, cookie, version=None)
        await self.lives(bookie)

    async def lives(self, bookie: MemoryBookie, ttl_s: float = 3600) -> None:
        heartbeat = BookieHeartbeat(incarnation=1, url=bookie.url, ttl_s=ttl_s)
        assert await self.metadata.send_bookie_heartbeat(bookie.name, heartbeat)


@asynccontextmanager
async def outage(proxy: Proxy) -> AsyncIterator[None]:
    """Whoever asks the metadata service by way of this proxy can't reach it."""
    proxy.is_down = True
    proxy.cut_all()
    try:
        yield
    finally:
        proxy.is_down = False


@asynccontextmanager
async def gateway(
    world: World,
    *,
    proxy: Proxy | None = None,
    log_times: LogTimes | None = None,
    limits: Limits | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """An engine and its logs with their internal routes, listening; without `proxy` it shares the
    world's. Without `log_times` it does not sweep logs.
    """
    internal_port, port = free_ports(2)
    proxy = proxy or world.proxy
    metadata_url = proxy.url(world.service.url)
    settings = {"metadata_s": PATIENT_S} | settings
    url, internal_url = (f"http://127.0.0.1:{number}" for number in (port, internal_port))
    config = EngineConfig(url, (metadata_url,), internal_url, **settings)
    async with AsyncExitStack() as ends:
        engine = await ends.enter_async_context(Engine.running(config))
        logs, _ = await ends.enter_async_context(running_logs(engine, log_times or NO_SWEEP))
        app = build_app(engine, limits or Limits(), logs=logs)
        internal = build_internal_app(app, engine, logs)
        listen = ListenLimits(drain_timeout_s=0.1)
        for one, number in ((internal, internal_port), (app, port)):
            await ends.enter_async_context(
                listening(one, host="127.0.0.1", port=number, limits=listen)
            )
        made = Gateway(engine, ends, logs, proxy, app)
        world.gateways.append(made)

        async def is_ready() -> bool:
            with contextlib.suppress(QuorumLogError):
                await engine.ready()
                return True
            return False

        await until(is_ready, "the gateway is ready")
        yield made


@asynccontextmanager
async def world_of(
    stores: Stores, *, bookies: int = 4, gateways: int = 2, **settings: Any
) -> AsyncIterator[World]:
    """A cluster in this process; `settings` are those of its engines."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(stores))
        proxy = await stack.enter_async_context(proxy_to(service.url))
        world = World(service, proxy)
        for number in range(1, bookies + 1):
            bookie = MemoryBookie(f"bookie-{number}")
            await bookie.start()
            stack.push_async_callback(bookie.stop)
            await world.register(bookie)
        for _ in range(gateways):
            await stack.enter_async_context(gateway(world, **settings))
        yield world


_SIZES = ("ensemble_size", "write_quorum", "ack_quorum")


async def ledger(engine: Engine, *payloads: bytes, **options: Any) -> LedgerMetadata:
    """A ledger of this engine, with these entries."""
    sizes = {name: options.pop(name) for name in _SIZES if name in options}
    row = await engine.create(LedgerOptions(quorum=Quorum.of(**sizes), **options))
    if payloads:
        await engine.appends.append(row.ledger_id, payloads)
    return row


async def payloads(engine: Engine, ledger_id: int, first: int = 0) -> list[bytes]:
    """All confirmed payloads from `first` on, as a reader sees them."""
    found: list[bytes] = []
    while True:
        page = await engine.reads.read(ledger_id, first, limit=1000)
        for run in page.runs:
            assert run.first == first
            found += [bytes(run.payload(index)) for index in range(run.count)]
            first = run.last + 1
        assert page.next == first
        if not page.runs:
            return found
