"""Rows that are read again after a gap in the news: all of them, in bulk, until somebody answers."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from quorumlog.errors import MetadataUnavailable
from quorumlog.wire.bodies import HEADS_MAX
from services.gateway.engine.rows import Rereads
from tests.support.virtual import in_virtual_time

SOON_S = 60.0


class Primary:
    """Answers with what it was asked for, or fails as often as it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.failures: list[Exception] = []
        self.lost: set[int] = set()
        self.answers = asyncio.Event()
        self.answers.set()

    async def heads(self, keys: Sequence[int]) -> Mapping[int, int]:
        self.asked.append(list(keys))
        await self.answers.wait()
        if self.failures:
            raise self.failures.pop()
        return {key: key for key in keys if key not in self.lost}


@contextmanager
def running(rereads: Rereads[int]) -> Iterator[None]:
    task = asyncio.create_task(rereads.run())
    try:
        yield
    finally:
        task.cancel()


@in_virtual_time(seed=0)
async def test_every_row_is_reread_once_and_in_bulk() -> None:
    primary, learned = Primary(), list[int]()
    keys = range(2 * HEADS_MAX + 1)
    rereads = Rereads[int](lambda: keys, primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == list(keys)
    assert [len(asked) for asked in primary.asked] == [HEADS_MAX, HEADS_MAX, 1]
    assert rereads.waiting == 0


@in_virtual_time(seed=0)
async def test_rows_are_requested_until_answered_whatever_fails() -> None:
    primary, learned = Primary(), list[int]()
    primary.failures = [RuntimeError("a defect"), MetadataUnavailable(), MetadataUnavailable()]
    rereads = Rereads[int](lambda: (1, 2), primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == [1, 2]
    assert primary.asked == [[1, 2]] * 4


@in_virtual_time(seed=0)
async def test_a_row_whose_answer_a_gap_overtook_is_requested_again() -> None:
    primary, learned = Primary(), list[int]()
    rereads = Rereads[int](lambda: (1, 2), primary.heads, learned.append)
    with running(rereads):
        primary.answers.clear()
        rereads.want(1)
        await asyncio.sleep(SOON_S)
        rereads.gap()
        primary.answers.set()
        await asyncio.sleep(SOON_S)

    assert primary.asked == [[1], [1, 2]]
    assert learned == [1, 1, 2]


@in_virtual_time(seed=0)
async def test_without_live_keys_no_row_is_requested() -> None:
    primary = Primary()
    rereads = Rereads[int](lambda: (), primary.heads, lambda _head: None)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert primary.asked == []
    assert rereads.gaps == 1


@in_virtual_time(seed=0)
async def test_a_missing_row_is_logged_and_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    primary, learned = Primary(), list[int]()
    primary.lost = {2}
    rereads = Rereads[int](lambda: (1, 2, 3), primary.heads, learned.append)
    with running(rereads):
        rereads.gap()
        await asyncio.sleep(SOON_S)

    assert learned == [1, 3]
    assert rereads.waiting == 0

    (reported,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (reported.message, reported.__dict__["rows"]) == ("rows-missing", [2])
