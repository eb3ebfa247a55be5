"""Gateways and autorecovery made of the code that ships, each in a process that can die."""

import asyncio
import random
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import web

from quorumlog.errors import RouteNotFound
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import Ports
from quorumlog.net.timers import Tasks, Timers, restarted
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import BookieList, CookieRow, witness_of
from services.autorecovery.auditor import Auditor
from services.autorecovery.checker import Checker
from services.autorecovery.config import Config
from services.autorecovery.findings import KnownLosses
from services.autorecovery.steering import PacedBookies, Steering
from services.autorecovery.worker import Worker
from services.autorecovery.writers import Writers
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.ledgers import LedgerRoutes
from services.gateway.engine import Engine
from services.gateway.engine.engine import _HEARTBEAT_S
from services.gateway.engine.peers import Peers
from services.gateway.interface import EngineConfig
from services.gateway.internal import ledger_routes
from tests.model.sim.plan import MS, SECOND
from tests.model.sim.services.database import Database
from tests.model.sim.services.judge import Judge
from tests.model.sim.services.metadata import CLUSTER_ID, Metadata, tokens_of, urls_of
from tests.model.sim.services.net import Answer, Net, Process, Request, Session
from tests.model.sim.services.node import Bookies, Node
from tests.model.sim.services.operator import Operator
from tests.model.sim.services.tables import Registration

Work = Callable[[], Awaitable[None]]

SILENCE = 15 * SECOND
"""Three heartbeats of a stream of changes (net/metadata_requests.py)."""


class _Tasks(Tasks):
    """Tasks that die with their process."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def start(self, work: Any) -> None:
        if self._process.is_alive:
            _ = self._process.spawn(work)
        else:
            work.close()


class _Clock:
    """A process's event loop as its timers see it: while it stands still nothing fires."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = process.net.loop

    def time(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, call: Callable[..., object]) -> asyncio.TimerHandle:
        return self._loop.call_at(when, self._fire, call)

    def _fire(self, call: Callable[..., object]) -> None:
        process = self._process
        if process.paused_until > process.net.now:
            process.net.after(process.paused_until - process.net.now, self._fire, call)
        elif process.is_alive:
            call()


class Gateway(Process):
    """One gateway: its engine, and the routes on which other gateways reach it."""

    def __init__(self, name: str, url: str, net: Net, nodes: dict[str, Node]) -> None:
        super().__init__(name, net)
        self.url = url
        self._clock = _Clock(self)
        session = cast("Any", Session(self))
        tasks, timers = _Tasks(self), Timers(cast("Any", self._clock))
        config = EngineConfig(self.url, urls_of(net.plan))
        metadata = MetadataClient(urls_of(net.plan), session, deadline_s=config.metadata_s)
        directory = seeded(Directory(metadata.bookies), net.rng)
        bookies = cast("Any", Bookies(self, nodes))
        ports = Ports(bookies, metadata, directory, timers, tasks, config.times)
        self.engine = Engine(
            config,
            metadata,
            directory,
            bookies,
            ports,
            Peers(session),
            HoldingsClient(directory, session),
        )
        self.client = metadata
        work: list[Work] = [directory.follow, self.engine.rows.follow]
        if net.plan.has_restores:
            work.append(partial(metadata.keep_confirmed, _HEARTBEAT_S))
        for one in work:
            tasks.start(restarted(one))
        self._room = Room(Limits())
        parts = (EntryRoutes(self.engine, self._room), LedgerRoutes(self.engine, self._room))
        public = [route for part in parts for route in part.routes()]
        self._routes = [
            (
                route.operation.method,
                re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.operation.path)),
                route.handle,
            )
            for route in ledger_routes(self.engine, self.engine.writer.id, public)
        ]
        net.listeners[self.url] = self, self.handle

    async def handle(self, request: Request) -> Answer:
        """One of the internal routes that ship."""
        for method, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path)
            if method == request.method and found:
                asked = Request(
                    request.method,
                    request.path,
                    request.body,
                    request.query,
                    request.headers,
                    found.groupdict(),
                )
                served = cast("web.Request", asked)
                try:
                    reported = cast("web.Response", await handler(served))
                finally:
                    self._room.release(served)
                return Answer(
                    reported.status, bytes(cast("bytes", reported.body)), reported.headers
                )
        raise RouteNotFound(request.path)

    def kill(self) -> None:
        """All handles are gone with their process."""
        super().kill()
        for handle in self.engine.handles.by_ledger.values():
            handle._driver.stop()


class _Marking:
    """The rows as the auditor's recoveries change them: the judge hears of each that it begins."""

    def __init__(self, metadata: MetadataClient, began: Callable[[LedgerMetadata], None]) -> None:
        self._metadata = metadata
        self._began = began

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        return await self._metadata.read(ledger_id)

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        if metadata.state is State.IN_RECOVERY:
            self._began(metadata)
        return await self._metadata.cas(metadata, missed, attempt=attempt)


class Healer(Process):
    """One process of autorecovery: auditor and workers."""

    def __init__(
        self,
        name: str,
        net: Net,
        nodes: dict[str, Node],
        began: Callable[[LedgerMetadata], None],
    ) -> None:
        """`began` hears of each ledger that the auditor begins to recover."""
        super().__init__(name, net)
        session = cast("Any", Session(self))
        tasks, timers = _Tasks(self), Timers(cast("Any", _Clock(self)))
        config = Config.model_validate(
            {
                "port": 1,
                "metadata_urls": urls_of(net.plan),
                "lost_bookie_delay_s": 5.0,
                "abandoned_s": 5.0,
                "silent_s": 50.0,
                "in_recovery_s": 5.0,
                "audit_s": 2.0,
                "full_audit_s": 60.0,
                "check_s": 20.0,
            }
        )
        metadata = self.client = MetadataClient(urls_of(net.plan), session)
        directory = seeded(Directory(metadata.bookies), net.rng)
        bookies = cast("Any", Bookies(self, nodes))
        ports = Ports(bookies, metadata, directory, timers, tasks)
        marking = Ports(bookies, _Marking(metadata, began), directory, timers, tasks)
        repairs = RepairClient(metadata, name)
        steering = Steering(config, metadata, repairs, PacedBookies(bookies))
        writers = Writers(session, _nobody_listens)
        self.auditor = Auditor(name, config, metadata, repairs, marking, writers, steering)
        losses = KnownLosses(HoldingsClient(directory, session))
        worker = Worker(repairs, directory, ports, session, losses, steering)
        tasks.start(directory.follow())
        if net.plan.has_restores:
            tasks.start(metadata.keep_confirmed(_HEARTBEAT_S))
        checker = Checker(config, metadata, repairs, directory, session, losses, ports)
        tasks.start(self.auditor.run())
        tasks.start(checker.run(lambda: self.auditor.is_auditor))
        tasks.start(worker.run(tasks))


async def _nobody_listens(_url: str) -> bool:
    """A name is one address here: where a connection to it was refused, all were."""
    return True


def seeded(directory: Directory, rng: random.Random) -> Directory:
    """A directory whose chance is the run's."""
    directory.chance = cast("Any", rng)
    return directory


class Cluster:
    """Everything that runs, by name; faults pick from here."""

    def __init__(self, net: Net, judge: Judge) -> None:
        plan = net.plan
        self.net = net
        self.judge = judge
        self.nodes: dict[str, Node] = {}
        self.lies_until = 0
        self.database = Database(net, judge.restores)
        self.metadatas = [
            Metadata(number + 1, self.database, net, self._bookies, judge.changed)
            for number in range(plan.metadatas)
        ]
        judge.restores.knowers = self._knowers
        for number in range(1, plan.bookies + 1):
            self._register(number)
        self.database.committed()
        self._made = 0
        self.gateways = [self._gateway(index) for index in range(plan.gateways)]
        self.healers = [self._healer(f"healer-{number}") for number in (1, 2)]
        self.operator = Operator(self)
        urls = {name: node.directory.url for name, node in self.nodes.items()}
        for metadata in self.metadatas:
            metadata.heartbeats = lambda: urls
            if plan.has_restores:
                metadata.ask_bookies()

    def _register(self, number: int) -> None:
        """A bookie is there before the clients come; the database, which was empty before, has its cookie."""
        node = self.nodes[f"b{number}"] = Node(f"b{number}", self.net, self.judge)
        directory, token = node.directory, str(uuid.UUID(int=number))
        assert directory.cookie is not None
        cookie = directory.cookie.cookie.model_copy(update={"url": directory.url})
        row = CookieRow(name=node.name, version=1, cookie=cookie)
        self.database.tables.cookies[node.name] = Registration(row, self.metadatas[0].utc)
        self.database.tables.record(token, f"cookie {node.name}")
        directory.witnesses = node.client.witnesses = (witness_of(CLUSTER_ID, token),)
        node.serve(node.incarnation)

    def _healer(self, name: str) -> Healer:
        return Healer(name, self.net, self.nodes, self._recovers)

    def _recovers(self, row: LedgerMetadata) -> None:
        """The auditor begins to recover a ledger: has its writer's gateway ended?"""
        gateways = [gateway for gateway in self.gateways if gateway.engine.writer == row.writer]
        self.judge.auditor_recovers(row.ledger_id, is_writer_there=bool(gateways))

    def _gateway(self, index: int) -> Gateway:
        """Who comes after a gateway that died listens at its address, and is another (rule 11)."""
        self._made += 1
        url = f"http://gateway-{index}:1"
        return Gateway(f"gateway-{self._made}", url, self.net, self.nodes)

    def _bookies(self) -> BookieList:
        """Liveness, which lies now and then (I31)."""
        net, cookies = self.net, sorted(self.database.tables.cookies.items())
        infos = [
            self.nodes[name].info(one.row.cookie) for name, one in cookies if not one.is_retired
        ]
        if self.lies_until > net.now:
            infos = [
                info.model_copy(update={"state": net.rng.choice(("writable", "lost", info.state))})
                for info in infos
                if net.rng.random() < 0.9
            ]
        return BookieList(bookies=tuple(infos), liveness_age_s=net.now / 1e6)

    def _knowers(self, since: int, lost: frozenset[str]) -> list[str]:
        """Who lives since then, knows one of these changes, and has had nothing in its way."""
        if not self.judge.are_all_heard:
            return []
        clients = [
            *((gateway, gateway.client) for gateway in self.gateways),
            *((healer, healer.client) for healer in self.healers),
            *((node, node.client) for node in self.nodes.values()),
        ]
        return [
            process.name
            for process, client in clients
            if process.is_alive and process.born_at < since and lost & tokens_of(client.witnesses)
        ]

    # --- faults ----------------------------------------------------------------------------------

    def kill_gateway(self, index: int) -> None:
        """A gateway dies, and another process comes in its place."""
        at = index % len(self.gateways)
        self.net.note(self.gateways[at].name, "dies")
        self.gateways[at].kill()
        self.gateways[at] = self._gateway(at)

    def kill_healer(self, index: int) -> None:
        """A process of autorecovery dies, and another one begins."""
        at = index % len(self.healers)
        self.net.note(self.healers[at].name, "dies")
        self.healers[at].kill()
        self._made += 1
        self.healers[at] = self._healer(f"healer-{self._made + 2}")

    def strike(self, kind: str, lasts: int, target: int, other: int) -> None:
        """Let a fault happen, and its end."""
        net = self.net
        if net.is_healed:
            return
        net.note("fault", kind, target, other, lasts / 1e6)
        nodes = list(self.nodes.values())
        node, until = nodes[target % len(nodes)], min(net.now + lasts, net.plan.heal_at)
        match kind:
            case "bookie-killed" | "bookie-power-cut" | "bookie-wiped":
                node.fall({"bookie-killed": "kill", "bookie-wiped": "wipe"}.get(kind, "power-cut"))
                net.after(lasts, node.rise)
            case "bookie-full":
                node.full_until = until
            case "bookie-slow":
                node.slow_until = until
            case "bookie-drained":
                node.is_draining = True
                net.after(lasts, setattr, node, "is_draining", False)
            case "damage":
                ledgers = [node.ledgers[ledger_id] for ledger_id in sorted(node.ledgers)]
                if ledgers and node.is_alive:
                    ledgers[other % len(ledgers)].corrupt()
            case "gateway-killed":
                self.kill_gateway(target)
            case "gateway-paused":
                gateway = self.gateways[target % len(self.gateways)]
                gateway.paused_until = until
            case "healer-killed":
                self.kill_healer(target)
            case "metadata-cut":
                gateway = self.gateways[target % len(self.gateways)]
                self._cut_off(gateway, other, until)
            case "metadata-down":
                self.database.down_until = until
                self._break_streams()
            case "metadata-killed":
                self.metadatas[target % len(self.metadatas)].restart()
            case "database-back":
                self._go_back(target, other, until)
            case "database-and-disk-lost":
                self._go_back(target, other, until, to_nothing=other % 3 > 0)
                self._lose_a_disk(nodes[target // 8 % len(nodes)], lasts)
            case "partition" | "one-way" | "clog":
                self._links(kind, node, other, until)
            case "lies":
                self.lies_until = until
            case _:
                raise AssertionError(kind)

    def _go_back(self, how: int, which: int, until: int, *, to_nothing: bool = False) -> None:
        """Older tables: restored into the server that runs, or by another server, which some process finds
        later; processes of the service end with it, or live on.
        """
        if not self.database.go_back(0 if to_nothing else which, is_new_server=how % 4 > 0):
            return
        for number, metadata in enumerate(self.metadatas):
            if how >> number & 4:
                metadata.restart()
            elif how % 4 > 1:
                metadata.away_until = self.net.now + self.net.rng.choice((0, 1, 5)) * SECOND
        self.operator.went_back(not_before=until, wants_right=how % 2 == 0)

    def _lose_a_disk(self, node: Node, lasts: int) -> None:
        """The bookie starts empty under its old name: maybe before anybody knows that the database went back, maybe
        about when the operator looks (after `lasts`), maybe later.
        """
        node.fall("wipe")
        rng = self.net.rng
        delay = rng.choice((0, SECOND, lasts + rng.randint(0, SECOND), 30 * SECOND))
        self.net.after(delay, node.rise)

    def _break_streams(self, who: Process | None = None) -> None:
        for metadata in self.metadatas:
            metadata.stream.end(who)

    def _cut_off(self, gateway: Gateway, how: int, until: int) -> None:
        """A gateway's requests do not reach metadata, or its answers and changes do not come, or
        changes only; the stream hangs until that ends, or its connection is reset.
        """
        net = self.net
        for metadata in self.metadatas:
            there, back = (gateway.name, metadata.name), (metadata.name, gateway.name)
            links = ((there, back), (there, back), (there,), (back,), ())[how % 5]
            net.cut.update(dict.fromkeys(links, until))
            if not links:
                metadata.stream.muted[gateway.name] = until
            if how % 2:
                metadata.stream.end(gateway)
            else:
                net.after(SILENCE, metadata.stream.end_if_silent, gateway)

    def _links(self, kind: str, node: Node, other: int, until: int) -> None:
        net = self.net
        others: list[Process] = [*self.gateways, *self.healers]
        end = others[other % len(others)].name
        names = [metadata.name for metadata in self.metadatas] if other % 4 == 0 else [node.name]
        links = [(end, far) for far in names], [(far, end) for far in names]
        found = links[other % 2] if kind == "one-way" else [*links[0], *links[1]]
        where = net.clogged if kind == "clog" else net.cut
        where.update(dict.fromkeys(found, until))

    def heal(self) -> None:
        """The faults are over."""
        net = self.net
        net.note("healed")
        net.is_healed = True
        net.cut.clear()
        net.clogged.clear()
        for metadata in self.metadatas:
            metadata.stream.muted.clear()
            metadata.away_until = 0
        self.lies_until = self.database.down_until = 0
        for gateway in self.gateways:
            gateway.paused_until = min(gateway.paused_until, net.now)
        for node in self.nodes.values():
            node.full_until = node.slow_until = 0
            node.is_draining = False
            node.rise()
        net.after(MS, self._break_streams)
