"""Dropping ledgers, and rewriting records so that segments can go (see collect.py, space.py)."""

from collections import Counter
from collections.abc import Sequence

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.record import Run
from services.bookie.holdings import LedgerTable
from services.bookie.ledger import StoredLedger
from services.bookie.parts import Part
from services.bookie.pending import PendingWrites
from services.bookie.reads import Reads
from services.bookie.records import packed


class Moves:
    """Drops ledgers, and rewrites parts and ledger states at the end of the log."""

    def __init__(
        self, holdings: LedgerTable, pending: PendingWrites, reads: Reads, counters: Counter[str]
    ) -> None:
        """Used on the event loop's thread."""
        self._holdings = holdings
        self._pending = pending
        self._reads = reads
        self._counters = counters

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Drop the entries of a ledger. With a stub its fence stays (rule 16); without one only the
        id stays: the metadata has a tombstone (rules 16a, 17 and 18).
        """
        ledger = self._holdings.ledger(ledger_id)
        verdict = ledger.replica.drop() if keep_stub else ledger.replica.delete()
        self._pending.submit(ledger, verdict)
        self._counters["dropped_ledgers"] += 1

    def forget_copies(self, ledger_id: int) -> None:
        """Forget superseded copies of a ledger's row: the database contains the changes of all that are held."""
        self._holdings.ledger(ledger_id).replica.forget_copies()

    async def move(self, parts: list[tuple[int, Part]]) -> list[bool]:
        """Rewrite parts at the end of the log, in this order; on disk when it returns. False for
        parts that are unreadable.
        """
        ledger_of = self._holdings.ledger
        # Some hundred parts of a few entries each: one read in a thread for all of them.
        read = await self._reads.fetch_each([(ledger_of(item), part) for item, part in parts])
        bodies = {id(part): body for part, body in read}
        moved: set[StoredLedger] = set()
        for ledger_id, part in parts:
            ledger, body = ledger_of(ledger_id), bodies.get(id(part))
            # The part may have been replaced or dropped during the read.
            if body is None or not ledger.holds(part):
                continue
            run = Run(bytes(body)).where(part.has)
            if run is not None:
                self._pending.submit(ledger, ledger.replica.moved(run))
                moved.add(ledger)
        for ledger in moved:
            await self._pending.wait_synced(ledger)
        return [
            id(part) in bodies or not ledger_of(ledger_id).holds(part) for ledger_id, part in parts
        ]

    async def rewrite_state(self, ledger_id: int) -> None:
        """Rewrite a ledger's state (key, fence, LAC, limbo); on disk when it returns."""
        ledger = self._holdings.ledger(ledger_id)
        if ledger.highest == NO_ENTRY and ledger.replica.is_fenced:
            # Probably a stub: dropped copies must stay dropped.
            self._pending.submit(ledger, ledger.replica.drop())
        self._pending.submit(ledger, ledger.replica.repeated())
        await self._pending.wait_synced(ledger)

    async def rewrite_deleted(self, ledger_ids: Sequence[int]) -> None:
        """Rewrite deletions that the index knows as one record (rule 16a); on disk at return."""
        await self._pending.write(packed(ledger_ids))
