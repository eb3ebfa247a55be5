"""Waiters at the tail of a ledger: none is kept after its wait."""

import asyncio
from collections.abc import Callable

import pytest

from services.gateway.engine.waiters import LacWaiters


@pytest.mark.parametrize("wait_s", [0.0, 0.001])
async def test_a_waiter_whose_time_is_over_is_not_kept(wait_s: float) -> None:
    waiters = LacWaiters()

    for _ in range(3):
        assert not await waiters.wait(4, wait_s)

    assert not waiters._waiting


async def test_a_waiter_whose_request_is_cancelled_is_not_kept() -> None:
    waiters = LacWaiters()
    request = asyncio.create_task(waiters.wait(4, 3600))
    await asyncio.sleep(0)
    assert waiters.lowest == 4

    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    assert not waiters._waiting


@pytest.mark.parametrize("wake", [lambda waiters: waiters.advance(5), LacWaiters.wake_all])
async def test_a_woken_waiter_is_not_kept_and_says_so(wake: Callable[[LacWaiters], None]) -> None:
    waiters = LacWaiters()
    request = asyncio.create_task(waiters.wait(4, 3600))
    await asyncio.sleep(0)

    wake(waiters)

    assert await request
    assert not waiters._waiting
