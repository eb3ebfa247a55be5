"""Large bodies are parsed one at a time, and other requests have their turn in between."""

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.edge.http import body
from services.gateway.edge.http.limits import INLINE_BYTES_MAX, Limits, Room
from tests.support.waiting import within

LARGE = bytes(INLINE_BYTES_MAX + 1)


def broken(_data: bytes) -> None:
    raise ValueError("broken")


async def test_the_next_large_body_waits_after_one_is_parsed() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    async with within("all are parsed"):
        assert await body.in_turn(request, room, LARGE, len) == len(LARGE)
        assert room.parsing.locked(), "the next one waits"
        assert await body.in_turn(request, room, LARGE, len) == len(LARGE)


async def test_a_large_body_that_cannot_be_parsed_keeps_nobody_waiting_for_ever() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    async with within("the next one is parsed"):
        with pytest.raises(ValueError, match="broken"):
            await body.in_turn(request, room, LARGE, broken)
        waiting = asyncio.create_task(body.in_turn(request, room, LARGE, len))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await body.in_turn(request, room, LARGE, len) == len(LARGE)
