"""Rewrites and indexes of a log's sealed ledgers under everything else that happens to it (rules 27c to 27f).

Most choose what a merge would not: any adjacent ledgers, as many as there are. The judge compares
each record of the new ledger with what was at its offset. Some seeds compact the log: its records
have few keys, and some are tombstones.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from zlib import crc32

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogItem, LogMetadata
from quorumlog.protocol.log.compaction import Pass, PassState, next_pass
from quorumlog.protocol.log.messages import RewriteDone
from services.gateway.logs.values import ReadRecord
from tests.model.logs.judge import ID, Violation
from tests.model.logs.model import Gateway


def key_of(value: str) -> bytes:
    """The key of a record: one of a few."""
    return b"k%d" % (crc32(value.encode()) % 5)


async def compacted(gateway: Gateway, due: Pass) -> RewriteDone | None:
    """Carry out a pass over a log. Returns its last rewrite, if there is one."""
    state, row, done = PassState(due), due.row, None
    while not state.is_over:
        done = await gateway.logs.rewrites.step(state, row) or done
        row = await gateway.logs.rows.row(row.name)
    return done


class Rewriting:
    """Gateways that rewrite a log, now and then two at once."""

    def __init__(self, name: str, *, alive: Callable[[], list[Gateway]], seed: int) -> None:
        self.name, self.alive = name, alive
        self.random = random.Random(f"rewrites-{seed}")
        self.pause_s = self.random.choice((0.0, 0.05, 0.3))
        """0: this seed has no rewrites."""
        self.done = self.indexed = self.compacted = 0
        rng = random.Random(f"compactions-{seed}")
        self.compacts = bool(self.pause_s) and rng.random() < 0.5
        self.keys = rng.choice((1, 3, 8))
        """How many keys the records have."""
        self.keys_max = rng.choice((1, 2, 100))
        """How many keys a pass remembers."""
        self.ttl_s = 0 if self.compacts else rng.choice((0, 0, 1, 3))
        """How long a part of the records lasts; 0: all last for ever."""
        self.limits: dict[str, int | str] = {
            "cleanup_policy": "compact" if self.compacts else "delete",
            "delete_retention_s": rng.choice((0, 1, 86_400)),
            "max_dirty_percent": rng.choice((0, 50)),
        }

    def record(self, value: str) -> Record:
        """The record that has this value, or that says it in a header if it is a tombstone."""
        rng = random.Random(f"{self.limits}-{value}")
        if not self.compacts:
            return Record(value.encode(), key_of(value), ttl_s=self.ttl_s * (rng.random() < 0.4))
        key = b"key %d" % rng.randrange(self.keys)
        if rng.random() < 0.3:
            return Record(b"", key, ((ID, value),), is_tombstone=True)
        return Record(value.encode(), key)

    async def run(self) -> None:
        """Rewrite until this is cancelled."""
        while self.pause_s:
            await asyncio.sleep(self.random.random() * self.pause_s)
            many = self.random.choice((1, 1, 2))
            work = self.compact if self.compacts and self.random.random() < 0.5 else self.rewrite
            await asyncio.gather(*[work(self.random.choice(self.alive())) for _ in range(many)])

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

    async def compact(self, gateway: Gateway) -> None:
        """Compact the log through a gateway, whether that is due or not."""
        with contextlib.suppress(QuorumLogError, ConnectionResetError):
            row = await gateway.while_it_lives(gateway.logs.rows.row(self.name))
            due = next_pass(row, gateway.logs.rewrites.now_ms() or 1)
            if due is None:
                return
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1)))
            done = await gateway.while_it_lives(compacted(gateway, due))
            self.compacted += done is not None and isinstance(done.log, LogMetadata)

    def chosen(self, row: LogMetadata) -> tuple[LogItem, ...]:
        """Adjacent items that may be rewritten."""
        may = [item for item in row.items if row.names_sealed((item,))]
        if not may:
            return ()
        first = self.random.randrange(len(may))
        return tuple(may[first : first + self.random.choice((1, 2, 3, len(may)))])


async def look_up(
    gateway: Gateway, name: str, whole: Sequence[ReadRecord], has_expired: Callable[[int], bool]
) -> None:
    """Check that a gateway finds by key what it finds without indexes. The log must not change
    meanwhile, but a gateway whose clock is behind may stop returning records that have expired.
    """
    keys = gateway.logs.keys
    for key in sorted({found.record.key or b"none" for found in whole}):
        mine = [found for found in whole if found.record.key == key]
        offsets = [found.offset for found in mine]
        newest = await keys.newest(name, key)
        found = [each.offset for each in newest.records]
        at = whole[0].offset if whole else 0
        if found not in _newest(mine, has_expired):
            raise Violation(f"rule 27e: the newest of {key!r} is at {offsets}, not {found}")
        found = []
        for _ in range(2 * len(whole) + 2):
            page = await keys.page(name, at, key, created_at=None, limit=3, max_bytes=200)
            page = page or await gateway.logs.reader.read(name, at, limit=3)
            found += [each.offset for each in page.records if each.record.key == key]
            at = page.next
        if found != [each for each in offsets if each in found or not has_expired(each)]:
            raise Violation(f"rule 27e: {key!r} is at {offsets}, not {found}")
    if keys.damaged:
        raise Violation("rule 27e: an index that was built is none")


def _newest(mine: Sequence[ReadRecord], has_expired: Callable[[int], bool]) -> list[list[int]]:
    """The offsets that a search for a key's newest record may find. `mine`: the key's records."""
    found: list[list[int]] = []
    for each in reversed(mine):
        found.append([] if each.record.is_tombstone else [each.offset])
        if not has_expired(each.offset):
            return found
    return [*found, []]
