"""Rewrites of a log's sealed ledgers under everything else that happens to it (rule 27c).

Most choose what a merge would not: any adjacent ledgers, as many as there are. The judge compares
each record of the new ledger with what was at its offset.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.log import LogItem, LogMetadata
from tests.model.logs.model import Gateway


class Rewriting:
    """Gateways that rewrite a log, now and then two at once."""

    def __init__(self, name: str, *, alive: Callable[[], list[Gateway]], seed: int) -> None:
        self.name, self.alive = name, alive
        self.random = random.Random(f"rewrites-{seed}")
        self.pause_s = self.random.choice((0.0, 0.05, 0.3))
        """0: this seed has no rewrites."""
        self.done = 0

    async def run(self) -> None:
        """Rewrite until this is cancelled."""
        while self.pause_s:
            await asyncio.sleep(self.random.random() * self.pause_s)
            many = self.random.choice((1, 1, 2))
            await asyncio.gather(
                *[self.rewrite(self.random.choice(self.alive())) for _ in range(many)]
            )

    async def rewrite(self, gateway: Gateway) -> None:
        """Rewrite some ledgers through a gateway, which may die meanwhile."""
        with contextlib.suppress(QuorumLogError, ConnectionResetError):
            row = await gateway.while_it_lives(gateway.logs.rows.row(self.name))
            items = self.chosen(row)
            if not items:
                return
            # Elsewhere the log changes before the rewrite begins, which knows an older row.
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1)))
            done = await gateway.while_it_lives(gateway.logs.rewrites.rewrite(row, items))
            self.done += isinstance(done.log, LogMetadata)

    def chosen(self, row: LogMetadata) -> tuple[LogItem, ...]:
        """Adjacent items that may be rewritten."""
        may = [item for item in row.items if row.names_sealed((item,))]
        if not may:
            return ()
        first = self.random.randrange(len(may))
        return tuple(may[first : first + self.random.choice((1, 2, 3, len(may)))])
