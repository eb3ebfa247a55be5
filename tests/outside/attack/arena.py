"""A cluster under attack: who attacks from where, who stands by, what is measured meanwhile."""

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from loadtest.cluster import Cluster
from loadtest.waiting import DeadlineMissed, until
from quorumlog.client import Client
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.token_bodies import TokenCreate
from services.bookie.index import BLOCK_CACHE_BYTES
from services.gateway.edge.http.media import ARROW
from services.gateway.edge.tokens import AccessTokenCreate
from services.local.process import Become, in_child
from tests.outside.attack import raw
from tests.outside.attack.api import Operation, url_of, wrong
from tests.outside.attack.meters import Meters
from tests.outside.attack.raw import Answer, Hang
from tests.outside.attack.report import Figures, Kind, Report

ROOT: Final = Path(__file__).resolve().parents[3]
PEERS: Final = 16
WIDTH: Final = 48
"""So many requests at once."""
BEFORE_S: Final = 3.0
"""For the bystander's own figures."""
REST_S: Final = 60.0
"""How long memory and descriptors may take to come back."""
RSS_TIMES_MAX: Final = 1.2
"""The bound on a process's memory at rest after the attack, relative to its memory at rest after the control run."""
BUFFERS_MIB: Final = 2 * BLOCK_CACHE_BYTES >> 20
"""Memory that a bookie may use beyond `RSS_TIMES_MAX`: any load fills the block cache of its index, and the
same again may be lost between the allocations.
"""
STALL_MS_MAX: Final = 250.0
"""The bystander's slowest append may take this much longer than its slowest append during the control run."""
DESCRIPTORS_SLACK: Final = 32
"""Pools that are filled at first use (of Postgres 10, of Redis), channels to bookies, segments. Connections
that services open to each other under load are idle after it, and closed within `REST_S`.
"""
PEAK_MIB_MAX: Final = 1536
"""Above what a gateway had before: thrice what it may hold in bodies."""
P50_TIMES_MAX: Final = 60.0
"""On two cores that the attackers share with all services; what locks others out costs hundreds."""
LEDGER_ENTRIES: Final = 20
FORGING: Final = re.compile(rb"POST /v1/ledgers/(\d+)/(?:entries|fence)\b")
"""A request to a bookie that leaves a ledger there, be it only its fence."""
JSON: Final = "application/json"
CONTROL: Final = "control"


@dataclass(slots=True)
class Arena:
    """What a campaign has: the cluster, seeded dice, addresses, and somebody to tell."""

    cluster: Cluster
    meters: Meters
    report: Report
    requests: int
    """So many hostile requests, of a campaign that makes them up."""
    seconds: float
    """Then such a campaign begins no more."""
    hang_s: float = raw.HANG_S
    campaign: str = ""
    ledger_id: int = 0
    """The attackers' own: what is done to it harms nobody."""
    closed_id: int = 0
    log: str = "attacked"
    token: str = ""
    """The attackers' own, where gateways require one: without it nobody gets past the door."""
    bystanders_token: str = ""
    instance: str = ""
    """Of the first gateway: without it nobody gets into its internal routes."""
    forged: set[tuple[str, int]] = field(default_factory=set)
    """Ledgers that strangers made at a bookie's port, with the bookie: its alarm of them is honest."""
    _peers: Any = field(default_factory=lambda: itertools.cycle(range(2, 2 + PEERS)))
    _dead: set[str] = field(default_factory=set)

    @property
    def dice(self) -> random.Random:
        """The same for the same seed and campaign, whatever else was run."""
        return random.Random(f"{self.report.seed}-{self.campaign}")

    def peer(self) -> str:
        """The next attacker's address."""
        peer = f"127.0.0.{next(self._peers)}"
        self.report.peers.add(peer)
        return peer

    def address(self, name: str) -> str:
        """`HOST:PORT` of a service."""
        return url_of(self.cluster, name).removeprefix("http://")

    @property
    def secret_line(self) -> str:
        """The header by which an attacker gets past the door of an internal listener."""
        return "".join(f"{name}: {value}\r\n" for name, value in self.cluster.headers.items())

    @property
    def token_line(self) -> str:
        """The header by which an attacker gets past the door of a gateway; nothing where there is no door."""
        return f"Authorization: Bearer {self.token}\r\n" if self.token else ""

    def client(self, *, deadline_s: float = 30.0) -> Client:
        """An attacker who uses the gateways as one should."""
        return Client(*self.cluster.gateways, token=self.token or None, deadline_s=deadline_s)

    def signed(self, name: str, data: bytes) -> bytes:
        """A request with the credentials that the listener asks for."""
        first, end, rest = data.partition(b"\r\n")
        if not first.endswith(b" HTTP/1.1") or b"\r\nAuthorization:" in data:
            return data
        line = self.token_line if name.startswith("gateway-") else self.secret_line
        return first + end + line.encode() + rest

    def shown(self, name: str, data: bytes) -> bytes:
        """A request, nine of ten times by somebody who has the credentials: else nothing behind the door would be
        attacked.
        """
        return data if self.report.requests % 10 == 0 else self.signed(name, data)

    def find(
        self, kind: Kind, what: str, name: str = "", data: bytes = b"", peer: str = ""
    ) -> None:
        """Note what must not be, with the request that shows it."""
        command = raw.command(self.address(name), data, peer) if name else ""
        self.report.find(self.campaign, kind, f"{name} {what}".strip(), command)

    async def send(
        self,
        name: str,
        data: bytes,
        *,
        operation: Operation | None = None,
        method: str = "GET",
        must_refuse: bool = False,
        may_end: bool = False,
        is_bare: bool = False,
        ends: bool = False,
    ) -> Answer | None:
        """Send bytes to a service and judge what comes back.

        `must_refuse`: HTTP forbids to do what these bytes ask. `may_end`: they are no request, and
        deserve no answer. `is_bare`: no credentials are added. `ends`: the client says at once that it sends no more.
        """
        peer, data = self.peer(), data if is_bare else self.shown(name, data)
        self.report.requests += 1
        try:
            answer = await raw.ask(
                self.address(name), data, peer=peer, method=method, hang_s=self.hang_s, ends=ends
            )
        except Hang as error:
            self.find(Kind.HANG, str(error), name, data, peer)
            return None
        if answer is None:
            self.report.statuses["none"] += 1
            if not may_end:
                self.find(Kind.ANSWER, "ends the connection without a word", name, data, peer)
            return None
        self.report.statuses[str(answer.status)] += 1
        # A damaged request may still be one of an operation, with other values.
        fault = wrong(operation, method, answer, may_be_invalid=self.campaign == "damaged")
        if fault is not None:
            where = f"{method} {operation.path}: " if operation else ""
            self.find(fault[0], where + fault[1], name, data, peer)
        elif must_refuse and answer.status < 400:
            self.find(Kind.ANSWER, f"takes with {answer.status} what is no HTTP", name, data, peer)
        elif answer.status < 300:
            self._note_forged(name, data)
        return answer

    def _note_forged(self, name: str, data: bytes) -> None:
        """Note a ledger that a bookie has taken from a stranger, and that no gateway has made."""
        found = FORGING.match(data) if name.startswith("bookie-") else None
        if found is not None and int(found[1]) not in (self.ledger_id, self.closed_id):
            self.forged.add((name, int(found[1])))

    async def crowd(self, jobs: Iterable[Callable[[], Awaitable[object]]]) -> None:
        """Do all of these, `WIDTH` at a time, until the time is over or a process is gone."""
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(WIDTH)
        end = loop.time() + self.seconds

        async def one(job: Callable[[], Awaitable[object]]) -> None:
            try:
                await job()
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await room.acquire()
                if loop.time() > end or self.meters.dead():
                    room.release()
                    break
                group.create_task(one(job))

    async def let_go(self, what: str, peers: Iterable[str], *, hang_s: float | None = None) -> None:
        """Wait until no process holds a connection from these addresses; those that stay hang."""
        peers = set(peers)
        limit_s = self.hang_s if hang_s is None else hang_s

        async def are_gone() -> bool:
            return not await asyncio.to_thread(self.meters.held, peers)

        try:
            await until(are_gone, f"{what}: let go", limit_s)
        except DeadlineMissed:
            for name, count in self.meters.held(peers).items():
                self.find(
                    Kind.HANG, f"{name} holds {count} connections after {limit_s:g} s: {what}"
                )

    def look(self) -> None:
        """Note who died, and what the logs say."""
        for name in sorted(set(self.meters.dead()) - self._dead):
            self._dead.add(name)
            self.find(Kind.LOST, f"{name} ended: {self.cluster.status(name)}")
        for fault in self.meters.errors(self.forged):
            self.find(Kind.LOG, fault)

    async def furnish(self) -> None:
        """Make what the attackers ask about."""
        # Not one client after another: the first gateway is the one whose internals are asked.
        async with Client(self.cluster.gateways[0], token=self.token or None) as client:
            ledger = await client.create_ledger()
            await ledger.append_batch([b'{"n":%d}' % number for number in range(LEDGER_ENTRIES)])
            closed = await client.create_ledger()
            await closed.append(b"\xff")
            await closed.close()
            await (await client.create_log(self.log)).append(b'{"n":0}')
        self.ledger_id, self.closed_id = ledger.ledger_id, closed.ledger_id
        # What a first request loads is no cost of an attack.
        arrow = (
            f"GET /v1/ledgers/{self.closed_id}/entries HTTP/1.1\r\nHost: localhost\r\n"
            f"Accept: {ARROW}\r\n{self.token_line}\r\n"
        )
        for name in ("gateway-1", "gateway-2"):
            await raw.ask(self.address(name), arrow.encode(), peer=self.peer())
        head = f"GET /internal/instance HTTP/1.1\r\nHost: localhost\r\n{self.secret_line}\r\n"
        reported = await raw.ask(self.address("internal-1"), head.encode(), peer=self.peer())
        assert reported is not None
        self.instance = orjson.loads(reported.body)["id"]


async def made_token(cluster: Cluster, *grants: str) -> str:
    """A token that an operator makes at the metadata service."""
    secret, token = AccessTokenCreate(name="attack", grants=list(grants)).drawn()
    body = TokenCreate(token=token, expires_in_s=None, attempt=new_attempt())
    url = f"{cluster.url('metadata-1')}/v1/tokens"
    async with (
        cluster.session() as session,
        session.post(url, data=body.model_dump_json(), headers={"Content-Type": JSON}) as answer,
    ):
        assert answer.status < 300, await answer.text()
    return secret


Campaign = Callable[[Arena], Awaitable[None]]


class Watch:
    """The bystander's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def enter(self, phase: str) -> None:
        """A phase begins."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{phase}\n".encode())
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def verdict(self) -> dict[str, Any]:
        """End it; what it saw. Raises: RuntimeError where it broke."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        reported, errors = await self._process.communicate()
        if self._process.returncode or not reported:
            raise RuntimeError(f"the bystander broke:\n{errors.decode(errors='replace')}")
        verdict: dict[str, Any] = orjson.loads(reported)
        return verdict


@contextlib.asynccontextmanager
async def watching(gateways: list[str], token: str) -> AsyncIterator[Watch]:
    """A bystander at work."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.outside.attack.bystander", *gateways,
        cwd=ROOT,
        env={**os.environ, "QUORUMLOG_TOKEN": token},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        # Its ledgers are there, and it appends.
        await process.stdout.readline()
        yield Watch(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def attack(
    arena: Arena,
    campaigns: Mapping[str, Campaign],
    *,
    control: Campaign | None = None,
    before_s: float = BEFORE_S,
    say: Callable[[str], None] = lambda _line: None,
) -> None:
    """Run campaigns one after another beside a bystander, and judge.

    `control` runs first: it produces the same load with valid requests. Without it costs are reported, but are no findings.
    """
    report, meters = arena.report, arena.meters
    await arena.furnish()
    meters.errors()
    peaks: dict[str, dict[str, int]] = {}
    requests: dict[str, int] = {}
    async with watching(arena.cluster.gateways, arena.bystanders_token) as watch:
        await watch.enter("before")
        await asyncio.sleep(before_s)
        if control is not None:
            say("the control run begins")
            await watch.enter(CONTROL)
            arena.campaign = CONTROL
            async with meters.peaks() as peaks[CONTROL]:
                await control(arena)
            requests[CONTROL] = report.requests
            await watch.enter("rest")
            await asyncio.sleep(REST_S)
        rss, descriptors = meters.rss_mib(), meters.descriptors()
        for name, campaign in campaigns.items():
            say(f"{name} begins")
            arena.campaign = name
            began_with = report.requests
            await watch.enter(name)
            async with meters.peaks() as peaks[name]:
                await campaign(arena)
                await arena.let_go("at the campaign's end", report.peers)
            arena.look()
            requests[name] = report.requests - began_with
        arena.campaign = "all"
        await watch.enter("after")
        verdict = await watch.verdict()
    await _at_rest(arena, rss, descriptors, has_bounds=control is not None)
    arena.look()
    _judge(report, verdict)
    for name, peak in peaks.items():
        report.campaigns[name] = _figures(verdict, name, requests[name], peak)
    if control is not None:
        _judge_costs(report, rss)


async def _at_rest(
    arena: Arena, rss: dict[str, int], descriptors: dict[str, int], *, has_bounds: bool
) -> None:
    """Wait until memory and descriptors are back, and note what stays."""
    meters, report = arena.meters, arena.report

    def are_back() -> bool:
        return not (
            _too_much(rss, meters.rss_mib()) or _too_many(descriptors, meters.descriptors())
        )

    with contextlib.suppress(DeadlineMissed):
        await until(are_back, "memory and descriptors are back", REST_S if has_bounds else 0.0)
    rss_now, descriptors_now = meters.rss_mib(), meters.descriptors()
    report.rss_mib = {name: (rss[name], now) for name, now in rss_now.items()}
    report.descriptors = {name: (descriptors[name], now) for name, now in descriptors_now.items()}
    if not has_bounds:
        return
    for name in _too_much(rss, rss_now):
        arena.find(Kind.COST, f"{name} keeps {rss_now[name]} MiB; it had {rss[name]}")
    for name in _too_many(descriptors, descriptors_now):
        what = f"{name} keeps {descriptors_now[name]} descriptors; it had {descriptors[name]}"
        arena.find(Kind.COST, what)


def _too_much(before: dict[str, int], now: dict[str, int]) -> list[str]:
    return [
        name
        for name, mib in now.items()
        if mib > before[name] * RSS_TIMES_MAX + BUFFERS_MIB * name.startswith("bookie-")
    ]


def _too_many(before: dict[str, int], now: dict[str, int]) -> list[str]:
    return [name for name, count in now.items() if count > before[name] + DESCRIPTORS_SLACK]


def _judge(report: Report, verdict: dict[str, Any]) -> None:
    """What the bystander noticed."""
    report.bystander = verdict["counts"]
    for what in (*verdict["failures"], *verdict["lost"]):
        phase = what.partition(":")[0]
        campaign = phase if phase in verdict["phases"] else "all"
        report.find(campaign, Kind.LOST, f"the bystander: {what}")


def _figures(verdict: dict[str, Any], name: str, requests: int, peak: dict[str, int]) -> Figures:
    phase, before = verdict["phases"][name], verdict["phases"]["before"]
    # A phase in which nothing came through at all is told by its failures.
    p50 = phase["p50_ms"]
    times = p50 / before["p50_ms"] if before["p50_ms"] else 0.0
    return Figures(requests, p50, times, phase["max_ms"], phase["retried"], peak)


def _judge_costs(report: Report, rss: dict[str, int]) -> None:
    stall_ms_max = report.campaigns[CONTROL].slowest_ms + STALL_MS_MAX
    for name, figures in report.campaigns.items():
        if figures.slowest_ms > stall_ms_max:
            what = f"an append of the bystander took {figures.slowest_ms:.0f} ms; the bound is {stall_ms_max:.0f}"
            report.find(name, Kind.COST, what)
        if figures.p50_times > P50_TIMES_MAX:
            what = (
                f"the bystander's appends take {figures.p50_times:.0f} times what they took before"
            )
            report.find(name, Kind.COST, what)
        for process, mib in figures.rss_peak_mib.items():
            if mib > rss[process] + PEAK_MIB_MAX:
                report.find(name, Kind.COST, f"{process} took {mib} MiB; it had {rss[process]}")
