"""The write handles of this process, and what becomes of a ledger whose handle has ended."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from quorumlog import errors
from quorumlog.net.budget import Budget
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import LacPort, Ports
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.spread import spread
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, Lineage, State, Writer
from quorumlog.wire.repair_bodies import RepairAdd
from services.gateway.engine.ends import Ends
from services.gateway.engine.handle import InFlightBytes, WriteHandle
from services.gateway.engine.keys import Gatekeeper
from services.gateway.engine.rows import LedgerRows, Rereads, is_closed
from services.gateway.engine.tails import RecentRuns
from services.gateway.interface import EngineConfig

log = logging.getLogger(__name__)

_CLOSE_S: Final = 30.0
_RETRY_S: Final = 1.0
_CLOSES_AT_ONCE: Final = 64
_CLOSED_KEPT: Final = 10_000
"""How many closed ledgers are remembered, to answer repeated closes."""


class Handles:
    """The ledgers that this process writes.

    Invariants: a handle is created once, for a ledger that this process created (rule 11); a place
    of `places` is taken for each handle until it has closed or failed.
    """

    def __init__(
        self,
        writer: Writer,
        config: EngineConfig,
        *,
        rows: LedgerRows,
        ends: Ends,
        metadata: MetadataClient,
        ports: Ports,
        lacs: LacPort,
    ) -> None:
        """`writer` is this process."""
        self.writer = writer
        self.rows, self.ends, self.ports = rows, ends, ports
        self._config, self._lacs = config, lacs
        self.gatekeeper = Gatekeeper(self.access_row)
        self._repairs = RepairClient(metadata, writer.id)
        self.by_ledger: dict[int, WriteHandle] = {}
        self.closed_here: dict[int, int] = {}
        """Ledgers written and closed here, with the last acknowledged entry."""
        self.in_flight = InFlightBytes(config.gateway_in_flight_bytes_max)
        self.recent = RecentRuns()
        self.places = Budget(
            "open ledgers",
            "OPEN_LEDGERS_MAX",
            config.open_ledgers_max,
            config.peer_open_ledgers_max,
        )
        self._opened_by: dict[int, str] = {}
        """The peer that had each open ledger created here."""
        self.rereads = Rereads(
            lambda: [handle.ledger_id for handle in self.live], metadata.heads, self._apply_head
        )
        """The rows of this process's write handles."""

    def get(self, ledger_id: int) -> WriteHandle:
        """The ledger's handle. Raises: WriterLost."""
        handle = self.by_ledger.get(ledger_id)
        if handle is None:
            raise errors.WriterLost(
                "this process has no write handle", ledger_id=ledger_id, outcome=errors.NOT_DONE
            )
        return handle

    def open(self, row: LedgerMetadata, peer: str) -> None:
        """Become the writer of a ledger that `peer` had created here and took a place for."""
        self._opened_by[row.ledger_id] = peer
        self.by_ledger[row.ledger_id] = WriteHandle(
            row,
            self.ports,
            self,
            lacs=self._lacs,
            ledger_limit_bytes=self._config.ledger_in_flight_bytes_max,
            gateway_in_flight=self.in_flight,
            recent=self.recent,
            delays_change=self._config.delays_ensemble_change,
        )
        if row.log is None:
            # Nobody waits: the first append brings a copy too (rule 18b).
            _ = spread(row, self.ports)

    def place_in_log(
        self, ledger_id: int, first_offset: int, lineage: Lineage | None = None
    ) -> None:
        """A log's row names a ledger with its first offset. If this process writes it, the members' copies
        of its row say so. There is no copy before: one that says more, of the same name, would not replace
        it (rule 18f). Later rows of the log tell nothing new of the place.
        """
        handle = self.by_ledger.get(ledger_id)
        if handle is not None and handle.is_live and handle.row.first_offset is None:
            handle.place_in_log(first_offset, lineage)
            _ = spread(handle.row, self.ports)

    @property
    def live(self) -> Sequence[WriteHandle]:
        """The handles that still write."""
        return [handle for handle in self.by_ledger.values() if handle.is_live]

    def access_row(self, ledger_id: int) -> LedgerMetadata | None:
        """The newest known row of a ledger that is written here."""
        handle = self.by_ledger.get(ledger_id)
        return None if handle is None else handle.access_row

    def has_password(self, ledger_id: int) -> bool:
        """Whether a ledger is written here with a password."""
        handle = self.by_ledger.get(ledger_id)
        return handle is not None and handle.is_live and bool(handle.row.access_key)

    def with_password(self) -> Sequence[int]:
        """The ledgers that are written here with a password."""
        return [ledger_id for ledger_id in self.by_ledger if self.has_password(ledger_id)]

    def writer_of(self, row: LedgerMetadata) -> Writer:
        """The writer to forward to. Raises: LedgerClosed, LedgerFenced, WriterLost."""
        if is_closed(row):
            raise errors.LedgerClosed(
                f"it ends at {row.last_entry}", ledger_id=row.ledger_id, last_entry=row.last_entry
            )
        if row.state is State.IN_RECOVERY:
            raise errors.LedgerFenced("it is being recovered", ledger_id=row.ledger_id)
        if row.writer is None or row.writer.id == self.writer.id:
            raise errors.WriterLost(
                "no write handle", ledger_id=row.ledger_id, outcome=errors.NOT_DONE
            )
        return row.writer

    async def prefer_ledger_state(
        self, error: errors.QuorumLogError, ledger_id: int
    ) -> errors.QuorumLogError:
        """The ledger's closed or fenced state, read from the primary, if it has one by now."""
        try:
            self.writer_of(await self.ends.told(await self.rows.fresh(ledger_id)))
        except (errors.LedgerClosed, errors.LedgerFenced, errors.NoSuchLedger) as ended:
            return ended.with_outcome(error.outcome)
        except errors.QuorumLogError:
            pass
        return error.replace(ledger_id=ledger_id)

    async def close(self, row: LedgerMetadata) -> tuple[LedgerMetadata, int]:
        """Close a ledger that was written here, or answer how it ended; and how many bookies confirmed a copy of the end.

        Raises: LedgerClosed, LedgerFenced, WriterLost, MetadataUnavailable.
        """
        ledger_id = row.ledger_id
        handle = self.by_ledger.get(ledger_id)
        if is_closed(row):
            last = self.closed_here.get(ledger_id) if handle is None else handle.last_add_confirmed
            if last is not None and last != row.last_entry:
                row = await self.ends.told(row)
                raise errors.LedgerClosed(
                    f"somebody else closed it at {row.last_entry}, not at {last}",
                    ledger_id=ledger_id,
                    last_entry=row.last_entry,
                )
            return row, await spread(row, self.ports)  # the first answer may have got lost
        try:
            async with asyncio.timeout(_CLOSE_S):
                handle = self.get(ledger_id)
                return await handle.close(), handle.copies
        except TimeoutError as error:
            raise errors.MetadataUnavailable(
                "the close is not settled yet", ledger_id=ledger_id, outcome=errors.UNKNOWN
            ) from error

    async def drain(self) -> None:
        """Settle what is in flight, and close the ledgers of this process."""
        room = asyncio.Semaphore(_CLOSES_AT_ONCE)

        async def close(handle: WriteHandle) -> None:
            async with room:
                with contextlib.suppress(errors.QuorumLogError):
                    await handle.close()

        handles = self.live
        log.info("draining", extra={"ledgers": len(handles)})
        await asyncio.gather(*[close(handle) for handle in handles])

    def abandon(self) -> None:
        """The process ends: pending appends have an unknown outcome."""
        for handle in list(self.by_ledger.values()):
            handle.abandon()

    # What handles report.

    def handle_closed(self, handle: WriteHandle, row: LedgerMetadata) -> None:
        """The ledger is CLOSED: its row is the answer from now on."""
        self._give_place(handle.ledger_id)
        self.rows.put(row)
        if handle.failure_code is None:
            self._queue_missed(handle)
        self.by_ledger.pop(handle.ledger_id, None)
        self.closed_here[handle.ledger_id] = handle.last_add_confirmed
        if len(self.closed_here) > _CLOSED_KEPT:
            del self.closed_here[next(iter(self.closed_here))]

    def handle_failed(self, handle: WriteHandle) -> None:
        """The handle has failed. It stays, so that callers learn why, until the ledger is known to be
        CLOSED or deleted: then the row tells more, and a handle for each failure is kept nowhere.
        """
        self._give_place(handle.ledger_id)
        code = handle.end_code
        log.warning("handle-failed", extra={"ledger": handle.ledger_id, "code": code})
        if code in (errors.LedgerFenced.code, errors.LedgerClosed.code):
            self._queue_missed(handle)
        if code in (errors.LedgerFenced.code, errors.LedgerClosed.code, errors.QuorumLogError.code):
            # Nobody else recovers it, since its writer's process lives. A ledger without a handle
            # must end. Of one that has ended, only the row is read.
            self.ends.start_recovery(handle.ledger_id)
        if code == errors.NoSuchLedger.code:
            self.rows.deleted(handle.ledger_id)
        else:
            self.row_changed(handle.ledger_id)  # the news may have come before the failure

    def recovery_wanted(self, handle: WriteHandle) -> None:
        """The writer met a recovery of its ledger: run one (rule 10)."""
        self.ends.start_recovery(handle.ledger_id)

    def _give_place(self, ledger_id: int) -> None:
        """A ledger is not written here any more."""
        peer = self._opened_by.pop(ledger_id, None)
        if peer is not None:
            self.places.give(peer)

    def _queue_missed(self, handle: WriteHandle) -> None:
        """Queue missed entries, which only this writer knows, after somebody else's close."""
        missed = handle.machine.missed
        if missed:
            self.ports.tasks.start(queue_missed(self._repairs, handle.ledger_id, missed))

    # What is heard of rows.

    def row_changed(self, ledger_id: int) -> None:
        """The cached row of a ledger changed: its handle may be over."""
        handle, row = self.by_ledger.get(ledger_id), self.rows.cached(ledger_id)
        if handle is not None and row is not None:
            handle.learn_row(row)
        if handle is not None and row is not None and is_closed(row):
            handle.closed_by_other(row)
        elif handle is not None and not handle.is_live and self.rows.is_deleted(ledger_id):
            # A live handle ends by the primary's row (`ledger_ended`).
            del self.by_ledger[ledger_id]

    def ledger_ended(self, ledger_id: int) -> None:
        """A change says that a ledger is not OPEN any more. If this process writes it, somebody
        else ended it, and its handle must end now, not at the next append. A notification proves
        nothing, so the row is read.
        """
        handle = self.by_ledger.get(ledger_id)
        if handle is not None and handle.is_live and not handle.machine.is_closing_row:
            self.rereads.want(ledger_id)

    def _apply_head(self, head: LedgerHead) -> None:
        """Apply the primary's row of a ledger that is written here."""
        handle = self.by_ledger.get(head.ledger_id)
        if handle is None:
            return
        if head.state is None:
            self.rows.deleted(head.ledger_id)
        handle.learn(head)
        if head.state is None:
            self.by_ledger.pop(head.ledger_id, None)


async def queue_missed(
    repairs: RepairClient, ledger_id: int, missed: Iterable[MissedRange]
) -> None:
    """Add missed entries that only a writer knows to the repair queue, once metadata is available (rule 8).

    A writer normally queues missed entries with its own changes of the row. A recovery writes back
    entries above the LAC that it found, and knows nothing of an older entry that reached only an ack
    quorum. Without this only the next check of all copies would find that entry, a day later. Repair checks before it
    copies, so a range that is queued twice, or repaired since, costs only a check.
    """
    ranges = defaultdict(list)
    for item in missed:
        ranges[item.member].append((item.first, item.last))
    items = [
        RepairAdd(ledger_id=ledger_id, member=member, ranges=tuple(found))
        for member, found in ranges.items()
    ]
    while True:
        try:
            await repairs.add(items)
        except errors.MetadataUnavailable:
            await asyncio.sleep(_RETRY_S)
        except errors.QuorumLogError as error:
            log.warning("missed-not-queued", extra={"ledger": ledger_id, "error": repr(error)})
            return
        else:
            return
