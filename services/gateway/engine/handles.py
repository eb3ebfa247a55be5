"""The write handles of this process, and the recovery of ledgers whose handles have failed."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from quorumlog import errors
from quorumlog.net.budget import Budget
from quorumlog.net.driver import spread
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import LacPort, Ports
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, Lineage, State, Writer
from quorumlog.wire.repair_bodies import repairs_of
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
NOT_THE_WRITER: Final = "this gateway does not write the ledger: recover the ledger to close it"
_CLOSED_KEPT: Final = 10_000
"""Maximum number of closed ledgers that are remembered to answer retries of a close."""


class Handles:
    """The write handles of the ledgers that this process writes.

    Invariants: each ledger gets at most one handle, in the process that created the ledger (rule
    11). Each handle counts against the budget `places` until the handle has closed or failed.
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
        """`writer` identifies this process in the metadata of its ledgers."""
        self.writer = writer
        self.rows, self.ends, self.ports = rows, ends, ports
        self._config, self._lacs = config, lacs
        self.gatekeeper = Gatekeeper(self.access_row)
        self._repairs = RepairClient(metadata, writer.id)
        self.by_ledger: dict[int, WriteHandle] = {}
        self.closed_here: dict[int, int] = {}
        """The last acknowledged entry of each recent ledger that this process wrote and closed."""
        self.in_flight = InFlightBytes(config.gateway_in_flight_bytes_max)
        self.recent = RecentRuns()
        self.places = Budget(
            "open ledgers",
            "OPEN_LEDGERS_MAX",
            config.open_ledgers_max,
            config.peer_open_ledgers_max,
        )
        self._opened_by: dict[int, str] = {}
        """The client address that created each open ledger, by ledger id."""
        self.rereads = Rereads(
            lambda: [handle.ledger_id for handle in self.live], metadata.heads, self._apply_head
        )
        """Rereads the metadata of live handles after a gap in the stream of changes (rule 16a)."""

    def get(self, ledger_id: int) -> WriteHandle:
        """Returns the ledger's write handle. Raises: WriterLost."""
        handle = self.by_ledger.get(ledger_id)
        if handle is None:
            raise errors.WriterLost(NOT_THE_WRITER, ledger_id=ledger_id, outcome=errors.NOT_DONE)
        return handle

    def open(self, row: LedgerMetadata, peer: str) -> None:
        """Opens a write handle for a ledger that the client `peer` just created here."""
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
            # Not awaited, because the first append sends a copy too (rule 18b).
            _ = spread(row, self.ports)

    def place_in_log(
        self, ledger_id: int, first_offset: int, lineage: Lineage | None = None
    ) -> None:
        """Sends copies of a ledger's metadata, once a log's metadata names the ledger and its first
        offset. No copy is sent earlier: if a bookie had a copy without the offset, it would ignore
        a copy of the same version with the offset (rule 18f). Does nothing if called again, or if
        another process writes the ledger.
        """
        handle = self.by_ledger.get(ledger_id)
        if handle is not None and handle.is_live and handle.row.first_offset is None:
            handle.place_in_log(first_offset, lineage)
            _ = spread(handle.row, self.ports)

    @property
    def live(self) -> Sequence[WriteHandle]:
        """The handles that have neither failed nor closed."""
        return [handle for handle in self.by_ledger.values() if handle.is_live]

    def access_row(self, ledger_id: int) -> LedgerMetadata | None:
        """The newest known metadata of a ledger that this process writes, or None."""
        handle = self.by_ledger.get(ledger_id)
        return None if handle is None else handle.access_row

    def has_password(self, ledger_id: int) -> bool:
        """Whether this process writes the ledger, and the ledger has a password."""
        handle = self.by_ledger.get(ledger_id)
        return handle is not None and handle.is_live and bool(handle.row.access_key)

    def with_password(self) -> Sequence[int]:
        """Ids of the password-protected ledgers that this process writes."""
        return [ledger_id for ledger_id in self.by_ledger if self.has_password(ledger_id)]

    def writer_of(self, row: LedgerMetadata) -> Writer:
        """Returns the writer in another gateway. Raises: LedgerClosed, LedgerFenced, WriterLost."""
        if is_closed(row):
            raise errors.LedgerClosed(
                f"the ledger is closed at entry {row.last_entry}: append to a new ledger",
                ledger_id=row.ledger_id,
                last_entry=row.last_entry,
            )
        if row.state is State.IN_RECOVERY:
            detail = "the ledger is being recovered: append to a new ledger instead"
            raise errors.LedgerFenced(detail, ledger_id=row.ledger_id)
        if row.writer is None or row.writer.id == self.writer.id:
            raise errors.WriterLost(
                NOT_THE_WRITER, ledger_id=row.ledger_id, outcome=errors.NOT_DONE
            )
        return row.writer

    async def prefer_ledger_state(
        self, error: errors.QuorumLogError, ledger_id: int
    ) -> errors.QuorumLogError:
        """Returns LedgerClosed, LedgerFenced or NoSuchLedger if one applies; otherwise `error`."""
        try:
            self.writer_of(await self.ends.reported(await self.rows.fresh(ledger_id)))
        except (errors.LedgerClosed, errors.LedgerFenced, errors.NoSuchLedger) as ended:
            return ended.with_outcome(error.outcome)
        except errors.QuorumLogError:
            pass
        return error.replace(ledger_id=ledger_id)

    async def close(self, row: LedgerMetadata) -> tuple[LedgerMetadata, int]:
        """Closes a ledger that this process writes, or answers a retry of its close. Returns the
        metadata, and the number of bookies that confirmed a copy of it.

        Raises: LedgerClosed, LedgerFenced, WriterLost, MetadataUnavailable.
        """
        ledger_id = row.ledger_id
        handle = self.by_ledger.get(ledger_id)
        if is_closed(row):
            last = self.closed_here.get(ledger_id) if handle is None else handle.last_add_confirmed
            if last is not None and last != row.last_entry:
                row = await self.ends.reported(row)
                raise errors.LedgerClosed(
                    f"another process closed the ledger: its end is {row.last_entry}, not {last}",
                    ledger_id=ledger_id,
                    last_entry=row.last_entry,
                )
            return row, await spread(row, self.ports)  # a retry after the first answer was lost
        try:
            async with asyncio.timeout(_CLOSE_S):
                handle = self.get(ledger_id)
                return await handle.close(), handle.copies
        except TimeoutError as error:
            raise errors.MetadataUnavailable(
                "the close is still in progress: retry", ledger_id=ledger_id, outcome=errors.UNKNOWN
            ) from error

    async def drain(self) -> None:
        """Waits for appends in flight, and closes the ledgers of this process."""
        room = asyncio.Semaphore(_CLOSES_AT_ONCE)

        async def close(handle: WriteHandle) -> None:
            async with room:
                with contextlib.suppress(errors.QuorumLogError):
                    await handle.close()

        handles = self.live
        log.info("draining", extra={"ledgers": len(handles)})
        await asyncio.gather(*[close(handle) for handle in handles])

    def abandon(self) -> None:
        """Ends all handles when the process ends. Pending appends have an unknown outcome."""
        for handle in list(self.by_ledger.values()):
            handle.abandon()

    # Callbacks of handles.

    def handle_closed(self, handle: WriteHandle, row: LedgerMetadata) -> None:
        """Removes the handle of a CLOSED ledger. Later requests are answered from the metadata."""
        self._give_place(handle.ledger_id)
        self.rows.put(row)
        if handle.failure_code is None:
            self._queue_missed(handle)
        self.by_ledger.pop(handle.ledger_id, None)
        self.closed_here[handle.ledger_id] = handle.last_add_confirmed
        if len(self.closed_here) > _CLOSED_KEPT:
            del self.closed_here[next(iter(self.closed_here))]

    def handle_failed(self, handle: WriteHandle) -> None:
        """Recovers the ledger of a failed handle, unless the ledger was deleted. The handle stays
        until the ledger is known to be CLOSED or deleted, so that callers get the error.
        """
        self._give_place(handle.ledger_id)
        code = handle.end_code
        log.warning("handle-failed", extra={"ledger": handle.ledger_id, "code": code})
        if code in (errors.LedgerFenced.code, errors.LedgerClosed.code):
            self._queue_missed(handle)
        if code in (errors.LedgerFenced.code, errors.LedgerClosed.code, errors.QuorumLogError.code):
            # A ledger without a live handle must end, and no other process recovers the ledger
            # while the writer's process lives. For an ended ledger, this only reads the metadata.
            self.ends.start_recovery(handle.ledger_id)
        if code == errors.NoSuchLedger.code:
            self.rows.deleted(handle.ledger_id)
        else:
            self.row_changed(handle.ledger_id)  # the change may have been seen before the failure

    def recovery_wanted(self, handle: WriteHandle) -> None:
        """Starts a recovery because another process is recovering the ledger (rule 10)."""
        self.ends.start_recovery(handle.ledger_id)

    def _give_place(self, ledger_id: int) -> None:
        """Releases a ledger's share of the budget `places` when its handle has ended."""
        peer = self._opened_by.pop(ledger_id, None)
        if peer is not None:
            self.places.give(peer)

    def _queue_missed(self, handle: WriteHandle) -> None:
        """Queues repairs of entries that bookies missed. Only this process has the list."""
        missed = handle.machine.missed
        if missed:
            self.ports.tasks.start(queue_missed(self._repairs, handle.ledger_id, missed))

    # Notifications of changed metadata.

    def row_changed(self, ledger_id: int) -> None:
        """Passes changed metadata to the ledger's handle. Removes the handle of an ended ledger."""
        handle, row = self.by_ledger.get(ledger_id), self.rows.cached(ledger_id)
        if handle is not None and row is not None:
            handle.learn_row(row)
        if handle is not None and row is not None and is_closed(row):
            handle.closed_by_other(row)
        elif handle is not None and not handle.is_live and self.rows.is_deleted(ledger_id):
            # A live handle ends only by metadata from the primary (`ledger_ended`).
            del self.by_ledger[ledger_id]

    def ledger_ended(self, ledger_id: int) -> None:
        """Handles a notification that a ledger is no longer OPEN. If this process writes the
        ledger, another process has ended the ledger, and the handle must end before the next
        append. A notification proves nothing, so the metadata is read first.
        """
        handle = self.by_ledger.get(ledger_id)
        if handle is not None and handle.is_live and not handle.machine.is_closing_row:
            self.rereads.want(ledger_id)

    def _apply_head(self, head: LedgerHead) -> None:
        """Applies the primary's metadata to the ledger's handle."""
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
    """Adds ranges of entries that bookies missed to the repair queue (rule 8); retries until the
    metadata service is available.

    Normally a writer queues these ranges with its own changes of the metadata. After another
    process's recovery, the writer can't change the metadata. The recovery doesn't find missing
    copies of entries up to the LAC. Only this function and the daily check of all copies repair
    them. A range that is queued twice, or repaired already, costs only a check.
    """
    items = repairs_of(ledger_id, ((gap.member, gap.first, gap.last) for gap in missed))
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
