"""Rewrites and indexes of a log's sealed ledgers under everything else that happens to it (rules 27c, 27e).

Most choose what a merge would not: any adjacent ledgers, as many as there are. The judge compares
each record of the new ledger with what was at its offset.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from zlib import crc32

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.log import LogItem, LogMetadata
from services.gateway.logs.values import ReadRecord
from tests.model.logs.judge import Violation
from tests.model.logs.model import Gateway


def key_of(value: str) -> bytes:
    """The key of a record: one of a few."""
    return b"k%d" % (crc32(value.encode()) % 5)


class Rewriting:
    """Gateways that rewrite a log, now and then two at once."""

    def __init__(self, name: str, *, alive: Callable[[], list[Gateway]], seed: int) -> None:
        self.name, self.alive = name, alive
        self.random = random.Random(f"rewrites-{seed}")
        self.pause_s = self.random.choice((0.0, 0.05, 0.3))
        """0: this seed has no rewrites."""
        self.done = self.indexed = 0

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
            if len(items) == 1 and items[0].index is None and self.random.random() < 0.5:
                made = await gateway.while_it_lives(gateway.logs.rewrites.index(row, items[0]))
                self.indexed += isinstance(made.log, LogMetadata)
                return
            done = await gateway.while_it_lives(gateway.logs.rewrites.rewrite(row, items))
            self.done += isinstance(done.log, LogMetadata)

    def chosen(self, row: LogMetadata) -> tuple[LogItem, ...]:
        """Adjacent items that may be rewritten."""
        may = [item for item in row.items if row.names_sealed((item,))]
        if not may:
            return ()
        first = self.random.randrange(len(may))
        return tuple(may[first : first + self.random.choice((1, 2, 3, len(may)))])


async def look_up(gateway: Gateway, name: str, whole: Sequence[ReadRecord]) -> None:
    """A gateway finds by key what it finds without indexes. Nothing changes the log meanwhile."""
    keys = gateway.logs.keys
    for key in sorted({found.record.key or b"none" for found in whole}):
        offsets = [found.offset for found in whole if found.record.key == key]
        newest = await keys.newest(name, key)
        found = [each.offset for each in newest.records]
        at = whole[0].offset if whole else 0
        if found != offsets[-1:]:
            raise Violation(f"rule 27e: the newest of {key!r} is at {offsets}, not {found}")
        found = []
        for _ in range(2 * len(whole) + 2):
            page = await keys.page(name, at, key, created_at=None, limit=3, max_bytes=200)
            page = page or await gateway.logs.reader.read(name, at, limit=3)
            found += [each.offset for each in page.records if each.record.key == key]
            at = page.next
        if found != offsets:
            raise Violation(f"rule 27e: {key!r} is at {offsets}, not {found}")
    if keys.damaged:
        raise Violation("rule 27e: an index that was built is none")
