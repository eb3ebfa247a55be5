"""The rate of copying: adds wait for their turn, and none goes out while repair is paused."""

import asyncio
from typing import Any

from quorumlog.protocol.messages import Status
from services.autorecovery.steering import PacedBookies
from tests.support.waiting import turns, until
from tests.unit.protocol.hands import run_of

RUN = run_of(b"x" * 1000)


class Written:
    """Bookies that take everything at once; remembers when."""

    fence = read_lac = read = keep_row = None
    """Handed on, and called by no test."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def add(self, _member: str, _key: bytes, _run: Any, done: Any, **_kind: bool) -> None:
        self.at.append(asyncio.get_running_loop().time())
        done(Status.OK)


async def test_in_any_interval_at_most_the_limit_and_one_run_are_sent() -> None:
    written = Written()
    pace = PacedBookies(written)  # type: ignore[arg-type]
    rate = pace.bytes_per_s = 40 * len(RUN.body)
    task = asyncio.create_task(pace.run())
    for _ in range(20):
        pace.add("b@1", b"", RUN, lambda _status: None, recovery=True)
    await until(lambda: len(written.at) == 20, "all are handed over")
    task.cancel()

    for first, begun in enumerate(written.at):
        for count, ended in enumerate(written.at[first:], 1):
            assert (count - 1) * len(RUN.body) <= rate * (ended - begun) * 1.001 + 1
    assert pace.copied_bytes == 20 * len(RUN.body)


async def test_a_pause_holds_back_all_adds_until_it_ends() -> None:
    written = Written()
    pace = PacedBookies(written)  # type: ignore[arg-type]
    pace.is_paused = True
    task = asyncio.create_task(pace.run())
    pace.add("b@1", b"", RUN, lambda _status: None, recovery=True)
    await turns(50)
    assert not written.at

    pace.is_paused = False
    await until(lambda: len(written.at) == 1, "it is handed over")
    task.cancel()
