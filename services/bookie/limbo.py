"""Handles ledgers in limbo (BP-46): a new incarnation may lack some of their entries.

Phase one runs before the bookie serves: it durably marks each ledger that metadata places at an
older incarnation. From then on the bookie serves the stored entries of these ledgers and denies no
entry. Phase one also fences the ledgers that are in recovery or CLOSED. An OPEN ledger needs no
fence. A recovery changes the metadata before it fences, so a ledger that is still OPEN was never
fenced. Its writer may continue with the new incarnation (rule 15).

Phase two runs while the bookie serves. The bookie requests repairs. Autorecovery then copies
missing entries, and replaces the old incarnation by the new one in the metadata. (Only autorecovery
may check authentication codes, by rule 30.) The bookie ends a ledger's limbo when no fragment names
an older incarnation and the index has all entries that metadata places here.

Metadata may name an older incarnation after phase one, or after the ledger's limbo, if a change for
the older member completes late. These ledgers need no mark, since the bookie denies no entry and
accepts no normal add as the older member (rule 15, ADR 7). A repair replaces the older member only
after all entries were read back (rule 20a). So counting the indexed entries suffices to end limbo:
copies were read back, and the new member itself acknowledged later adds.

Both phases resume after a crash, because the file `limbo` in the directory marks unfinished work.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Final

from quorumlog.errors import MetadataUnavailable, QuorumLogError
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.protocol import limbo
from quorumlog.protocol.ids import ID_MAX, member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import Ranges
from quorumlog.wire.repair_bodies import RepairAdd
from services.bookie.bodies import LimboProgress
from services.bookie.segments import sync_directory, write_durably
from services.bookie.store import Store

log = logging.getLogger(__name__)

_PAGE: Final = 1000
_MARK_NAME: Final = "limbo"
_CHECK_ENTRIES: Final = 10_000
"""Number of entries checked in one step; between steps the event loop runs other tasks."""
_REST_FACTOR: Final = 10
"""Ratio of the pause after a round to the round's duration. A round reads all metadata that names
this bookie."""
_RANGES_MAX: Final = 1000
_REQUEUE_S: Final = 600.0
"""Time until a ledger still in limbo is queued again. The time is long, because a repair may take
long, and queueing a ledger again takes it away from the worker that repairs it."""


@contextlib.contextmanager
def logged(what: str, **members: object) -> Iterator[None]:
    """Log a block's error instead of raising it, so that a failed round does not end the loop."""
    try:
        yield
    except QuorumLogError as error:
        log.warning("%s-put-off", what, extra={**members, "why": error.detail})
    except Exception:
        log.exception("%s-failed", what, extra=members)


class Limbo:
    """Marks ledgers that may have lost entries, and requests repairs of these ledgers.

    Invariants (I27): a ledger leaves limbo only when no fragment names an older incarnation of this
    bookie and the index has every entry that the ledger's closed fragments place here. The mark in
    the directory exists whenever a ledger is in limbo.
    """

    def __init__(self, store: Store, metadata: MetadataClient, *, rest_s: float) -> None:
        """`rest_s`: the minimum pause between two rounds of phase two."""
        self._store = store
        self._metadata = metadata
        self._repairs = RepairClient(metadata, member_name(store.me))
        self._rest_s = rest_s
        self._queued_at: dict[tuple[int, bool], float] = {}
        self._mark_file = store.directory / _MARK_NAME
        self.progress = LimboProgress()

    async def enter(self) -> None:
        """Durably mark every ledger that is placed at an older incarnation.

        Raises: MetadataUnavailable.
        """
        store, me = self._store, self._store.me
        write_durably(self._mark_file, me.encode())
        count = 0
        async for rows in self._placed_here():
            lost = [row for row in rows if limbo.older_members(row, me)]
            await asyncio.gather(
                *(
                    store.enter_limbo(
                        row.ledger_id, row.ledger_key, is_fenced=row.state is not State.OPEN
                    )
                    for row in lost
                )
            )
            count += len(lost)
            await store.checkpoint()
            store.holdings.evict_idle()
        self.progress.ledgers = count
        log.warning("limbo-entered", extra={"member": me, "ledgers": count})

    async def _placed_here(self) -> AsyncIterator[list[LedgerMetadata]]:
        """The metadata of all ledgers that name this bookie in any incarnation, page by page."""
        name, after = member_name(self._store.me), None
        while True:
            rows, after = await self._metadata.list(bookie=name, after=after, limit=_PAGE)
            yield rows
            if after is None:
                return

    async def run(self) -> None:
        """Run rounds until no ledger is in limbo."""
        clock = asyncio.get_running_loop().time
        while self._mark_file.exists():
            begun = clock()
            # If the round fails, ledgers stay in limbo, and the next round retries.
            with logged("limbo"):
                await self.round()
            if self._mark_file.exists():
                await asyncio.sleep(max(self._rest_s, _REST_FACTOR * (clock() - begun)))

    async def round(self) -> None:
        """Queue due repairs for each ledger in limbo, or try to end the ledger's limbo."""
        left = {ledger_id async for ledger_id in self._in_limbo()}
        before, self.progress.ledgers = self.progress.ledgers, len(left)
        waiting: set[int] = set()
        async for rows in self._placed_here():
            lost = [
                row
                for row in rows
                if row.ledger_id in left and limbo.older_members(row, self._store.me)
            ]
            await self._queue_repairs(lost)
            waiting.update(row.ledger_id for row in lost)
        for ledger_id in sorted(left - waiting):
            await self._try_to_leave(ledger_id)
        if self.progress.ledgers == 0:
            self._mark_file.unlink(missing_ok=True)
            sync_directory(self._store.directory)
            log.info("limbo-ended", extra={"member": self._store.me})
        elif self.progress.ledgers != before:
            log.info("limbo", extra={"ledgers": self.progress.ledgers})

    async def _in_limbo(self) -> AsyncIterator[int]:
        for number, (ledger_id, row) in enumerate(self._store.holdings.ledgers()):
            if row.is_limbo:
                yield ledger_id
            if number % _PAGE == _PAGE - 1:
                await asyncio.sleep(0)

    async def _queue_repairs(self, rows: list[LedgerMetadata]) -> None:
        """Queue repairs, if due, of entries that metadata still places at older incarnations."""
        due = [row for row in rows if self._is_due((row.ledger_id, False))]
        items = [
            RepairAdd(
                ledger_id=row.ledger_id, member=member, ranges=tuple(limbo.places(row, member))
            )
            for row in due
            for member in limbo.older_members(row, self._store.me)
        ]
        if items:
            await self._repairs.add(items)
        self._note_queued([(row.ledger_id, False) for row in due])

    def _is_due(self, key: tuple[int, bool]) -> bool:
        """Whether a repair is due. `key`: ledger id, and whether to repair this incarnation."""
        now = asyncio.get_running_loop().time()
        return now - self._queued_at.get(key, float("-inf")) >= _REQUEUE_S

    def _note_queued(self, keys: list[tuple[int, bool]]) -> None:
        """Record that these repairs were queued now."""
        now = asyncio.get_running_loop().time()
        self._queued_at.update(dict.fromkeys(keys, now))

    async def _try_to_leave(self, ledger_id: int) -> None:
        """End a ledger's limbo if no expected entry is missing; else queue repairs."""
        checked = 0
        missing: Ranges = ()
        # Later denials depend on this metadata, so it must have the changes that this bookie has
        # proof of (rules 18a, 18c).
        held = {ledger_id: self._store.ledger(ledger_id).row_names}
        holder = member_name(self._store.me)
        try:
            proof = (await self._metadata.proofs(held, holder)).get(ledger_id)
        except MetadataUnavailable:
            return
        if proof is None:
            return
        if not proof.deleted:  # a ledger with a tombstone has no readers
            row = proof.row
            if row is None or limbo.older_members(row, self._store.me):
                return
            checked, missing = await self._missing_entries(row)
        if not missing:
            for is_own in (False, True):
                self._queued_at.pop((ledger_id, is_own), None)
            await self._store.leave_limbo(ledger_id)
            self.progress.ledgers -= 1
            self.progress.cleared += 1
            self.progress.checked_entries += checked
            return
        if self._is_due((ledger_id, True)):
            item = RepairAdd(ledger_id=ledger_id, member=self._store.me, ranges=missing)
            await self._repairs.add([item])
            self._note_queued([(ledger_id, True)])
            count = sum(last - first + 1 for first, last in missing)
            self.progress.missing_entries += count
            log.warning("limbo-incomplete", extra={"ledger": ledger_id, "missing": count})

    async def _missing_entries(self, row: LedgerMetadata) -> tuple[int, Ranges]:
        """The number of entries that metadata places here, and the first missing ranges."""
        checked = 0
        missing: list[tuple[int, int]] = []
        for position, first, last in limbo.expected(row, self._store.me):
            for low in range(first, last + 1, _CHECK_ENTRIES):
                high = min(last, low + _CHECK_ENTRIES - 1)
                held = await self._store.holdings.ranges(row.ledger_id, low, high, ID_MAX)
                missing += limbo.lacking(row, position, low, high, held)
                checked += limbo.share(row, position, low, high)
                if len(missing) >= _RANGES_MAX:
                    return checked, tuple(missing[:_RANGES_MAX])
        return checked, tuple(missing)
