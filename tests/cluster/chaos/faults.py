"""What a storm does. Each fault strikes at once and returns what mends it, which takes a while.

Processes that are hurt are not hurt again until they are well: `_take` says who is. How many may
be hurt at once is a matter of progress with `synced`; with `deferred` it is a matter of safety,
because an ack quorum of bookies that lose power together is loss by design (rule 31).
"""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from loadtest.cluster import Cluster
from tests.cluster.chaos.disks import KEEP_JOURNAL, LOSE_JOURNAL, Disk, is_frozen
from tests.cluster.chaos.failovers import Failovers
from tests.cluster.chaos.network import SHAPES, Network
from tests.cluster.chaos.report import Report
from tests.cluster.chaos.stores import OutOfReach, StoreHands
from tests.cluster.chaos.syscalls import (
    QUIET_CALLS,
    START_CALLS,
    Recorder,
    Recording,
    Site,
    Tracer,
)
from tests.support.history import Violation
from tests.support.proxy import Direction, Proxy
from tests.support.waiting import DeadlineMissed, until

Mend = Callable[[], Awaitable[None]]

PATIENCE_S: Final = 90.0
FILL_S: Final = 300.0
"""How long a bookie may take to get again what it lost."""
FIRE_S: Final = 20.0
"""How long a call is waited for that is to fail: some are made in few moments only."""

RECORD_S: Final = 180.0
"""How long a recording may take to know what a bookie does; then it is what was seen."""

TRIES: Final = 3
"""How often a call that is made in few moments only is waited for, in each turn."""

DEAD_S: Final = (0.0, 0.0, 0.2, 1.0)
PAUSED_S: Final = (0.1, 0.5, 3.0)
UNHEARD_S: Final = (0.3, 3.0, 8.0, 20.0)
"""How long a gateway is without metadata; bookies drop what is deleted after some two seconds."""
PARTED_S: Final = (0.3, 1.0, 2.0, 5.0)
FLAPS: Final = 5
HURT_MAX: Final = 2
"""Bookies that are hurt at once, but for faults that take all: more, and nobody can append."""


@dataclass(slots=True)
class World:
    """What a storm has in its hands. What it lacks is named in `lacks`, with the reason."""

    cluster: Cluster
    stores: StoreHands
    failovers: Failovers | None = None
    disks: dict[str, Disk] = field(default_factory=dict)
    network: Network | None = None
    links: dict[str, Proxy] = field(default_factory=dict)
    """By gateway: its way to the metadata service."""
    can_trace: bool = False
    is_deferred: bool = False
    lacks: dict[str, str] = field(default_factory=dict)


class Faults:
    """The hands of a storm."""

    def __init__(self, world: World, report: Report) -> None:
        self._world = world
        self._cluster = world.cluster
        self._report = report
        names = world.cluster.names
        self._bookies = [name for name in names if name.startswith("bookie")]
        self._gateways = [name for name in names if name.startswith("gateway")]
        self._hurt: set[str] = set()
        self.filling: set[str] = set()
        """Bookies that get again what they lost."""
        self._all_sites: list[Site] | None = None
        """What a recording has shown; None before there is one."""
        self._sites: list[Site] = []
        """Those of the present turn."""
        self._is_recording = False
        self.is_over = False
        """The storm has ended: nothing more needs to be known."""
        self._tries: Counter[Site] = Counter()

    # --- processes -------------------------------------------------------------------------------

    async def kill(self, dice: random.Random) -> Mend | None:
        """One process, or two at once."""
        chance = dice.random()
        if chance < 0.3:
            victims = self._take(dice, self._gateways, 1)
        elif chance < 0.45:
            victims = self._take(dice, self._bookies, 1) + self._take(dice, self._gateways, 1)
        elif chance < 0.6:
            victims = self._take(dice, self._bookies, 2)
        elif chance < 0.66:
            victims = self._take(dice, ["metadata-1", "autorecovery-1"], 1)
        else:
            victims = self._take(dice, self._bookies, 1)
        await self._killed(victims)
        dead_s = dice.choice(DEAD_S)
        return self._revival(victims, dead_s)

    async def kill_a_store(self, dice: random.Random) -> Mend | None:
        """Postgres or Redis."""
        victims = self._take(dice, ["postgres", "redis", "redis"], 1)
        await self._killed(victims)
        return self._revival(victims, dice.choice(DEAD_S))

    async def fail_over(self, dice: random.Random) -> Mend | None:
        """Postgres's primary is killed, and its standby takes over: nothing goes back."""
        failovers = self._world.failovers
        if failovers is None:
            self._skip("failover")
            return None
        victims = self._take(dice, ["postgres"], 1)
        if not victims:
            return None
        await failovers.fail_over()
        self._report.failovers += 1

        async def mend() -> None:
            await failovers.follow()
            self._give(victims)

        return mend

    async def pause(self, dice: random.Random) -> Mend | None:
        """A process stands still for a while, and keeps its connections."""
        services = [*self._bookies, *self._gateways, "metadata-1", "autorecovery-1"]
        victims = self._take(dice, [*services, *services, "postgres", "redis"], 1)
        for name in victims:
            self._cluster.pause(name)
            self._report.pauses += 1
        seconds = dice.choice(PAUSED_S)

        async def mend() -> None:
            await asyncio.sleep(seconds)  # the length of the pause is the fault
            for name in victims:
                self._cluster.resume(name)
            self._give(victims)

        return mend if victims else None

    async def cut_power(self, dice: random.Random) -> Mend | None:
        """Of one bookie, of two, or of all at once; some with a gateway's death."""
        if not self._world.disks:
            self._skip("power cut")
            return None
        count = 1 if self._world.is_deferred else dice.choice((1, 1, 1, 2, len(self._bookies)))
        victims = self._take(dice, self._bookies, count)
        how = dice.choice((LOSE_JOURNAL, LOSE_JOURNAL, KEEP_JOURNAL))
        cluster, disks = self._cluster, self._world.disks
        for name in victims:
            cluster.pause(name)
        await until(
            lambda: all(is_frozen(cluster.pid(name)) for name in victims),
            f"{victims} stand still",
            PATIENCE_S,
        )
        for name in victims:
            disks[name].cut(how)
            self._report.power_cuts += 1
            self._report.cut_on[disks[name].kind] += 1
        for name in victims:
            await cluster.kill(name)
        if dice.random() < 0.1:
            also = self._take(dice, self._gateways, 1)
            await self._killed(also)
            victims += also

        async def remount() -> None:
            for name in victims:
                if name in disks:
                    await disks[name].come_back()

        return self._revival(victims, dice.choice(DEAD_S), before=remount)

    # --- the network ---------------------------------------------------------------------------

    async def part(self, dice: random.Random) -> Mend | None:
        """Links are cut: one way, all around some, in two halves, in a ring; and some flap."""
        network = self._world.network
        if network is None:
            self._skip("partition")
            return None
        if not self._take(dice, ["network"], 1):
            return None
        links = dice.choice(SHAPES)(dice, network.names)
        seconds = dice.choice(PARTED_S)
        is_flapping = dice.random() < 0.25
        await asyncio.to_thread(network.cut, links)
        self._report.partitions += 1

        async def mend() -> None:
            flaps = FLAPS if is_flapping else 0
            for flap in range(2 * flaps):
                await asyncio.sleep(seconds / (2 * flaps))
                await asyncio.to_thread(network.cut, () if flap % 2 == 0 else links)
            if not flaps:
                await asyncio.sleep(seconds)
            await asyncio.to_thread(network.heal)
            self._give(["network"])

        return mend

    async def cut_off_metadata(self, dice: random.Random) -> Mend | None:
        """One gateway loses metadata, one way or both, and nothing else: bookies, other gateways and
        clients reach it. Its connections hang, or are reset at the beginning or at the end.
        """
        names = self._take(dice, self._gateways, 1)
        if not names:
            return None
        link = self._world.links[names[0]]
        held: tuple[Direction, ...] = dice.choice(
            (("up", "down"), ("up", "down"), ("up",), ("down",))
        )
        resets = dice.choice((("begin",), ("end",), ("begin", "end"), ()))
        seconds = dice.choice(UNHEARD_S)
        link.hold(*held)
        if "begin" in resets:
            link.cut_all()
        self._report.metadata_cuts += 1

        async def mend() -> None:
            await asyncio.sleep(seconds)
            if "end" in resets:
                link.cut_all()
            link.hold()
            self._give(names)

        return mend

    # --- stores ----------------------------------------------------------------------------------

    async def trouble_a_store(self, dice: random.Random) -> Mend | None:
        """Sessions of Postgres end, one is cut in a change; Redis forgets or lies."""
        stores = self._world.stores
        kinds: tuple[tuple[str, Callable[[random.Random], Awaitable[None]]], ...] = (
            ("backends ended", stores.end_backends),
            ("cut in a change", stores.cut_in_a_change),
            ("cut in a change", stores.cut_in_a_change),
            ("redis flushed", stores.flush),
            ("redis lied", stores.lie),
            ("redis lied", stores.lie),
        )
        what, work = dice.choice(kinds)
        store = "redis" if what.startswith("redis") else "postgres"
        if not self._take(dice, [store], 1):
            return None
        try:
            await work(dice)
            self._report.others[what] += 1
        except OutOfReach:
            self._report.others[f"{store} out of reach"] += 1
        finally:
            self._give([store])
        return None

    # --- calls that fail -------------------------------------------------------------------------

    async def break_a_call(self, dice: random.Random) -> Mend | None:
        """The next site in turn: each comes once before any comes again. Which there are a recording
        shows, which is the first that is done.
        """
        if not self._world.can_trace:
            self._skip("failing call")
            return None
        if self._is_recording:
            return None
        victims = self._take(dice, self._bookies, 1)
        if not victims:
            return None
        name = victims[0]
        if self._all_sites is None:
            self._is_recording = True
            return self._recording(name)
        if not self._sites:
            self._sites = dice.sample(self._all_sites, len(self._all_sites))
        site = self._sites.pop()
        data = self._cluster.data
        if site.phase == "start":
            await self._killed([name])
        tracer = Tracer(site, data / name, data / f"{name}.strace")
        match site.phase:
            case "running":
                await tracer.attach(self._cluster.pid(name))
                await self._fired(tracer, name)
            case "stop":
                await tracer.attach(self._cluster.pid(name))
                await self._cluster.kill(name, signal.SIGTERM)
            case "start":
                self._cluster.start(name, prefix=tracer.prefix)
                await self._up_or_gone(name)
                await self._fired(tracer, name)
        if site.phase != "stop" and tracer.has_broken_the_log():
            await self._must_end(name, site)
        await self._killed([name] if self._cluster.is_alive(name) else [])
        await tracer.ended()
        if tracer.failed():
            self._report.sites[str(site)] += 1
        else:
            self._tries[site] += 1
            if self._tries[site] % TRIES:
                self._sites.insert(0, site)
            else:
                self._report.not_made.add(str(site))
                self._report.skipped[f"failing call: {site} was not made"] += 1
        return self._revival(victims, 0)

    def _recording(self, name: str) -> Mend:
        """Record what a bookie does in its start, its work and its stop, while the storm goes on. Of
        a stop counts what two have done: entries may be on their way in one of them.
        """

        async def mend() -> None:
            recording = await self._recorded(name, QUIET_CALLS)
            if not self.is_over:
                again = await self._recorded(name, 0)
                self._all_sites = [
                    site
                    for site in recording.sites()
                    if site.phase != "stop" or (site.phase, site.call, site.file) in again.seen
                ]
                self._report.known_sites = len(self._all_sites)
            self._is_recording = False
            revive = self._revival([name], 0)
            if revive is not None:
                await revive()

        return mend

    async def _recorded(self, name: str, quiet_calls: int) -> Recording:
        """A life of a bookie, from a start after a kill to an orderly stop."""
        data = self._cluster.data
        recorder = Recorder(data / name, data / f"{name}.strace")

        async def reached(is_enough: Callable[[Recording], bool]) -> None:
            with contextlib.suppress(DeadlineMissed):  # then it is what was seen
                await until(
                    lambda: self.is_over or is_enough(recorder.read()), "calls are known", RECORD_S
                )

        if self._cluster.is_alive(name):
            await self._killed([name])
        self._cluster.start(name, prefix=recorder.prefix)
        await self._cluster.until_up(name)
        begun = recorder.read().calls + START_CALLS
        await reached(lambda recording: recording.calls >= begun)
        recorder.recording.phase = "running"
        recorder.recording.quiet = 0
        await reached(lambda recording: recording.quiet >= quiet_calls)
        recorder.recording.phase = "stop"
        await self._cluster.kill(name, signal.SIGTERM)
        return recorder.read()

    async def _fired(self, tracer: Tracer, name: str) -> None:
        try:
            await until(
                lambda: tracer.failed() or not self._cluster.is_alive(name), "a call", FIRE_S
            )
        except DeadlineMissed:
            return  # it was not made; the report counts that

    async def _up_or_gone(self, name: str) -> None:
        async def is_over() -> bool:
            return not self._cluster.is_alive(name) or await self._cluster.is_up(name)

        await until(is_over, f"{name} starts, or refuses to", PATIENCE_S)

    async def _must_end(self, name: str, site: Site) -> None:
        """A sync of the log that failed ends the bookie: it must not be tried again."""
        try:
            await until(lambda: not self._cluster.is_alive(name), "it ends", PATIENCE_S)
        except DeadlineMissed:
            detail = f"{name} goes on after {site}"
            self._report.violations.append(Violation("went on", 0, None, detail))

    # --- who is hurt -----------------------------------------------------------------------------

    def _skip(self, what: str) -> None:
        self._report.skipped[f"{what}: {self._world.lacks.get(what, 'not asked for')}"] += 1

    def _take(self, dice: random.Random, names: list[str], count: int) -> list[str]:
        """Some of these that are well; fewer where too many are hurt."""
        well = [name for name in names if name not in self._hurt]
        if all(name in self._bookies for name in names):
            if self._world.is_deferred:
                count = min(count, 1 - len(self._hurt.intersection(self._bookies)))
            elif count <= HURT_MAX:
                count = min(count, HURT_MAX - len(self._hurt.intersection(self._bookies)))
        elif names == self._gateways:
            # One at least goes on, or the storm waits for a start each time.
            count = min(count, len(well) - 1)
        taken: list[str] = []
        while well and len(taken) < count:
            name = dice.choice(well)
            taken.append(name)
            well = [other for other in well if other != name]
        self._hurt.update(taken)
        return taken

    def _give(self, names: list[str]) -> None:
        self._hurt.difference_update(names)

    async def _killed(self, names: list[str]) -> None:
        for name in names:
            await self._cluster.kill(name)
            self._report.kills += 1

    def _revival(
        self, victims: list[str], dead_s: float, *, before: Mend | None = None
    ) -> Mend | None:
        """What brings them back, and waits until they are well."""

        async def mend() -> None:
            await asyncio.sleep(dead_s)  # how long it is dead is part of the fault
            if before is not None:
                await before()
            for name in victims:
                self._cluster.start(name)
            for name in victims:
                await self._cluster.until_up(name)
                if self._world.is_deferred and name in self._bookies:
                    self.filling.add(name)
                    await self._until_whole(name)
                    self.filling.remove(name)
            self._give(victims)

        return mend if victims else None

    async def _until_whole(self, name: str) -> None:
        """Wait until no ledger is in limbo at a bookie."""
        url, timeout = f"{self._cluster.url(name)}/v1/info", aiohttp.ClientTimeout(10)

        async def is_whole() -> bool:
            async with (
                self._cluster.session() as session,
                session.get(url, timeout=timeout) as answer,
            ):
                reported = await answer.json()
            return not reported["limbo"]["ledgers"]

        what = f"{name} has again what it lost"
        await until(is_whole, what, FILL_S, passing=(aiohttp.ClientError,))
