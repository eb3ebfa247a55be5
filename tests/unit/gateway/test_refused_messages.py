"""What a client sent that was refused is free at once, not with the next collection of cycles."""

import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from tests.support.waiting import until
from tests.unit.gateway.conftest import Gateway

MESSAGE = "{" + " " * (4 << 20) + "x"
FREE_BYTES = 1 << 20
"""Less than one form of one message."""


@contextlib.asynccontextmanager
async def counted(gateway: Gateway) -> AsyncIterator[None]:
    """All memory that a block takes is free after it, although nothing collects cycles."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        await until(
            lambda: tracemalloc.get_traced_memory()[0] - before < FREE_BYTES, "all is free", 10
        )
        assert gateway.engine.entries[1] == []
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_refused_message_of_a_socket_is_free_at_once(
    gateway: Gateway, *, is_text: bool
) -> None:
    await gateway.create()

    async with (
        counted(gateway),
        gateway.session.ws_connect(f"{gateway.url}/v1/ledgers/1/ws") as socket,
    ):
        if is_text:
            await socket.send_str(MESSAGE)
        else:
            await socket.send_bytes(b"\0\0\0\2" + MESSAGE.encode())
        assert (await socket.receive_json())["status"] in (400, 413)


async def test_a_refused_line_of_a_stream_is_free_at_once(gateway: Gateway) -> None:
    await gateway.create()

    async with counted(gateway):
        answer = await gateway.ask(
            "POST",
            "/v1/ledgers/1/entries",
            MESSAGE.encode(),
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status == 400
        del answer
