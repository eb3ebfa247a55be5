"""Two processes under one bookie's name: a copy of a directory, a snapshot of one (rule 15a).

Programs on real processes. Whoever is registered and lives stays; the newcomer is refused.
"""

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import stop
from quorumlog.cli.commands import app as cli
from quorumlog.net.bodies import RECEIVING, Receiving
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.connections import UPGRADES, ListenLimits
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import listening
from quorumlog.net.operations import add_routes
from quorumlog.net.service import HOSTS, answers_problems
from quorumlog.protocol.messages import Status
from quorumlog.wire.bodies import BookieHeartbeat, CookieRow
from services.bookie.config import Config
from services.bookie.cookie import (
    CookieRefused,
    LocalCookie,
    identity_of,
    read_cookie,
    write_cookie,
)
from services.bookie.handlers import BOOKIE, ROUTES
from services.bookie.log import SegmentHead
from services.bookie.registration import Displaced, Registration
from services.bookie.replay import Replayed
from services.bookie.runtime import BookieRuntime
from services.bookie.writer import Position
from tests.support.proxy import proxy_to
from tests.support.waiting import until
from tests.unit.bookie.support import KEY, run_of
from tests.unit.bookie.test_process import PATIENT, Process
from tests.unit.metadata.support import Service, serving

ALLOWED = {"AUTO_FIX_COOKIES": "1"}
REFUSED = 78


class Pair:
    """A bookie, and whoever comes under its name."""

    def __init__(self, make: Callable[[str], Process]) -> None:
        self._make = make
        self.processes: list[Process] = []
        self.holder = self.process("holder")

    def process(self, name: str) -> Process:
        made = self._make(name)
        self.processes.append(made)
        return made

    async def clone(self, name: str = "clone") -> Process:
        """As a twin; the volume was copied block by block, with inodes and birth times: its cookie
        fits its marker.
        """
        clone = await self.twin(name)
        cookie = read_cookie(clone.data)
        assert cookie is not None
        fits = cookie.model_copy(update={"identity": identity_of(clone.data)})
        write_cookie(clone.data, fits)
        return clone

    async def twin(self, name: str = "twin") -> Process:
        """A process on a port of its own, with a copy of the holder's directory as it is now."""
        twin = self.process(name)
        # A file that RocksDB removes meanwhile is no file of the copy.
        copying = await asyncio.create_subprocess_exec(
            "cp", "-a", self.holder.data, twin.data, stderr=subprocess.DEVNULL
        )
        await copying.wait()
        assert (twin.data / "cookie.json").exists()
        return twin


@asynccontextmanager
async def pair_of(stores: Stores) -> AsyncIterator[Pair]:
    with scratch("ql-twins-") as folder:
        async with serving(stores) as service, aiohttp.ClientSession() as session:

            def make(name: str) -> Process:
                (folder / name).mkdir()
                return Process(service, folder / name, session)

            pair = Pair(make)
            try:
                yield pair
            finally:
                for process in pair.processes:
                    if process.process is not None:
                        stop(process.process, signal.SIGKILL, 30)


@pytest.fixture
async def pair(stores: Stores) -> AsyncIterator[Pair]:
    async with pair_of(stores) as made:
        yield made


async def added(process: Process, entry: int, member: str = "b1@1") -> Status:
    client = BookieClient(lambda _: process.url, process.session, PATIENT)
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    client.add(member, KEY, run_of(7, [entry]), answered.set_result)
    try:
        return await answered
    finally:
        await client.close()


async def listed(process: Process) -> dict[str, Any]:
    """The bookie as the metadata service lists it."""
    async with process.session.get(f"{process.settings['METADATA_URLS']}/v1/bookies") as answer:
        (found,) = (await answer.json())["bookies"]
        assert isinstance(found, dict)
        return found


async def assert_refused(process: Process, why: str, **settings: str) -> None:
    process.start(**{"HOLDER_S": "0", **settings})
    assert await process.ended() == REFUSED
    assert why in process.log.read_text()


async def test_a_copy_is_refused_while_the_original_answers(pair: Pair) -> None:
    """With every leave that there is; the original notices nothing of it."""
    pair.holder.start()
    assert (await pair.holder.ready())["bookie"] == "b1@1"
    assert await added(pair.holder, 0) is Status.OK
    twin = await pair.twin()

    await assert_refused(twin, "the running process stays")
    await assert_refused(twin, "the running process stays", **ALLOWED)
    shutil.rmtree(twin.data)  # an empty directory is no better
    await assert_refused(twin, "the running process stays", **ALLOWED)

    assert await added(pair.holder, 1) is Status.OK
    found = await listed(pair.holder)
    assert (found["id"], found["state"], found["url"]) == ("b1@1", "writable", pair.holder.url)


async def test_a_copied_directory_is_another_member_even_alone(pair: Pair) -> None:
    pair.holder.start()
    await pair.holder.ready()
    assert await added(pair.holder, 0) is Status.OK
    twin = await pair.twin()
    assert await added(pair.holder, 1) is Status.OK
    await pair.holder.kill()

    await assert_refused(twin, "is a copy")
    for process, is_right in ((pair.holder, True), (twin, False)):
        show = ["bookie", "cookie", "show", "b1", "--data-dir", str(process.data), "--json"]
        at = ["--metadata", process.settings["METADATA_URLS"]]
        shown = await asyncio.to_thread(CliRunner().invoke, cli, [*show, *at])
        assert json.loads(shown.stdout)["matches"] is is_right
    twin.start(**ALLOWED)

    assert (await twin.ready())["bookie"] == "b1@2"
    assert await added(twin, 2) is Status.NOT_MINE  # nothing normal as b1@1
    # The original comes second now, and may not come as what it was.
    await assert_refused(pair.holder, "the running process stays", **ALLOWED)


async def test_a_bookie_partitioned_from_metadata_serves_on_and_keeps_its_name(pair: Pair) -> None:
    async with proxy_to(pair.holder.settings["METADATA_URLS"]) as proxy:
        own_way = proxy.url(pair.holder.settings["METADATA_URLS"])
        pair.holder.start(METADATA_URLS=own_way, LOG_END_S="0.1", HEARTBEAT_S="0.1")
        await pair.holder.ready()
        twin = await pair.twin()
        proxy.is_down = True
        proxy.cut_all()

        async def is_lost() -> bool:
            return bool((await listed(pair.holder))["state"] == "lost")

        await until(is_lost, "its heartbeat runs out")
        await until(
            lambda: "log-end-put-off" in pair.holder.log.read_text(), "it can't tell its log's end"
        )
        assert await added(pair.holder, 0) is Status.OK
        await assert_refused(twin, "the running process stays", **ALLOWED)
        proxy.is_down = False

        async def is_back() -> bool:
            return bool((await listed(pair.holder))["state"] == "writable")

        await until(is_back, "its heartbeats come again")


async def test_a_silent_bookie_that_sends_heartbeats_keeps_its_name(pair: Pair) -> None:
    """Between newcomer and holder nothing passes; between holder and all others everything."""
    async with proxy_to(pair.holder.url) as proxy:
        pair.holder.start(ADVERTISED_URL=proxy.url(pair.holder.url), HEARTBEAT_S="60")
        await pair.holder.ready()
        twin = await pair.twin()
        proxy.is_silent = True

        await assert_refused(twin, "heartbeats of bookie b1 arrive", **ALLOWED)


async def test_a_paused_bookie_that_was_displaced_ends_when_it_resumes(pair: Pair) -> None:
    """Paused it looks dead. Its directory stays its own: the newcomer is another incarnation."""
    pair.holder.start(LOG_END_S="0.1", HEARTBEAT_S="0.1")
    await pair.holder.ready()
    assert await added(pair.holder, 0) is Status.OK
    twin = await pair.twin()
    assert pair.holder.process is not None
    pair.holder.process.send_signal(signal.SIGSTOP)
    try:
        twin.start(**ALLOWED)
        assert (await twin.ready())["bookie"] == "b1@2"
    finally:
        pair.holder.process.send_signal(signal.SIGCONT)

    assert await pair.holder.ended() == REFUSED
    assert "b1@2 is now registered" in pair.holder.log.read_text()

    async def is_the_twin() -> bool:
        found = await listed(twin)
        return (found["id"], found["url"], found["state"]) == ("b1@2", twin.url, "writable")

    await until(is_the_twin, "the newcomer is listed")


async def test_a_cloned_volume_is_refused_by_the_running_process_and_by_the_row(pair: Pair) -> None:
    """Nothing in the directory shows it: its marker is the same one to all appearances."""
    holder = pair.holder
    holder.start()
    await holder.ready()
    clone = await pair.clone()

    await assert_refused(clone, "the running process stays", **ALLOWED)

    await holder.kill()
    holder.start()
    await holder.ready()
    await holder.kill()
    await assert_refused(clone, "is an old copy")


async def test_of_two_clones_started_at_once_one_becomes_the_member(pair: Pair) -> None:
    pair.holder.start()
    await pair.holder.ready()
    twins = [await pair.clone("one"), await pair.clone("two")]
    await pair.holder.kill()
    for twin in twins:
        twin.start(HOLDER_S="0")

    def ended() -> list[Process]:
        return [twin for twin in twins if twin.process and twin.process.poll() is not None]

    await until(lambda: bool(ended()), "one of them ends")
    (loser,) = ended()
    (winner,) = [twin for twin in twins if twin is not loser]

    assert await loser.ended() == REFUSED
    assert "the running process stays" in loser.log.read_text()
    assert (await winner.ready())["bookie"] == "b1@1"
    assert await added(winner, 0) is Status.OK
    await winner.kill()
    # What the loser wrote down before it lost makes it no member either.
    await assert_refused(loser, "registered")


class Candidates:
    """Starts under one name, in this process, up to the moment at which they would serve."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self.folder = folder
        self._replayed = Replayed(SegmentHead(1, 0, 1, 0, 0), -1, Position(1, 0, 1), was_clean=True)

    def one(self, name: str, port: int | None = None) -> Registration:
        """A candidate with a directory of its own; its token is its name."""
        self.folder.joinpath(name).mkdir()
        settings = {
            "PORT": str(port or free_ports(1)[0]),
            "BOOKIE_NAME": "b1",
            "DATA_DIR": str(self.folder / name),
            "METADATA_URLS": self._service.url,
            "HOLDER_S": "0",
            "AUTO_FIX_COOKIES": "1",
        }
        return Registration(Config.read(settings), self._service.client, name)

    async def agreed(self, one: Registration, local: LocalCookie | None = None) -> LocalCookie:
        """It comes to be registered."""
        return await one.register(local, self._replayed, has_data=local is not None)

    def clone_of(self, cookie: LocalCookie, name: str) -> LocalCookie:
        """The cookie as it stands in another directory, which can't be told apart."""
        identity = identity_of(self.folder / name)
        return cookie.model_copy(update={"identity": identity, "registered": True})

    async def is_refused(self, one: Registration, why: str) -> bool:
        try:
            await self.agreed(one)
        except CookieRefused as error:
            return why in str(error)
        return False


@asynccontextmanager
async def candidates_of(stores: Stores) -> AsyncIterator[tuple[Service, Candidates]]:
    with scratch("ql-candidates-") as folder:
        async with serving(stores) as service:
            yield service, Candidates(service, folder)


@asynccontextmanager
async def answering(port: int, process: str, name: str = "b1") -> AsyncIterator[None]:
    """A bookie's routes on a port, as a process that has not opened its store yet has them."""
    app = web.Application(middlewares=[answers_problems])
    settings = {
        "PORT": str(port),
        "BOOKIE_NAME": name,
        "DATA_DIR": "/nowhere",
        "METADATA_URLS": "http://127.0.0.1:1",
    }
    app[BOOKIE] = BookieRuntime(Config.read(settings))
    app[BOOKIE].process = process
    app[UPGRADES] = True
    app[RECEIVING] = Receiving()
    app[HOSTS] = Hosts()
    add_routes(app, ROUTES)
    limits = ListenLimits(drain_timeout_s=1.0)
    async with listening(app, host="127.0.0.1", port=port, limits=limits):
        yield


def beat(process: str, url: str) -> BookieHeartbeat:
    return BookieHeartbeat(incarnation=1, url=url, ttl_s=3600, process=process)


async def test_the_registered_process_is_asked_before_its_name_is_taken(stores: Stores) -> None:
    """In order of what proves less and less: its own answer, somebody else's, its heartbeat."""
    (port,) = free_ports(1)
    async with candidates_of(stores) as (service, candidates):
        assert (await candidates.agreed(candidates.one("holder", port))).member == "b1@1"

        async with answering(port, "holder"):
            assert await candidates.is_refused(candidates.one("newcomer"), "stays")
        async with answering(port, "another"):  # unregistered, and there before
            assert await candidates.is_refused(candidates.one("third"), "stays")

        async with proxy_to(f"http://127.0.0.1:{port}") as silent:
            silent.is_silent = True
            row = await service.client.cookie("b1")
            assert row is not None
            moved = row.cookie.model_copy(
                update={"url": silent.url(f"http://127.0.0.1:{port}"), "boots": 2}
            )
            await service.client.put_cookie("b1", moved, version=row.version)
            heartbeat = beat("holder", moved.url)
            await until(
                lambda: service.client.send_bookie_heartbeat("b1", heartbeat), "it is heard"
            )
            assert await candidates.is_refused(candidates.one("fourth"), "heartbeats")

            # Not heard any more, it is gone.
            await service.client.send_bookie_heartbeat(
                "b1", heartbeat.model_copy(update={"ttl_s": 0.01})
            )

            async def is_lost() -> bool:
                return (await service.client.bookies()).bookies[0].state == "lost"

            await until(is_lost, "its heartbeat runs out")
            assert (await candidates.agreed(candidates.one("fifth"))).member == "b1@2"


@pytest.mark.parametrize(("name", "process"), [("b2", "whoever"), ("b1", "newcomer")])
async def test_an_address_taken_over_by_another_process_is_no_claim_to_the_name(
    stores: Stores, name: str, process: str
) -> None:
    """Another bookie got the port, or the start itself has it: the holder is gone."""
    (port,) = free_ports(1)
    async with candidates_of(stores) as (_, candidates):
        await candidates.agreed(candidates.one("holder", port))

        async with answering(port, process, name):
            made = await candidates.agreed(candidates.one("newcomer"))

        assert made.member == "b1@2"


async def test_a_displaced_process_learns_of_it_and_counts_no_more(stores: Stores) -> None:
    async with candidates_of(stores) as (service, candidates):
        old, new = candidates.one("old"), candidates.one("new")
        first = await candidates.agreed(old)
        await old.report_log_end(first, 7)
        second = await candidates.agreed(new)
        assert (first.member, second.member) == ("b1@1", "b1@2")

        displaced = False
        try:
            await old.report_log_end(first, 8)
        except Displaced:
            displaced = True
        assert displaced
        await new.report_log_end(second, 3)
        row = await service.client.cookie("b1")
        assert row is not None
        assert row.log_end == 3

        # Its heartbeats, which may come still, are not the other one's.
        live = beat("new", "http://new").model_copy(update={"incarnation": 2})
        await until(
            lambda: service.client.send_bookie_heartbeat("b1", live), "the newcomer is heard"
        )
        await service.client.send_bookie_heartbeat("b1", beat("old", "http://old"))
        (listed,) = (await service.client.bookies()).bookies
        assert (listed.id, listed.url, listed.state) == ("b1@2", "http://new", "writable")


async def test_a_restored_row_displaces_nobody(stores: Stores) -> None:
    """Rule 18: after a restored database each bookie finds an older process in its row."""
    async with candidates_of(stores) as (_, candidates):
        first = candidates.one("first")
        cookie = await candidates.agreed(first)
        ahead = cookie.model_copy(update={"boots": 2, "processes": (*cookie.processes, "second")})
        second = Registration(first._config, first._metadata, "second")

        await second.report_log_end(ahead, 5)


async def test_the_loser_of_a_race_waits(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw that nobody was there, and both wrote their cookie. It is the row that decides."""
    async with candidates_of(stores) as (service, candidates):
        first = await candidates.agreed(candidates.one("first"))
        winner, loser = candidates.one("winner"), candidates.one("loser")
        loser._config = loser._config.model_copy(update={"auto_fix_cookies": False})
        put = service.client.put_cookie
        raced: list[LocalCookie] = []

        async def put_second(*args: Any, **kwargs: Any) -> CookieRow:
            if not raced:
                raced.append(first)
                raced[0] = await candidates.agreed(winner, candidates.clone_of(first, "winner"))
            return await put(*args, **kwargs)

        monkeypatch.setattr(service.client, "put_cookie", put_second)
        with pytest.raises(CookieRefused, match="the process that is registered"):
            await candidates.agreed(loser, candidates.clone_of(first, "loser"))

        assert raced[0].member == "b1@1"
        # As often as it comes: it wrote down a start that was never registered.
        written = read_cookie(candidates.folder / "loser")
        assert written is not None
        assert not written.registered
        assert written.boots == raced[0].boots
        with pytest.raises(CookieRefused, match="the process that is registered"):
            await candidates.agreed(loser, written)


async def test_fast_restarts_and_moved_directories_keep_the_member(pair: Pair) -> None:
    holder = pair.holder
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        holder.start(HEARTBEAT_S="60")  # its heartbeat outlives it
        assert (await holder.ready())["bookie"] == "b1@1"
        await holder.kill(how)

    moved = pair.process("moved")
    holder.data.rename(moved.data)  # and another port
    assert moved.port != holder.port
    moved.start()

    assert (await moved.ready())["bookie"] == "b1@1"


async def test_a_newcomer_waits_for_a_process_that_is_shutting_down(pair: Pair) -> None:
    pair.holder.start()
    await pair.holder.ready()
    moved = pair.process("moved")
    moved.start(HOLDER_S="600", **ALLOWED)
    await until(lambda: "holder-there" in moved.log.read_text(), "it looks at the holder")

    await pair.holder.kill(signal.SIGTERM)

    assert (await moved.ready())["bookie"] == "b1@2"


def go_back(data: Path, snapshot: Path) -> None:
    """Give a directory the contents of a snapshot; files that both have stay the same files, as a
    volume's snapshot leaves them.
    """
    for path in sorted(data.rglob("*"), reverse=True):
        if not (snapshot / path.relative_to(data)).exists():
            path.rmdir() if path.is_dir() else path.unlink()
    for path in sorted(snapshot.rglob("*")):
        here = data / path.relative_to(snapshot)
        if path.is_dir():
            here.mkdir(exist_ok=True)
        else:
            here.write_bytes(path.read_bytes())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_snapshot_of_the_same_boot_is_detected(pair: Pair, how: signal.Signals) -> None:
    """Rule 15: the counter of boots does not show it, and the marker is the same file. What the
    bookie told of its log does, at an orderly end and from time to time.
    """
    holder = pair.holder
    by_time = {"LOG_END_S": "0.1" if how is signal.SIGKILL else "3600"}
    holder.start(**by_time)
    await holder.ready()
    assert await added(holder, 0) is Status.OK
    snapshot = (await pair.twin("snapshot")).data
    shutil.rmtree(snapshot / "index")  # it is a cache, and was copied file by file
    assert await added(holder, 1) is Status.OK

    async def reported() -> int:
        url = f"{holder.settings['METADATA_URLS']}/v1/bookies/b1/cookie"
        async with holder.session.get(url) as answer:
            return int((await answer.json())["log_end"])

    # A batch for each entry; the log begins with batch 1.
    if how is signal.SIGKILL:

        async def is_reported() -> bool:
            return await reported() >= 3

        await until(is_reported, "it told that its log has both entries")
    await holder.kill(how)
    assert await reported() == 3
    go_back(holder.data, snapshot)

    await assert_refused(holder, "went back")
    holder.start(**ALLOWED)

    assert (await holder.ready())["bookie"] == "b1@2"
    assert json.loads((holder.data / "cookie.json").read_text())["boots"] == 1
    assert await reported() < 3  # another instance's log
