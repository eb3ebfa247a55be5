"""A busy handle, whose appends go by a socket, through the end of the gateway at the other side."""

import asyncio
import uuid
from collections import Counter
from itertools import count

import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Log
from quorumlog.errors import NOT_DONE, QuorumLogError
from tests.support.waiting import SETTLED_S, until, within

pytestmark = pytest.mark.asyncio(loop_scope="package")


class Load:
    """Callers that append numbers, one at a time each, and note what became of each number."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.offsets: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.is_over = False
        self._numbers = count()

    async def work(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            try:
                done = await self.log.append(b"%d" % number)
            except QuorumLogError as error:
                self.failed[number] = error.outcome
            else:
                self.offsets[number] = done.first_offset

    async def go_on(self, more: int) -> None:
        enough = len(self.offsets) + more
        await until(
            lambda: len(self.offsets) >= enough, f"{more} more are there", deadline_s=SETTLED_S
        )


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_what_a_busy_handle_was_told_outlives_its_gateway(cluster: Cluster, how: str) -> None:
    async with Client(*cluster.gateways) as client:
        load = Load(await client.create_log(f"busy-{uuid.uuid4().hex}"))
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(load.work())
            async with within("a socket is open"):
                while load.log._stream._socket is None:
                    await load.go_on(1)
            await load.go_on(100)
            await (cluster.kill if how == "kill" else cluster.stop)("gateway-1")
            await load.go_on(500)
            load.is_over = True

        found = {record.offset: int(record.value) async for record in load.log.records()}
    times = Counter(found.values())
    assert {number: found.get(at) for number, at in load.offsets.items()} == {
        number: number for number in load.offsets
    }
    assert max(times.values()) == 1
    assert not [
        number for number, what in load.failed.items() if what == NOT_DONE and number in times
    ]
