"""Shared timers: each fires once, in the order of its ends."""

import asyncio
import socket
import time

import pytest

from quorumlog.net import timers
from quorumlog.net.timers import Tasks, Timers, awake, awake_timeout, restarted
from tests.support.waiting import turns, until


async def test_ten_thousand_timers_take_one_timer_of_the_loop_and_all_fire_once() -> None:
    timers, fired = Timers(asyncio.get_running_loop()), list[int]()

    for tag in range(10_000):
        timers.after(0.02, fired.append, tag)

    await until(lambda: len(fired) >= 10_000, "all fire")
    assert fired == list(range(10_000))


async def test_a_shorter_timer_does_not_wait_for_a_longer_one() -> None:
    timers, fired = Timers(asyncio.get_running_loop()), list[str]()
    timers.after(3600, fired.append, "long")
    timers.after(0.05, fired.append, "short")

    await until(lambda: fired, "the short one fires")

    assert fired == ["short"]
    timers.close()


async def test_a_timer_that_fails_or_starts_another_does_not_stop_the_rest() -> None:
    timers, fired = Timers(asyncio.get_running_loop()), list[int]()

    def fail() -> None:
        raise RuntimeError

    timers.after(0.01, fail)
    timers.after(0.01, lambda: timers.after(0.01, fired.append, 2))
    timers.after(0.01, fired.append, 1)

    await until(lambda: len(fired) == 2, "both fire")
    assert fired == [1, 2]


async def test_what_came_while_the_process_stood_still_is_heard_before_its_timers() -> None:
    loop, heard = asyncio.get_running_loop(), list[str]()
    timers = Timers(loop)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop.add_reader(ours, lambda: heard.append(ours.recv(1).decode()))
    timers.after(0.05, heard.append, "timer")

    theirs.send(b"a")
    time.sleep(1)  # noqa: ASYNC251  # the process stands still: this is what is tried

    await until(lambda: "timer" in heard, "the timer fires")
    assert heard == ["a", "timer"]
    loop.remove_reader(ours)
    ours.close()
    theirs.close()


async def test_a_process_that_stands_still_again_and_again_does_not_use_its_timers_up() -> None:
    loop, heard = asyncio.get_running_loop(), list[str]()
    timers = Timers(loop, awake().time)
    timers.after(0.9, heard.append, "timer")

    for _ in range(7):
        time.sleep(0.3)  # noqa: ASYNC251  # the process stands still: this is what is tried
        await turns()
    heard.append("seven turns")

    await until(lambda: "timer" in heard, "the timer fires")
    assert heard == ["seven turns", "timer"]


async def test_a_timeout_counts_the_time_awake() -> None:
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.05):
            await asyncio.Event().wait()

    came = asyncio.Event()
    async with awake_timeout(0.6) as limit:
        for _ in range(3):
            time.sleep(0.3)  # noqa: ASYNC251  # the process stands still: this is what is tried
            await turns()
        limit.extend(3600)
        asyncio.get_running_loop().call_later(0.01, came.set)
        await came.wait()


async def test_a_timeout_leaves_a_cancellation_from_outside_alone() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        async with awake_timeout(3600):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await begun.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closed_timers_and_tasks_end() -> None:
    timers, fired = Timers(asyncio.get_running_loop()), list[int]()
    timers.after(0.01, fired.append, 1)
    timers.close()
    tasks = Tasks()
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.start(forever())
    await turns()
    await tasks.close()
    tasks.start(forever())

    assert ended.is_set()
    assert fired == []


async def test_work_that_a_process_depends_on_begins_again_whatever_ended_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timers, "_RESTART_S", 0.0)
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RuntimeError("unforeseen")

    tasks = Tasks()
    tasks.start(restarted(work))
    await until(lambda: runs >= 3, "it goes on after a defect and after its end")
    await tasks.close()

    assert "background-work-failed" in caplog.text
