"""Space comes back: on proof, not on absence (rule 18), and by whole segments.

A ledger's entries are given up only when the metadata service says twice, a grace apart, that the
ledger is deleted (a tombstone), or that it is CLOSED and this bookie is no member of it. A row that
is missing without a tombstone is an alarm. Another cluster's database stops everything.

A segment is removed when no part names it. What its records say beside entries (fences, keys, LACs,
limbo) is written again first, so that the index can always be rebuilt from the log. Of a segment
with little left in use, that is moved to the end of the log.
"""

import asyncio
import logging
from collections import Counter
from typing import Final, Protocol

from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import NO_ENTRY, member_name
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.bookie.log import SEGMENT_HEAD, Batch, read_batches
from services.bookie.parts import Part
from services.bookie.store import Store

log = logging.getLogger(__name__)

LIVE_SHARE_MIN: Final = 0.2
"""A segment of which less is in use is compacted (BookKeeper's minor compaction)."""

MOVES_AT_ONCE: Final = 32
"""Parts in flight, so that moving does not crowd out adds (taste)."""


class Rows(Protocol):
    """What is asked of the metadata service."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary."""

    async def cluster_id(self) -> str:
        """Whose rows these are."""

    async def named(self, bookie: str) -> set[int]:
        """Ledgers that name a bookie, in any incarnation. Only saves reads: it proves nothing."""


class MetadataRows:
    """The rows of the metadata service."""

    def __init__(self, client: MetadataClient) -> None:
        """Asks through `client`."""
        self._client = client

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary."""
        return await self._client.read(ledger_id)

    async def cluster_id(self) -> str:
        """Whose rows these are."""
        return await self._client.cluster_id()

    async def named(self, bookie: str) -> set[int]:
        """Ledgers that name a bookie."""
        found: set[int] = set()
        after: int | None = None
        while True:
            rows, after = await self._client.list(bookie=bookie, after=after, limit=1000)
            found.update(row.ledger_id for row in rows)
            if after is None:
                return found


class Collector:
    """Gives up what nobody needs. Invariant: nothing is dropped on a first look."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        cluster_id: str,
        *,
        grace_s: float,
        live_share_min: float = LIVE_SHARE_MIN,
    ) -> None:
        """`grace_s` passes between the two looks."""
        self._live_share_min = live_share_min
        self._store = store
        self._rows = rows
        self._cluster_id = cluster_id
        self._grace_s = grace_s
        self._seen: dict[int, tuple[bool | None, float]] = {}
        """Ledgers that looked needless: whether a stub is to be kept, and since when."""
        self._is_space_due = False

    async def round(self) -> None:
        """Look at every ledger once, and give up segments if something was dropped."""
        if await self._rows.cluster_id() != self._cluster_id:
            log.error("another-cluster", extra={"ours": self._cluster_id})
            return
        named = await self._rows.named(member_name(self._store.me))
        now = asyncio.get_running_loop().time()
        for ledger_id, row in list(self._store.ledgers()):
            keep_stub = None if ledger_id in named else await self._verdict(ledger_id)
            is_stub = row.highest == NO_ENTRY
            if keep_stub is None or (keep_stub and is_stub):
                self._seen.pop(ledger_id, None)
                continue
            looked, since = self._seen.get(ledger_id, (None, now))
            if looked is not keep_stub:
                self._seen[ledger_id] = (keep_stub, now)
            elif now - since >= self._grace_s:
                await self._drop(ledger_id, keep_stub=keep_stub)
                del self._seen[ledger_id]
        if self._is_space_due:
            self._is_space_due = False
            await self.free_segments()

    async def _drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Give up a ledger's entries, if they are needless still. A repair names this bookie
        before its first byte (rule 20), so one that comes after this look is not answered until
        the entries are gone.
        """
        self._store.leave(ledger_id, leaving=True)
        try:
            if await self._verdict(ledger_id) is keep_stub:
                self._store.drop(ledger_id, keep_stub=keep_stub)
                self._is_space_due = True
                log.info("ledger-dropped", extra={"ledger": ledger_id, "stub": keep_stub})
        finally:
            self._store.leave(ledger_id, leaving=False)

    async def _verdict(self, ledger_id: int) -> bool | None:
        """None: keep it. False: it is deleted. True: give up the entries, keep the stub."""
        status, row = await self._rows.read(ledger_id)
        if status is CasStatus.MISSING:
            return False
        if status is not CasStatus.OK or row is None:
            return None  # unknown, or lost without a tombstone: no proof
        names = {member_name(member) for member in row.all_members}
        if row.state is State.CLOSED and member_name(self._store.me) not in names:
            return True
        return None

    async def free_segments(self) -> None:
        """Remove segments that nothing names, and compact those of which little is left."""
        store = self._store
        await store.checkpoint()
        position = store.index.checkpoint()
        used = await asyncio.to_thread(self._used_bytes)
        for number in store.segments.numbers():
            if position is None or number >= position.segment:
                break
            size = store.segments.path(number).stat().st_size
            if used[number] <= size * self._live_share_min:
                await self._give_up(number)

    async def _give_up(self, number: int) -> None:
        store = self._store
        parts = await asyncio.to_thread(self._parts_of, number)
        for start in range(0, len(parts), MOVES_AT_ONCE):
            some = parts[start : start + MOVES_AT_ONCE]
            if not all(await asyncio.gather(*[store.move(*item) for item in some])):
                log.error("segment-kept", extra={"segment": number, "reason": "damaged"})
                return
        spoken_of = await asyncio.to_thread(self._ledgers_of, number)
        known = [ledger_id for ledger_id in spoken_of if store.row(ledger_id) is not None]
        await asyncio.gather(*map(store.repeat, known))
        # The index must not name the segment any more before it goes.
        await store.checkpoint()
        if await asyncio.to_thread(self._parts_of, number) or store.is_named(number):
            log.error("segment-kept", extra={"segment": number})
            return
        await asyncio.to_thread(store.segments.remove, number)
        store.counters["removed_segments"] += 1
        log.info("segment-removed", extra={"segment": number, "moved_parts": len(parts)})

    def _used_bytes(self) -> Counter[int]:
        """What the index names of each segment; in a thread."""
        used: Counter[int] = Counter()
        for _, part in self._store.index.all_parts():
            used[part.segment] += part.size
        return used

    def _parts_of(self, number: int) -> list[tuple[int, Part]]:
        """The index's parts that lie in a segment; in a thread."""
        return [item for item in self._store.index.all_parts() if item[1].segment == number]

    def _ledgers_of(self, number: int) -> set[int]:
        """The ledgers that a segment speaks of; in a thread."""
        segments = self._store.segments
        head = segments.head(number)
        data = segments.read_from(number, SEGMENT_HEAD.size)
        found: set[int] = set()
        for batch in read_batches(head, data, SEGMENT_HEAD.size):
            if isinstance(batch, Batch):
                found |= {record.ledger_id for record in batch.records}
        return found
