"""The channel and the plain HTTP of a bookie, over a real socket, without a metadata service."""

import asyncio
import base64
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from loadtest.stores import scratch
from quorumlog.net.bodies import RECEIVING, Receiving
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.net.connections import UPGRADES, ListenLimits
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import listening
from quorumlog.net.operations import add_routes
from quorumlog.net.service import HOSTS, answers_problems
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import Run
from quorumlog.wire import frames
from quorumlog.wire.frames import Message, Op, Request
from services.bookie.channel import Peer
from services.bookie.config import Config
from services.bookie.handlers import BOOKIE, ROUTES
from services.bookie.runtime import BookieRuntime
from services.bookie.store import Store
from tests.support.framed import Line, channel
from tests.support.waiting import DEADLINE_S, until, within
from tests.unit.bookie.support import KEY, ME, add, entry_of, run_of, started

PATIENT = ChannelLimits(connect_s=30, quick_s=60, slow_s=60)


@dataclass
class Served:
    """A bookie that serves, and who talks to it."""

    url: str
    bookie: BookieRuntime
    store: Store
    client: BookieClient
    session: aiohttp.ClientSession

    async def add(self, run: Run, *, member: str = ME, recovery: bool = False) -> Status:
        answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.client.add(member, KEY, run, answered.set_result, recovery=recovery)
        return await answered

    async def fence(self, ledger_id: int, *, member: str = ME) -> tuple[Status, int]:
        answered: asyncio.Future[tuple[Status, int]] = asyncio.get_running_loop().create_future()
        self.client.fence(member, ledger_id, KEY, lambda *a: answered.set_result(a))
        return await answered

    async def read(
        self, ledger_id: int, first: int, last: int, *, member: str = ME
    ) -> tuple[Status, list[int], tuple[tuple[int, int], ...]]:
        answered: asyncio.Future[tuple[Status, list[int], tuple[tuple[int, int], ...]]]
        answered = asyncio.get_running_loop().create_future()

        def done(status: Status, run: Run | None, absent: tuple[tuple[int, int], ...]) -> None:
            answered.set_result((status, [] if run is None else list(run.ids), absent))

        self.client.read(member, ledger_id, first, last, done, bytes_max=1 << 20)
        return await answered


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    port = free_ports(1)[0]
    config = Config.read(
        {
            "PORT": str(port),
            "BOOKIE_NAME": "b1",
            "DATA_DIR": str(folder),
            "METADATA_URLS": "http://127.0.0.1:1",
        }
    )
    app = web.Application(middlewares=[answers_problems])
    app[BOOKIE] = bookie = BookieRuntime(config)
    app[RECEIVING] = Receiving()
    app[HOSTS] = Hosts()
    app[UPGRADES] = True
    add_routes(app, ROUTES)
    bookie.store = started(folder / "d")

    async def stop(_: web.Application) -> None:
        await bookie.stop()

    app.on_shutdown.append(stop)
    url = f"http://127.0.0.1:{port}"
    async with (
        listening(app, host="127.0.0.1", port=port, limits=ListenLimits(drain_timeout_s=5)),
        aiohttp.ClientSession() as session,
    ):
        client = BookieClient(lambda _: url, session, PATIENT)
        try:
            yield Served(url, bookie, bookie.store, client, session)
        finally:
            await client.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    with scratch("ql-channel-") as folder:
        async with serving(folder) as running:
            yield running


async def test_added_entries_are_read_back_and_others_are_denied(served: Served) -> None:
    assert await served.add(run_of(7, range(10))) is Status.OK

    assert await served.read(7, 3, 12) == (Status.OK, list(range(3, 10)), ((10, 12),))
    assert await served.read(8, 0, 0) == (Status.OK, [], ((0, 0),))


async def test_many_adds_in_flight_are_each_answered(served: Served) -> None:
    answers = await asyncio.gather(
        *[served.add(run_of(ledger, [entry])) for ledger in range(10) for entry in range(50)]
    )

    assert answers == [Status.OK] * 500
    assert served.store.counters["log_syncs"] <= 500


async def test_each_refusal_has_its_own_status(served: Served) -> None:
    await served.add(run_of(7, [0]))

    assert await served.add(run_of(7, [0], "other")) is Status.CONFLICT
    assert await served.fence(7) == (Status.OK, -1)
    assert await served.add(run_of(7, [1])) is Status.FENCED
    assert await served.add(run_of(7, [1]), recovery=True) is Status.OK
    assert await served.add(run_of(8, [0]), member="b1@7") is Status.NOT_MINE
    # A client does not use a channel that another bookie answers (tests/unit/net).
    assert (await add(served.store, run_of(8, [0]), member="b2@1")).status is Status.NOT_MINE


async def test_a_request_to_an_older_incarnation_is_answered_in_its_name(served: Served) -> None:
    await served.add(run_of(7, range(3)))
    served.store.set_member("b1@2")

    assert await served.read(7, 1, 5) == (Status.OK, [1, 2], ())
    assert (await served.fence(7))[0] is Status.NOT_MINE
    assert await served.read(7, 0, 3, member="b1@2") == (Status.OK, [0, 1, 2], ((3, 3),))


async def test_a_malformed_frame_ends_the_channel(served: Served) -> None:
    message = bytearray(frames.encode_request(Request(Op.FENCE, 1, 7, -1, -1, ME, KEY)).fields)
    message[-1] ^= 1
    async with channel(served.session, served.url) as line, within("the channel ends"):
        line.send(Message(bytes(message)))

        assert await line.receive() is None

    assert served.store.holdings.row(7) is None


async def test_who_reads_nothing_is_unread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bookie.channel.OUT_BYTES_MAX", 200_000)
    big = "z" * 100
    for number in range(10):
        await served.add(run_of(7, range(number * 10, number * 10 + 10), big))
    asked = 100
    async with channel(served.session, served.url) as line:
        line.framed.pause()
        for request in range(asked):
            line.send(
                frames.encode_request(Request(Op.READ, request, 7, 0, 99, ME, bytes_max=1 << 20))
            )
        # It is alive for others meanwhile, and answers this one when it reads again.
        assert await served.add(run_of(8, [0])) is Status.OK
        line.framed.resume()
        seen: set[int] = set()
        while len(seen) < asked:
            message = await received(line)
            _, answers = frames.parse_answers(*message)
            seen |= {answer.request_id for answer in answers}
            assert message.size < 8 << 20

    assert seen == set(range(asked))


async def test_reads_in_flight_count_with_the_answers_that_they_may_get(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bookie.channel.IN_FLIGHT_BYTES_MAX", 4 << 20)
    await served.add(run_of(7, [0]))
    waiting: list[Callable[[], None]] = []
    peers = Peer._receive

    def counted(peer: Peer, request: Request, size: int) -> None:
        if request.op is Op.READ:
            peer._in_flight += 1
            peer._in_flight_bytes += size
            waiting.append(lambda: peer._answer(request, size, Status.UNKNOWN, -1, b"", b""))
        else:
            peers(peer, request, size)

    monkeypatch.setattr(Peer, "_receive", counted)
    async with channel(served.session, served.url) as line:
        for request in range(20):
            line.send(
                frames.encode_request(Request(Op.READ, request, 7, 0, 0, ME, bytes_max=1 << 20))
            )
        await until(lambda: len(waiting) == 4, "as many as there is room for are taken")
        assert await served.add(run_of(8, [0])) is Status.OK, "others are served"
        assert len(waiting) == 4
        while waiting:
            waiting.pop()()
        await until(lambda: waiting, "an answer makes room for the next one")


async def test_an_answer_is_given_in_the_name_that_was_asked(served: Served) -> None:
    """Rule 4: what an older incarnation is asked is not answered in the new one's name."""
    await served.add(run_of(7, range(3)))
    served.store.set_member("b1@2")
    members = ["b1@1", "b1@2"] * 20
    answered: dict[int, str] = {}
    async with channel(served.session, served.url) as line:
        for number, member in enumerate(members):
            # All arrive before any is answered: this task does not wait in between.
            line.send(frames.encode_request(Request(Op.WRITE_LAC, number, 7, -1, 1, member, KEY)))
        while len(answered) < len(members):
            name, answers = frames.parse_answers(*await received(line))
            assert {answer.status for answer in answers} == {Status.OK}
            answered |= {answer.request_id: name for answer in answers}

    assert [answered[number] for number in range(len(members))] == members


async def test_plain_http_gives_the_same_answers_in_json(served: Served) -> None:
    key = {"X-Ledger-Key": base64.b64encode(KEY).decode()}
    base = f"{served.url}/v1/ledgers/7"
    session = served.session

    async with session.post(f"{base}/entries", data=run_of(7, [0, 1]).body, headers=key) as added:
        assert (added.status, (await added.json())["status"]) == (200, "ok")
    async with session.get(f"{base}/entries?from=1&to=3") as got:
        body = await got.json()
        assert body["bookie"] == ME
        assert body["absent"] == [[2, 3]]
        (entry,) = body["entries"]
        assert base64.b64decode(entry["payload"]) == entry_of(7, 1).payload
    async with session.post(f"{base}/fence", headers=key) as fenced:
        assert (await fenced.json())["status"] == "ok"
    async with session.post(f"{base}/entries", data=run_of(7, [2]).body, headers=key) as refused:
        assert (refused.status, (await refused.json())["status"]) == (409, "fenced")
    async with session.get(f"{base}/last-add-confirmed") as lac:
        assert (await lac.json())["last_add_confirmed"] == 0
    async with session.get(base) as held:
        body = await held.json()
        assert (body["ranges"], body["fenced"], body["entries"]) == ([[0, 1]], True, 2)
    async with session.get(f"{served.url}/v1/ledgers") as listed:
        assert [ledger["ledger_id"] for ledger in (await listed.json())["ledgers"]] == [7]
    async with session.get(f"{served.url}/v1/info") as info:
        assert (await info.json())["bookie"] == ME


async def test_a_range_digest_covers_ids_lengths_and_payloads(served: Served) -> None:
    await served.add(run_of(7, range(10)))

    async def digest(*ranges: list[int], **asked: int) -> list[dict[str, Any]]:
        url = f"{served.url}/v1/ledgers/7/digests"
        body = json.dumps({"ranges": ranges, **asked})
        async with served.session.post(url, data=body) as answer:
            digests: list[dict[str, Any]] = (await answer.json())["digests"]
            return digests

    once, part = await digest([0, 9], [0, 8])
    assert once["digest"] != part["digest"]
    assert (once["present"], once["damaged"], once["entries"]) == ([[0, 9]], [], 10)
    await served.store.checkpoint()
    assert await digest([0, 9]) == [once]
    (odd,) = await digest([0, 9], modulus=2, residue=1)
    assert (odd["entries"], odd["digest"] == once["digest"]) == (5, False)
    sha = hashlib.sha256()
    for entry in run_of(7, [1, 3, 5, 7, 9]).entries():
        sha.update(struct.pack(">qqqI", 7, entry.entry_id, entry.length, len(entry.payload)))
        sha.update(entry.payload)
    assert odd["digest"] == sha.hexdigest()


async def test_bad_requests_are_problems(served: Served) -> None:
    session = served.session
    for method, path, status, code in (
        ("GET", "/v1/ledgers/9", 404, "no-such-ledger"),
        ("GET", "/v1/ledgers/x", 400, "bad-request"),
        ("GET", "/v1/ledgers/-1", 422, "invalid"),
        ("GET", "/v1/ledgers?limit=0", 422, "invalid"),
        ("GET", "/v1/ledgers?colour=red", 422, "invalid"),
        ("POST", "/v1/ledgers/7/entries?kind=x", 422, "invalid"),
        ("GET", "/v1/ledgers/7/entries?from=3&to=2", 422, "invalid"),
        ("POST", "/v1/ledgers/7/entries", 400, "bad-request"),
        ("GET", "/v1/nothing", 404, "not-found"),
    ):
        async with session.request(method, served.url + path) as answer:
            assert answer.status == status
            assert (await answer.json(content_type=None))["code"] == code


async def test_bodies_that_are_too_large_together_or_too_slow_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{served.url}/v1/ledgers/7/entries"

    async def endless() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    monkeypatch.setattr("quorumlog.net.bodies.BODY_S", 0.0)
    async with served.session.post(url, data=endless()) as answer:
        assert answer.status == 408
    monkeypatch.setattr("quorumlog.net.bodies.BODY_S", DEADLINE_S)
    monkeypatch.setattr("quorumlog.net.bodies.BODIES_BYTES_MAX", 10)
    async with served.session.post(url, data=b"x" * 11) as answer:
        assert answer.status == 429
    monkeypatch.setattr("quorumlog.net.bodies.BODIES_BYTES_MAX", 11)
    async with served.session.post(url, data=b"x" * 11) as answer:
        assert answer.status == 400, "what was refused counts no more"


async def test_stopping_a_bookie_ends_its_channels(served: Served) -> None:
    assert await served.add(run_of(7, [0])) is Status.OK

    async with channel(served.session, served.url) as line, within("the channel ends"):
        await until(lambda: len(served.bookie.channels) == 2, "both channels are there")
        await served.bookie.stop()
        assert await line.receive() is None
        await until(lambda: not served.bookie.channels, "none is left")

    async with served.session.get(f"{served.url}/v1/info") as answer:
        assert answer.status == 503


async def test_the_highest_common_version_is_used(served: Served) -> None:
    offered = ("quorumlog-channel/2", "quorumlog-channel/1")
    async with channel(served.session, served.url, *offered) as line:
        line.send(frames.encode_request(Request(Op.READ_LAC, 1, 7, -1, -1, ME)))
        assert frames.parse_answers(*await received(line))[0] == ME


async def test_a_caller_without_a_common_version_is_told_so_and_counted(served: Served) -> None:
    asked = {"Connection": "Upgrade", "Upgrade": "quorumlog-channel/3, quorumlog-channel/2"}
    async with served.session.get(f"{served.url}/v1/channel", headers=asked) as refused:
        assert refused.status == 400
        assert refused.headers["Upgrade"] == "quorumlog-channel/1"
        said = (await refused.json(content_type=None))["detail"]

    assert said.startswith("this bookie supports channel versions 1, and the caller 2, 3")
    assert served.bookie.channel_refusals == 1


async def test_a_request_without_an_upgrade_is_told_which_one_it_takes(served: Served) -> None:
    async with served.session.get(f"{served.url}/v1/channel") as refused:
        assert refused.status == 400
        said = (await refused.json(content_type=None))["detail"]

    assert "send Upgrade: quorumlog-channel/1" in said


async def received(line: Line) -> Message:
    """The next message, which comes."""
    async with within("a message comes"):
        message = await line.receive()
    assert message is not None
    return message
