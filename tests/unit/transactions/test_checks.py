"""Whether a transaction is OPEN is asked after an append came, and once for all that wait."""

import asyncio
from typing import Any, cast

import pytest

from quorumlog.errors import UNKNOWN, MetadataUnavailable, TransactionAborted, TransactionCommitted
from quorumlog.protocol.transaction import TransactionState
from services.gateway.logs.transactions import _Checks
from tests.support.waiting import turns


class Service:
    """Answers when it is told to, with what was so when it was asked."""

    def __init__(self) -> None:
        self.state = TransactionState.OPEN
        self.asked: list[asyncio.Future[TransactionState | Exception]] = []
        self.seen: list[TransactionState] = []

    async def renew(self, transaction_id: str) -> TransactionState:
        del transaction_id
        future: asyncio.Future[TransactionState | Exception] = asyncio.Future()
        self.seen.append(self.state)
        self.asked.append(future)
        answer = await future
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self) -> None:
        """Answer what was asked longest ago."""
        self.asked.pop(0).set_result(self.seen.pop(0))


async def test_a_question_that_was_asked_before_an_append_came_does_not_count_for_it() -> None:
    service = Service()
    checks = _Checks(cast(Any, service))
    early = asyncio.create_task(checks.check("t"))
    await turns(10)

    service.state = TransactionState.ABORTED
    late = [asyncio.create_task(checks.check("t")) for _ in range(5)]
    await turns(10)

    # One question is under way, and the five wait for the next one together.
    assert len(service.asked) == 1
    service.answer()
    await early
    await turns(10)
    assert len(service.asked) == 1
    service.answer()
    for task in late:
        with pytest.raises(TransactionAborted):
            await task
    assert not service.asked


async def test_transactions_do_not_wait_for_each_other() -> None:
    service = Service()
    checks = _Checks(cast(Any, service))
    tasks = [asyncio.create_task(checks.check(name)) for name in ("a", "b")]
    await turns(10)

    assert len(service.asked) == 2
    service.answer()
    service.answer()
    await asyncio.gather(*tasks)


async def test_an_append_is_unknown_while_nobody_can_say_whether_it_is_open() -> None:
    service = Service()
    checks = _Checks(cast(Any, service))
    task = asyncio.create_task(checks.check("t"))
    await turns(10)
    service.asked.pop().set_result(MetadataUnavailable("away"))

    with pytest.raises(MetadataUnavailable) as error:
        await task

    assert error.value.outcome == UNKNOWN
    service.state = TransactionState.COMMITTED
    again = asyncio.create_task(checks.check("t"))
    await turns(10)
    service.seen.pop(0)
    service.answer()
    with pytest.raises(TransactionCommitted):
        await again
