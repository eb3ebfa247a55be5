"""Large bodies are parsed one at a time, and other requests have their turn in between."""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.edge.http import body
from services.gateway.edge.http.limits import INLINE_BYTES_MAX, Limits, Room
from tests.support.waiting import within

LARGE = b"," * (INLINE_BYTES_MAX + 1)


def broken(_data: bytes, _count: int | None) -> None:
    raise ValueError("broken")


def length(data: bytes, _count: int | None) -> int:
    return len(data)


def length_slowly(data: bytes, _count: int | None) -> int:
    began_s = time.thread_time()
    while time.thread_time() - began_s < 2 * sys.getswitchinterval():
        pass
    return len(data)


async def test_the_next_large_body_waits_after_a_long_parse_and_not_after_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")
    loop, pauses = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def noted(
        delay: float, callback: Callable[..., object], *args: Any, **kwargs: Any
    ) -> asyncio.TimerHandle:
        if callback == room.parsing.release:
            pauses.append(delay)
        return call_later(delay, callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_later", noted)
    async with within("all are parsed"):
        for parse in (length_slowly, length, length_slowly):
            assert await body.in_turn(request, room, LARGE, parse) == len(LARGE)
            assert room.parsing.locked(), "the next one waits for the pause"
    assert pauses[0] >= 2 * sys.getswitchinterval()
    assert pauses[1] == 0


async def test_marks_are_counted_once_and_only_for_json() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    assert await body.in_turn(request, room, LARGE, lambda _, count: count) == len(LARGE)
    assert await body.in_turn(request, room, LARGE, lambda _, count: count, is_json=False) is None
    assert await body.in_turn(request, room, b",", lambda _, count: count) is None


async def test_a_large_body_that_cannot_be_parsed_keeps_nobody_waiting_for_ever() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    async with within("the next one is parsed"):
        with pytest.raises(ValueError, match="broken"):
            await body.in_turn(request, room, LARGE, broken)
        waiting = asyncio.create_task(body.in_turn(request, room, LARGE, length))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await body.in_turn(request, room, LARGE, length) == len(LARGE)
