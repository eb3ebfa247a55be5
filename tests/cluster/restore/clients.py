"""Clients of a cluster whose database goes back, and the judge of what was acknowledged to them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Final

from quorumlog.client import Client
from tests.cluster.restore.found import Found
from tests.cluster.restore.ledgers import LedgerClients
from tests.cluster.restore.logs import LogClients

DEADLINE_S: Final = 20.0


class Clients:
    """Who writes ledgers and logs."""

    def __init__(self, gateways: Sequence[str], seed: int, deleters: int) -> None:
        self._gateways = tuple(gateways)
        self.ledgers = LedgerClients(self._client, seed)
        self.logs = LogClients(self._client, seed, deleters)

    def _client(self, dice: random.Random) -> Client:
        return Client(*dice.sample(self._gateways, len(self._gateways)), deadline_s=DEADLINE_S)

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write until the end of the block."""
        await self.logs.create()
        async with asyncio.TaskGroup() as group:
            tasks = self.ledgers.tasks(group) + self.logs.tasks(group)
            yield
            for task in tasks:
                task.cancel()

    async def judged(self) -> Found:
        """Recover and read everything."""
        found = Found()
        await self.ledgers.judge(found)
        await self.logs.judge(found)
        return found
