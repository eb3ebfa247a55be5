"""The channel: every request is answered exactly once, and only checked answers are believed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from quorumlog.errors import BadRequest
from quorumlog.net.bookie_client import BookieClient, Channel, ChannelLimits
from quorumlog.net.responses import problem_response
from quorumlog.protocol import record
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.wire import frames
from quorumlog.wire.frames import Message, Op, Request
from tests.support.framed import Line
from tests.support.waiting import turns, until, within
from tests.unit.net.peer import ok, peer, read_body, well

KEY = b"k" * 32
MEMBER = "bookie-1@1"
PATIENT = ChannelLimits(
    quick_s=60, slow_s=60, connect_s=60, backoff_min_s=0.001, backoff_max_s=0.01
)
HASTY = ChannelLimits(
    quick_s=0.2, slow_s=0.2, connect_s=60, backoff_min_s=0.001, backoff_max_s=0.01
)


def run_of(first: int = 0, ledger_id: int = 1) -> record.Run:
    return record.make(
        ledger_id=ledger_id,
        first_entry=first,
        last_add_confirmed=-1,
        length_before=0,
        payloads=[b"payload"],
        codec=record.Codec(DigestKind.CRC32C),
    )


@asynccontextmanager
async def client(
    address: str | None,
    limits: ChannelLimits = PATIENT,
    failed: Callable[[str], None] = lambda _name: None,
) -> AsyncIterator[BookieClient]:
    async with aiohttp.ClientSession() as session:
        one = BookieClient(lambda _name: address, session, limits, failed)
        try:
            yield one
        finally:
            await one.close()


async def add(bookies: BookieClient, run: record.Run | None = None) -> Status:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookies.add(MEMBER, KEY, run or run_of(), answered.set_result)
    async with within("it is answered"):
        return await answered


@contextmanager
def on_loop_errors() -> Iterator[list[dict[str, object]]]:
    """What would only be printed: an answer given twice shows here (InvalidStateError)."""
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    yield errors
    assert errors == []


async def test_pipelined_requests_get_their_own_answers_in_any_order() -> None:
    held: list[Request] = []

    async def backwards(request: Request, line: Line) -> None:
        held.append(request)
        if len(held) == 50:
            for one in reversed(held):
                status = Status.OK if one.first % 2 else Status.FENCED
                line.send(ok(one, status))

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = backwards

        answers = await asyncio.gather(*[add(bookies, run_of(first)) for first in range(50)])

        assert answers == [Status.OK if first % 2 else Status.FENCED for first in range(50)]
        assert bookie.connections == 1
        assert [request.first for request in bookie.seen] == list(range(50))
        assert bookie.seen[0].run == run_of(0)
        assert bookie.seen[0].ledger_key == KEY


async def test_a_broken_connection_makes_all_in_flight_unknown_and_is_replaced() -> None:
    async def cut_at_tenth(request: Request, _line: Line) -> None:
        if request.first == 9:
            await bookie.cut()

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = cut_at_tenth
        with on_loop_errors():
            answers = await asyncio.gather(*[add(bookies, run_of(first)) for first in range(10)])
        assert answers == [Status.UNKNOWN] * 10

        bookie.behave = well

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected again")
        assert bookie.connections == 2


async def test_a_bookie_that_is_not_there_is_unknown_until_it_comes() -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        await bookie.stop()
        assert await add(bookies) is Status.UNKNOWN
        assert await add(bookies) is Status.UNKNOWN
        await bookie.start()

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected")


async def test_a_bookie_without_a_known_address_is_unknown() -> None:
    async with client(None) as bookies:
        assert await add(bookies) is Status.UNKNOWN


async def test_silence_is_unknown_and_a_late_answer_changes_nothing() -> None:
    late: list[Request] = []

    async def late_first(request: Request, line: Line) -> Message | None:
        if not late:
            late.append(request)
            return None
        line.send(ok(late[0]))
        return ok(request, body=read_body(None, ((0, 0),)))

    async def read(bookies: BookieClient) -> Status:
        answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        bookies.read(MEMBER, 1, 0, 0, lambda status, *_: answered.set_result(status), bytes_max=9)
        async with within("it is answered"):
            return await answered

    limits = ChannelLimits(quick_s=0.2, slow_s=60, connect_s=60)
    async with peer() as bookie, client(bookie.url, limits) as bookies:
        bookie.behave = late_first
        with on_loop_errors():
            assert await read(bookies) is Status.UNKNOWN
            assert await read(bookies) is Status.OK
        assert len(late) == 1
        assert bookie.connections == 1


async def test_adds_do_not_wait_behind_the_answers_of_reads() -> None:
    released = asyncio.Event()

    async def slow_reads(request: Request, _line: Line) -> Message | None:
        if request.op is Op.READ:
            await released.wait()
        return ok(request)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = slow_reads
        bookies.read(MEMBER, 1, 0, 0, lambda *_: None, bytes_max=9)
        await until(lambda: bookie.seen, "the read is there")

        assert await add(bookies) is Status.OK
        assert bookies.channels() == {"bookie-1": True}
        released.set()


async def test_a_read_that_is_late_while_others_are_answered_is_no_fault_of_the_bookie() -> None:
    failed: list[str] = []

    async def all_but_the_first(request: Request, _line: Line) -> Message | None:
        body = read_body(None, ((request.first, request.first),))
        return ok(request, body=body) if request.first else None

    limits = ChannelLimits(quick_s=0.3, slow_s=60, connect_s=60)
    async with peer() as bookie, client(bookie.url, limits, failed.append) as bookies:
        bookie.behave = all_but_the_first
        reported: dict[int, Status] = {}

        def read(entry_id: int) -> None:
            def notify(status: Status, *_: object) -> None:
                reported[entry_id] = status

            bookies.read(MEMBER, 1, entry_id, entry_id, notify, bytes_max=9)

        for entry_id in range(2):
            read(entry_id)
        await until(lambda: len(reported) == 2, "both are answered")

        assert (reported, failed) == ({0: Status.UNKNOWN, 1: Status.OK}, [])
        read(0)
        reported.clear()
        await until(lambda: reported, "the third is given up")
        assert failed == ["bookie-1"]


async def test_a_standstill_of_this_process_is_not_the_bookies_silence() -> None:
    failed: list[str] = []
    limits = ChannelLimits(quick_s=0.8, slow_s=0.8, connect_s=60)

    async with peer() as bookie, client(bookie.url, limits, failed.append) as bookies:
        await until(lambda: _is_ok(bookies), "the channel is connected")
        failed.clear()
        answer = asyncio.ensure_future(add(bookies))
        for _ in range(4):
            await turns()
            time.sleep(0.3)  # noqa: ASYNC251  # the process stands still: this is what is tried

        async with within("it is answered"):
            assert await answer is Status.OK
        assert failed == []
        assert bookie.connections == 1


async def _is_ok(bookies: BookieClient) -> bool:
    return await add(bookies) is Status.OK


async def test_a_bookie_that_falls_silent_altogether_is_connected_to_anew() -> None:
    async def silent(_request: Request, _line: Line) -> None:
        return None

    async with peer() as bookie, client(bookie.url, HASTY) as bookies:

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected")
        before = bookie.connections
        bookie.behave = silent
        for _ in range(2):
            assert await add(bookies) is Status.UNKNOWN
        bookie.behave = well
        await until(is_ok, "the bookie answers again")
        assert bookie.connections > before


@pytest.mark.parametrize("field", ["member", "ledger_id", "first", "last", "op"])
async def test_an_answer_that_echoes_something_else_is_unknown(field: str) -> None:
    other: dict[str, Any] = {
        "member": "bookie-1@2",
        "ledger_id": 2,
        "first": 1,
        "last": 7,
        "op": frames.Op.READ,
    }

    async def wrong(request: Request, _line: Line) -> Message:
        return ok(request._replace(**{field: other[field]}))

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = wrong
        assert await add(bookies) is Status.UNKNOWN


async def test_another_incarnation_may_only_refuse() -> None:
    async def newer(request: Request, _line: Line) -> Message:
        return ok(request._replace(member="bookie-1@2"), Status.NOT_MINE)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = newer
        assert await add(bookies) is Status.NOT_MINE


async def test_a_bookie_that_listens_at_the_address_of_another_one_says_nothing_of_it() -> None:
    async def stranger(request: Request, _line: Line) -> Message:
        return ok(request._replace(member="bookie-2@1"), Status.NOT_MINE)

    async with peer() as other, peer() as bookie, aiohttp.ClientSession() as session:
        other.behave = stranger
        known = [other.url]
        bookies = BookieClient(lambda _name: known[-1], session, PATIENT)
        assert await add(bookies) is Status.UNKNOWN
        known.append(bookie.url)

        async def is_added() -> bool:
            return await add(bookies) is Status.OK

        await until(is_added, "the bookie is asked where it listens now")
        await bookies.close()


@pytest.mark.parametrize("garbage", [b"", b"\0" * 60, b"x" * 1000])
@pytest.mark.parametrize("is_framed", [True, False])
async def test_garbage_breaks_the_channel(garbage: bytes, *, is_framed: bool) -> None:
    async def garbled(_request: Request, line: Line) -> Message | None:
        if is_framed:
            return Message(garbage)
        line.write(garbage or b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return None

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = garbled
        assert await add(bookies) is Status.UNKNOWN


async def test_a_read_that_names_other_entries_is_unknown() -> None:
    bodies = {
        0: read_body(run_of(0)),
        1: read_body(run_of(5)),
        2: read_body(run_of(2, ledger_id=9)),
        3: b"\0\0\0\1",
    }

    async def reported(request: Request, _line: Line) -> Message:
        return ok(request, body=bodies[request.first])

    async def read(bookies: BookieClient, first: int) -> tuple[Status, record.Run | None]:
        answered: asyncio.Future[tuple[Status, record.Run | None]] = (
            asyncio.get_running_loop().create_future()
        )
        bookies.read(
            MEMBER,
            1,
            first,
            first,
            lambda status, run, _absent: answered.set_result((status, run)),
            bytes_max=1000,
        )
        async with within("it is answered"):
            return await answered

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = reported
        assert await read(bookies, 0) == (Status.OK, run_of(0))
        for first in (1, 2, 3):
            assert await read(bookies, first) == (Status.UNKNOWN, None)


async def test_fence_and_lac_answers_carry_the_lac() -> None:
    async def lac(request: Request, _line: Line) -> Message:
        return ok(request, lac=41)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = lac
        fenced: asyncio.Future[tuple[Status, int]] = asyncio.get_running_loop().create_future()
        asked: asyncio.Future[tuple[Status, int]] = asyncio.get_running_loop().create_future()
        bookies.fence(MEMBER, 1, KEY, lambda *answer: fenced.set_result(answer))
        bookies.read_lac(MEMBER, 1, lambda *answer: asked.set_result(answer))
        async with within("it is answered"):
            assert await fenced == await asked == (Status.OK, 41)


async def test_an_explicit_lac_reaches_the_bookie_with_its_ledger_and_key() -> None:
    heard: asyncio.Future[Request] = asyncio.get_running_loop().create_future()

    async def take(request: Request, _line: Line) -> Message:
        heard.set_result(request)
        return ok(request)

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.behave = take
        bookies.write_lac(MEMBER, 1, 41, KEY)
        async with within("it is answered"):
            request = await heard
    assert (request.op, request.member, request.ledger_id) == (Op.WRITE_LAC, MEMBER, 1)
    assert (request.last, request.ledger_key) == (41, KEY)


async def test_bytes_in_flight_are_bounded() -> None:
    async def silent(_request: Request, _line: Line) -> None:
        return None

    limits = ChannelLimits(quick_s=60, slow_s=60, connect_s=60, in_flight_bytes_max=1000)
    async with peer() as bookie, client(bookie.url, limits) as bookies:
        bookie.behave = silent
        answers: list[Status] = []
        for first in range(50):
            bookies.add(MEMBER, KEY, run_of(first), answers.append)

        await until(lambda: answers, "some are refused")

        fitting = 1000 // (len(run_of().body) + 40 + 1 + len(MEMBER) + 32)
        assert answers == [Status.UNKNOWN] * (50 - fitting)


async def test_closing_answers_what_is_in_flight() -> None:
    async def silent(_request: Request, _line: Line) -> None:
        return None

    async with peer() as bookie:
        bookie.behave = silent
        async with client(bookie.url) as bookies:
            waiting = asyncio.ensure_future(add(bookies))
            await until(lambda: bookie.seen, "the request arrives")
        assert await waiting is Status.UNKNOWN


@pytest.mark.parametrize("step", ["_complete", "_connect", "to_send"])
async def test_a_defect_of_the_channel_makes_what_is_in_flight_unknown_and_it_connects_anew(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("unforeseen")

    async with peer() as bookie, client(bookie.url) as bookies:
        with monkeypatch.context() as patched:
            patched.setattr(Channel, step, broken)
            assert list(await asyncio.gather(add(bookies), add(bookies))) == [Status.UNKNOWN] * 2

        async def is_ok() -> bool:
            return await add(bookies) is Status.OK

        await until(is_ok, "the channel is connected again")
    assert "channel-broke" in caplog.text


async def test_a_broken_receiver_ends_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    async with peer() as bookie, client(bookie.url) as bookies:
        heard: list[Status] = []

        def breaks(status: Status) -> None:
            heard.append(status)
            raise RuntimeError("unforeseen")

        bookies.add(MEMBER, KEY, run_of(), breaks)
        assert await add(bookies) is Status.OK

        assert heard == [Status.OK, Status.UNKNOWN]
        assert bookie.connections == 1
    assert "answer-broke" in caplog.text


async def test_a_bookie_of_no_common_version_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.version = "quorumlog-channel/7"
        assert await add(bookies) is Status.UNKNOWN

    assert bookie.seen == []
    assert "upgraded to quorumlog-channel/7, not to quorumlog-channel/1" in reported(caplog)


async def test_a_refused_handshake_is_logged_with_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    refusal = BadRequest("this route is a WebSocket: the request asks for no upgrade")

    # A bookie of the release before.
    async with peer() as bookie, client(bookie.url) as bookies:
        bookie.refusal = problem_response(refusal, "1")
        assert await add(bookies) is Status.UNKNOWN

    assert f"no upgrade to quorumlog-channel/1: 400, {refusal.detail}" in reported(caplog)


def reported(caplog: pytest.LogCaptureFixture) -> str:
    """Why channels broke."""
    return "\n".join(record.why for record in caplog.records if hasattr(record, "why"))
