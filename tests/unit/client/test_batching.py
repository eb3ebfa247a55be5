"""Appends that travel together: in which batches, in which order, and what fails with what."""

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, cast

import pytest

from quorumlog.client import Batching, ClientBroke, ClientClosed, ConnectionLost
from quorumlog.client.batching import Batcher, Call, Submission
from quorumlog.client.transport import Transport
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    LedgerClosed,
    QuorumTimeout,
    TooLarge,
    UnexpectedEntryId,
)
from tests.support.waiting import turns, until


class Server:
    """Takes batches one by one, as it is told to."""

    deadline_s = 60.0

    def __init__(self, **limits: Any) -> None:
        self.is_open = True
        self.calls: list[list[bytes]] = []
        self.sent: list[bytes] = []
        self.ends: list[float] = []
        self.expected: list[int | None] = []
        self.gate = asyncio.Event()
        self.refuses: Callable[[Call[bytes]], Exception | None] = lambda _call: None
        self.tasks: set[asyncio.Task[None]] = set()
        self.under_way = asyncio.Event()
        self.batcher = Batcher[bytes, int, tuple[int, int]](
            self.send,
            lambda first, index, count: (first + index, count),
            len,
            cast("Transport", self),
            Batching(**limits),
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def check_open(self) -> None:
        if not self.is_open:
            raise ClientClosed("used inside `with` only")

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def asked(self, payload: bytes) -> asyncio.Future[tuple[int, int]]:
        """Submit an append, and wait until its request is under way."""
        future = await self.batcher.submit([payload])
        await self.under_way.wait()
        return future

    async def send(self, call: Call[bytes]) -> int:
        assert not self.under_way.is_set(), "one request at a time"
        self.ends.append(call.end)
        self.under_way.set()
        try:
            await asyncio.sleep(0)  # a body is written by a task of its own, as aiohttp does
            self.sent.append(call.payloads[0])
            await self.gate.wait()
        finally:
            self.under_way.clear()
        error = self.refuses(call)
        if error is not None:
            raise error
        first = sum(map(len, self.calls))
        self.calls.append(list(call.payloads))
        self.expected.append(call.expect)
        return first


async def test_what_comes_while_a_request_is_under_way_goes_with_the_next_in_order() -> None:
    server = Server()
    first = await server.asked(b"0")
    rest = [await server.batcher.submit([b"%d" % n]) for n in range(1, 5)]

    server.gate.set()
    await server.batcher.flush()

    assert server.calls == [[b"0"], [b"1", b"2", b"3", b"4"]]
    assert [await future for future in (first, *rest)] == [(n, 1) for n in range(5)]


async def test_what_is_queued_is_sent_before_the_callers_of_the_last_request_go_on() -> None:
    server = Server()
    first = await server.asked(b"a")
    second = await server.batcher.submit([b"b"])
    sent_before: list[list[bytes]] = []
    first.add_done_callback(lambda _: sent_before.append(list(server.sent)))

    server.gate.set()
    assert (await first, await second) == ((0, 1), (1, 1))

    assert sent_before == [[b"a", b"b"]]


async def test_a_failure_is_not_told_before_the_answers_to_what_was_sent_earlier() -> None:
    server = Server(count_max=1)
    server.refuses = lambda call: QuorumTimeout("late") if b"b" in call.payloads else None
    futures = [await server.asked(b"a"), *[await server.batcher.submit([p]) for p in (b"b", b"c")]]
    ended: list[int] = []
    for future in futures:
        future.add_done_callback(lambda future: ended.append(futures.index(future)))

    server.gate.set()
    await asyncio.gather(*futures, return_exceptions=True)
    await turns()

    assert ended == [0, 1, 2]
    assert server.calls == [[b"a"]]


async def test_callers_that_wait_for_each_append_travel_together_however_they_began() -> None:
    server = Server()
    count, rounds = 50, 4
    places: dict[int, list[int]] = {caller: [] for caller in range(count)}

    async def call(caller: int) -> None:
        for _ in range(rounds):
            places[caller].append((await server.batcher.append([b"x"]))[0])

    async with asyncio.TaskGroup() as group:
        group.create_task(call(0))
        await server.under_way.wait()
        for caller in range(1, count):
            group.create_task(call(caller))
        await turns()
        server.gate.set()

    assert list(map(len, server.calls)) == [1, count - 1, *[count] * (rounds - 1)]
    assert all(found == sorted(found) for found in places.values())


async def test_batches_keep_to_their_count_and_their_bytes() -> None:
    server = Server(count_max=3, bytes_max=10)
    server.gate.set()
    futures = [await server.batcher.submit([b"x" * n]) for n in (1, 1, 1, 1, 4, 6, 30, 1)]

    await asyncio.gather(*futures)

    assert [list(map(len, call)) for call in server.calls] == [[1, 1, 1], [1, 4], [6], [30], [1]]


async def test_an_append_with_an_expected_place_travels_alone() -> None:
    server = Server()
    server.gate.set()
    futures = [
        await server.batcher.submit([b"a"]),
        await server.batcher.submit([b"b", b"c"], expect=1),
        await server.batcher.submit([b"d"]),
    ]

    assert [await future for future in futures] == [(0, 1), (1, 2), (3, 1)]
    assert server.calls == [[b"a"], [b"b", b"c"], [b"d"]]
    assert server.expected == [None, 1, None]


async def test_a_batch_that_is_not_full_waits_for_more_for_its_time() -> None:
    server = Server(linger_ms=60_000, count_max=3)
    server.gate.set()
    first = await server.batcher.submit([b"a"])
    await turns()
    assert not server.calls

    rest = [await server.batcher.submit([b"b"]), await server.batcher.submit([b"c"])]
    await asyncio.gather(first, *rest)

    assert server.calls == [[b"a", b"b", b"c"]]


async def test_appends_beyond_the_queues_bytes_wait_in_the_order_of_the_calls() -> None:
    server = Server(queued_bytes_max=10, count_max=1)
    first = [await server.batcher.submit([b"a" * 5]) for _ in range(2)]
    later = [asyncio.ensure_future(server.batcher.submit([b"b" * size])) for size in (9, 1, 1)]
    await turns()

    server.gate.set()
    await asyncio.gather(*first, *[await waiting for waiting in later])

    assert [len(call[0]) for call in server.calls] == [5, 5, 9, 1, 1]


async def test_only_the_append_that_is_wrong_is_refused() -> None:
    server = Server()
    server.refuses = lambda call: TooLarge() if b"wrong" in call.payloads else None
    server.gate.set()
    good, wrong, other = [await server.batcher.submit([p]) for p in (b"a", b"wrong", b"b")]

    assert (await good, await other) == ((0, 1), (1, 1))
    with pytest.raises(TooLarge):
        await wrong


async def test_nothing_is_sent_that_was_queued_behind_a_failure() -> None:
    server = Server()
    server.refuses = lambda call: QuorumTimeout("late") if b"a" in call.payloads else None
    first = await server.asked(b"a")
    behind = await server.batcher.submit([b"b"])
    server.gate.set()

    with pytest.raises(QuorumTimeout) as failed:
        await first
    with pytest.raises(QuorumTimeout) as not_sent:
        await behind
    assert (failed.value.outcome, not_sent.value.outcome) == (UNKNOWN, NOT_DONE)
    assert server.calls == []
    assert await server.batcher.append([b"c"]) == (0, 1)


async def test_an_append_at_another_place_than_expected_stops_no_others() -> None:
    server = Server()
    server.refuses = lambda call: UnexpectedEntryId() if call.expect is not None else None
    server.gate.set()
    refused = await server.batcher.submit([b"a"], expect=7)
    behind = await server.batcher.submit([b"b"])

    with pytest.raises(UnexpectedEntryId):
        await refused
    assert await behind == (0, 1)


async def test_nothing_is_sent_behind_an_expected_append_whose_outcome_is_unknown() -> None:
    server = Server()
    server.refuses = lambda call: QuorumTimeout("late") if call.expect is not None else None
    server.gate.set()
    late = await server.batcher.submit([b"a"], expect=7)
    behind = await server.batcher.submit([b"b"])

    with pytest.raises(QuorumTimeout):
        await late
    with pytest.raises(QuorumTimeout) as not_sent:
        await behind
    assert not_sent.value.outcome == NOT_DONE
    assert server.calls == []


async def test_payloads_are_not_kept_once_they_are_sent() -> None:
    class Payload(list[int]):
        """Bytes have no weak references."""

    server = Server()
    server.gate.set()
    payload: Any = Payload([1])
    kept = weakref.ref(payload)
    await server.batcher.append([payload])
    await server.batcher.flush()

    server.calls.clear()
    server.sent.clear()
    del payload

    assert kept() is None


async def test_each_caller_gets_an_error_of_his_own() -> None:
    server = Server()
    server.refuses = lambda _call: LedgerClosed("over", last_entry=3)
    server.gate.set()
    futures = [await server.batcher.submit([b"a"]), await server.batcher.submit([b"b"])]

    errors = await asyncio.gather(*futures, return_exceptions=True)

    assert all(isinstance(error, LedgerClosed) for error in errors)
    assert errors[0] is not errors[1]


async def test_submit_waits_while_too_much_is_queued() -> None:
    server = Server(queued_bytes_max=10)
    first = await server.asked(b"x" * 8)
    second = await server.batcher.submit([b"x" * 8])
    third = asyncio.ensure_future(server.batcher.submit([b"x" * 8]))
    await turns()
    assert not third.done()

    server.gate.set()

    assert [await first, await second, await (await third)] == [(0, 1), (1, 1), (2, 1)]


async def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    server = Server()
    first = await server.asked(b"a")
    given_up = await server.batcher.submit([b"b"])
    given_up.cancel()
    last = await server.batcher.submit([b"c"])
    server.gate.set()

    assert (await first, await last) == ((0, 1), (1, 1))
    assert server.calls == [[b"a"], [b"c"]]


async def test_ending_the_work_fails_what_is_under_way_and_what_is_queued() -> None:
    server = Server()
    under_way = await server.asked(b"a")
    queued = await server.batcher.submit([b"b"])

    for task in server.tasks:
        task.cancel()
    with pytest.raises(ConnectionLost) as unknown:
        await under_way
    with pytest.raises(ConnectionLost) as not_sent:
        await queued
    assert (unknown.value.outcome, not_sent.value.outcome) == (UNKNOWN, NOT_DONE)
    await server.batcher.flush()


async def test_after_a_failure_nothing_of_a_batch_that_is_sent_one_by_one_is_sent() -> None:
    server = Server()
    server.gate.set()
    errors: dict[tuple[bytes, ...], Exception] = {
        (b"a", b"b", b"c"): TooLarge(),
        (b"b",): QuorumTimeout("late"),
    }
    server.refuses = lambda call: errors.get(tuple(call.payloads))
    futures = [await server.batcher.submit([p]) for p in (b"a", b"b", b"c")]

    done = await asyncio.gather(*futures, return_exceptions=True)

    assert server.calls == [[b"a"]]
    assert done[0] == (0, 1)
    assert isinstance(done[1], QuorumTimeout)
    assert isinstance(done[2], QuorumTimeout)
    assert (done[1].outcome, done[2].outcome) == (UNKNOWN, NOT_DONE)


async def test_ending_the_work_before_its_first_step_ends_every_append() -> None:
    server = Server()
    futures = [await server.batcher.submit([p]) for p in (b"a", b"b")]

    for task in server.tasks:
        task.cancel()
    for future in futures:
        with pytest.raises(ConnectionLost) as not_sent:
            await future
        assert not_sent.value.outcome == NOT_DONE
    await server.batcher.flush()


@pytest.mark.parametrize("step", ["_send", "_share", "_linger", "_take"])
async def test_a_defect_of_any_step_ends_every_append_and_is_logged(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(count_max=1)
    batcher = server.batcher
    under_way = await batcher.submit([b"a"])
    queued = await batcher.submit([b"b"])
    flushed = asyncio.ensure_future(batcher.flush())

    def broken(*_args: object) -> None:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr(batcher, step, broken)
        server.gate.set()
        errors = await asyncio.gather(under_way, queued, return_exceptions=True)

    for error in errors:
        assert isinstance(error, ClientBroke)
        assert isinstance(error.__cause__, RuntimeError)
    outcomes = {"_send": [UNKNOWN, NOT_DONE], "_share": [UNKNOWN, UNKNOWN]}
    assert [error.outcome for error in errors if isinstance(error, ClientBroke)] == outcomes.get(
        step, [NOT_DONE, NOT_DONE]
    )
    assert "batching-broke" in caplog.text
    await flushed
    assert await batcher.append([b"c"])


async def test_an_append_s_deadline_begins_with_the_call_and_not_with_its_request() -> None:
    server = Server()
    loop = asyncio.get_running_loop()
    first = await server.asked(b"a")
    queued = [await server.batcher.submit([b"b"])]
    asked = loop.time()
    queued.append(await server.batcher.submit([b"c"]))
    await until(lambda: loop.time() > asked, "time passes")

    server.gate.set()
    await asyncio.gather(first, *queued)

    assert server.calls == [[b"a"], [b"b", b"c"]]
    assert server.ends[1] <= asked + server.deadline_s


async def test_what_threads_posted_to_a_client_that_is_closed_ends_and_leaves_its_room() -> None:
    server = Server(queued_bytes_max=2)
    posted = [Submission((b"x",), 1, None, False, 0.0, Future[tuple[int, int]]()) for _ in "ab"]
    assert [server.batcher.post(submission) for submission in posted] == [True, False]
    assert not server.batcher.has_room(1)

    server.is_open = False
    server.batcher.receive(server.batcher.collect())

    errors = [submission.done.exception() for submission in posted]
    assert [type(error) for error in errors] == [ClientClosed, ClientClosed]
    assert errors[0] is not errors[1]
    assert server.batcher.has_room(2)


async def test_the_deadline_holds_for_who_waits_for_room() -> None:
    server = Server(queued_bytes_max=1)
    server.deadline_s = 0.01
    futures = [await server.asked(b"a")]
    futures.append(await server.batcher.submit([b"b"]))

    with pytest.raises(ConnectionLost) as late:
        await server.batcher.append([b"c"])

    assert late.value.outcome == NOT_DONE
    server.gate.set()
    await asyncio.gather(*futures)
    assert server.calls == [[b"a"], [b"b"]]


@pytest.mark.parametrize(
    "wrong", [{"bytes_max": 0}, {"count_max": 10_001}, {"linger_ms": -1}, {"queued_bytes_max": 0}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"or more|must be 1 to"):
        Batching(**wrong)
