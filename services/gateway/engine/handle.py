"""The write handle of one ledger, which passes appends to the ledger's writer machine.

The handle batches appends into runs without a timer. Appends that arrive in one turn of the event
loop form one run. While two runs are in flight, new appends wait, and together form the next run.
The handle assigns entry ids in the order of arrival, so `expect` is checked before anything is
sent. The handle has no task of its own.
"""

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

from quorumlog import errors
from quorumlog.net.driver import Driver, Reported, error_of, spread
from quorumlog.net.ports import LacPort, Ports
from quorumlog.protocol import messages
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.metadata import LedgerMetadata, Lineage, State
from quorumlog.protocol.record import Codec, Run
from quorumlog.protocol.writer import LedgerWriter, WriterState
from services.gateway.engine.tails import LacWaiters, RecentRuns
from services.gateway.interface import EntriesAppended

log = logging.getLogger(__name__)

RUN_BYTES_MAX: Final = 1 << 20
"""Maximum size of a run, the unit of group commits and reads. Larger appends are split."""
RUN_ENTRIES_MAX: Final = 10_000
RUNS_IN_FLIGHT: Final = 2
"""One run is on the wire and one on the disk; with more runs, runs would be smaller (measured)."""
EXPLICIT_LAC_S: Final = 0.01
"""A writer that is idle for this long sends its bookies an explicit LAC, so the last appends stay
readable even if the gateway dies. A busy writer sends the LAC with each entry."""
_LARGE_BYTES: Final = 64 << 10
_LARGE_IN_FLIGHT_BYTES: Final = 8 << 20
"""Large runs are sent up to this many bytes in flight, even beyond `RUNS_IN_FLIGHT`."""
_IS_CLOSED: Final = "the ledger is closed: append to a new ledger instead"


@dataclass(slots=True)
class InFlightBytes:
    """Counts the bytes of accepted, unacknowledged appends against a limit."""

    limit_bytes: int
    used_bytes: int = 0

    def has_room(self, size: int) -> bool:
        """Whether an append of `size` bytes fits. Any size fits while nothing is in flight."""
        return self.used_bytes == 0 or self.used_bytes + size <= self.limit_bytes


class HandleOwner(Protocol):
    """Callbacks of a write handle."""

    def handle_closed(self, handle: "WriteHandle", row: LedgerMetadata) -> None:
        """Called when the ledger is CLOSED."""

    def handle_failed(self, handle: "WriteHandle") -> None:
        """Called when the handle has failed before it received the ledger's end."""

    def recovery_wanted(self, handle: "WriteHandle") -> None:
        """Called when this process must recover the ledger, as another process does (rule 10)."""


@dataclass(slots=True)
class _Waiter:
    """One append request."""

    first: int
    last: int
    size: int
    future: asyncio.Future[EntriesAppended]


class WriteHandle:
    """The writer of one ledger, from the ledger's creation to its end.

    Invariants:
    - waiters are in the order of their entry ids, which are contiguous;
    - entries below `_sent` were passed to the machine, and all later entries wait in `_gathered`;
    - each waiter gets one result: when its entries are confirmed, or when the handle ends.
    """

    def __init__(
        self,
        row: LedgerMetadata,
        ports: Ports,
        owner: HandleOwner,
        *,
        lacs: LacPort,
        ledger_limit_bytes: int,
        gateway_in_flight: InFlightBytes,
        recent: RecentRuns,
        delays_change: bool = False,
    ) -> None:
        """Called once for each ledger, by the process that created the ledger (rule 11)."""
        self.ledger_id = row.ledger_id
        self.access_row = row
        """The newest metadata that this process has read. The machine's metadata may be older, if
        another gateway has changed the password."""
        self.machine = LedgerWriter(
            row, Codec(row.digest, row.mac_key), delays_change=delays_change
        )
        self._driver = Driver(self.machine, row.ledger_id, ports, self._on_outcome)
        self._owner = owner
        self._lacs = lacs
        self._ports = ports
        self._is_lac_due = False
        self._loop = asyncio.get_running_loop()
        self._ledger_in_flight = InFlightBytes(ledger_limit_bytes)
        self._gateway_in_flight = gateway_in_flight
        self._recent = recent
        self._next = self._sent = 0
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._runs: deque[tuple[int, int]] = deque()
        self._runs_bytes = 0
        self._waiters: deque[_Waiter] = deque()
        self._close: asyncio.Future[LedgerMetadata] | None = None
        self._is_close_sent = False
        self._is_flush_due = False
        self._failure: messages.Failed | None = None
        self.end_code: str | None = None
        """Code of the final failure, after which this handle can't report the ledger's end."""
        self._closed_row: LedgerMetadata | None = None
        self.copies = 0
        """The number of bookies that confirmed a copy of the CLOSED metadata, after `close`."""
        self.last_add_confirmed = -1
        self.records = 0
        """The number of records that were accepted, if the ledger stores record batches."""
        self.tails = LacWaiters()

    @property
    def is_live(self) -> bool:
        """Whether the handle has neither failed nor closed its ledger."""
        return self._failure is None and self._closed_row is None

    @property
    def takes_appends(self) -> bool:
        """Whether the handle is live, and its close was not requested."""
        return self.is_live and self._close is None

    @property
    def failure_code(self) -> str | None:
        """The code of the handle's failure; None if the handle has not failed."""
        return None if self._failure is None else self._failure.code

    @property
    def waits_for(self) -> str:
        """Describes, for operators, what a close of the handle waits for."""
        what = "its last change in the metadata service"
        if not self.machine.is_drained:
            what = f"acknowledgements of {', '.join(self.row.last_fragment.bookies)}"
        return f"ledger {self.ledger_id}: {what}"

    @property
    def row(self) -> LedgerMetadata:
        """The writer machine's version of the ledger's metadata."""
        return self.machine.metadata

    @property
    def is_degraded(self) -> bool:
        """Whether a member of the ensemble accepts no appends (rule 8)."""
        return self.is_live and self.machine.is_degraded

    def append(
        self, payloads: Sequence[bytes], expect: int | None = None
    ) -> asyncio.Future[EntriesAppended]:
        """Accepts an append. Ids follow the order of calls. The future completes on
        acknowledgement.

        Raises: UnexpectedEntryId, Overloaded, or the error that ended the handle; nothing is sent.
        """
        if self._failure is not None or self._close is not None or self._closed_row is not None:
            raise self._refusal()
        first = self._next
        if expect is not None and expect != first:
            raise errors.UnexpectedEntryId(
                f"the next entry id is {first}, but the request expects {expect}: "
                f"check the entries before {first}",
                ledger_id=self.ledger_id,
                next_entry_id=first,
            )
        size = sum(map(len, payloads))
        if not self._ledger_in_flight.has_room(size) or not self._gateway_in_flight.has_room(size):
            raise errors.Overloaded(
                "too many bytes wait for acknowledgement: retry later", ledger_id=self.ledger_id
            )
        self._ledger_in_flight.used_bytes += size
        self._gateway_in_flight.used_bytes += size
        self._next = first + len(payloads)
        future: asyncio.Future[EntriesAppended] = self._loop.create_future()
        self._waiters.append(_Waiter(first, self._next - 1, size, future))
        self._gathered.extend(payloads)
        self._gathered_bytes += size
        if not self._is_flush_due and self._may_send():
            self._is_flush_due = True
            self._loop.call_soon(self._flush_gathered)
        return future

    def recent(self, first: int, last: int, bytes_max: int) -> list[Run]:
        """Returns confirmed entries from memory, from `first` up to `last`; no entries if `first`
        is not in memory. An ended handle returns no entries, because recovery may decide the
        ledger's end.
        """
        return self._recent.read(self.ledger_id, first, last, bytes_max) if self.is_live else []

    async def close(self) -> LedgerMetadata:
        """Closes the ledger once no append is in flight, and sends copies of the CLOSED metadata to
        bookies (rule 18b). Concurrent callers get the same outcome.

        Raises: LedgerFenced, LedgerClosed, or the error that ended the handle.
        """
        if self._close is None or self._close.done():
            if self._closed_row is not None:
                return self._closed_row
            if self._driver.is_stopped:
                raise self._refusal()
            self._close = self._loop.create_future()
            self._is_close_sent = False
            self._flush()
        return await asyncio.shield(self._close)

    def replace(self, member: str) -> None:
        """Requests the replacement of a bookie in the open fragment (rule 21)."""
        if self.is_live:
            self._driver.post(messages.ReplaceRequested(member))

    def place_in_log(self, first_offset: int, lineage: Lineage | None) -> None:
        """Adds the ledger's first offset and lineage to the copies of its metadata (rule 18f)."""
        self._driver.post(messages.PlacedInLog(first_offset, lineage))

    def closed_by_other(self, row: LedgerMetadata) -> None:
        """Ends the handle because another process closed the ledger; ignored during a close."""
        if self._close is None or self._close.done():
            self._ended(row)

    def learn_row(self, row: LedgerMetadata) -> None:
        """Keeps newer metadata; later passwords are checked against it."""
        if row.version > self.access_row.version:
            self.access_row = row

    def learn(self, head: LedgerHead) -> None:
        """Compares the primary's metadata with the writer's. A higher version with another state or
        writer ends the handle at once; an ended handle acknowledges nothing (rule 16a).
        """
        if not self.is_live or head.version <= self.row.version:
            return
        if head.state is None:
            self._stop(errors.NoSuchLedger, "the ledger was deleted")
        elif self.machine.is_closing_row:
            pass  # the response to the handle's own close will report the ledger's end
        elif head.state is not State.OPEN or not self._is_writer(head):
            self._stop(errors.LedgerFenced, f"another process made the ledger {head.state}")

    def _is_writer(self, head: LedgerHead) -> bool:
        mine = self.access_row.writer
        return mine is None or head.writer_id == mine.id

    def abandon(self) -> None:
        """Ends the handle when its process ends. Pending appends have an unknown outcome."""
        self._stop(errors.WriterLost, "the process of the ledger's writer is shutting down")

    def _stop(self, reason: type[errors.QuorumLogError], detail: str) -> None:
        """Stops the driver and fails the handle; the machine gets no further events."""
        self._driver.stop()
        self._fail(messages.Failed(reason.code, detail=detail), is_final=True)

    def _flush_gathered(self) -> None:
        """Sends the appends of one turn of the event loop as one run."""
        self._is_flush_due = False
        if self.is_live:
            self._flush()

    def _flush(self) -> None:
        """Sends gathered appends, up to the limit of runs in flight."""
        try:
            self._send_gathered()
        except Exception:
            # After a defect, any append may have been sent, and no event would resolve the futures.
            log.exception("handle-broke", extra={"ledger": self.ledger_id})
            self._sent = self._next
            self._stop(errors.QuorumLogError, "the ledger's writer failed with an internal error")

    def _send_gathered(self) -> None:
        while self._gathered and self._may_send():
            payloads, size = self._cut_run()
            self._sent += len(payloads)
            self._runs.append((self._sent - 1, size))
            self._runs_bytes += size
            self._driver.post(messages.AppendRequested(payloads))
        if self._close is not None and not self._gathered and not self._is_close_sent:
            self._is_close_sent = True
            self._driver.post(messages.CloseRequested())

    def _may_send(self) -> bool:
        return len(self._runs) < RUNS_IN_FLIGHT or (
            self._gathered_bytes >= _LARGE_BYTES and self._runs_bytes < _LARGE_IN_FLIGHT_BYTES
        )

    def _cut_run(self) -> tuple[tuple[bytes, ...], int]:
        """Takes the payloads of the next run; returns the payloads and their total bytes."""
        gathered = self._gathered
        if self._gathered_bytes <= RUN_BYTES_MAX and len(gathered) <= RUN_ENTRIES_MAX:
            size = self._gathered_bytes
            self._gathered, self._gathered_bytes = [], 0
            return tuple(gathered), size
        ends = list(accumulate(map(len, gathered[:RUN_ENTRIES_MAX])))
        count = max(1, bisect_right(ends, RUN_BYTES_MAX))
        size = ends[count - 1]
        self._gathered = gathered[count:]
        self._gathered_bytes -= size
        return tuple(gathered[:count]), size

    def _on_outcome(self, reported: Reported) -> None:
        match reported:
            case messages.Confirmed(_, last, runs):
                self._recent.keep(runs)
                self._confirm(last)
            case messages.Closed(row):
                self._ended(row)
                spread(row, self._ports).add_done_callback(partial(self._answer_close, row))
            case messages.Failed():
                # Unless it is stopped, an ENDING machine closes the ledger at its LAC, and reports
                # the close later.
                is_ending = self.machine.state in (WriterState.ENDING, WriterState.CLOSED)
                self._fail(reported, is_final=not is_ending or self._driver.is_stopped)
            case messages.RecoveryNeeded():
                self._owner.recovery_wanted(self)
            case messages.EntriesRead() | messages.Repaired():
                pass  # a writer machine never reports these outcomes

    def _confirm(self, last: int) -> None:
        self.last_add_confirmed = last
        runs, waiters = self._runs, self._waiters
        while runs and runs[0][0] <= last:
            self._runs_bytes -= runs.popleft()[1]
        while waiters and waiters[0].last <= last:
            waiter = waiters.popleft()
            self._release(waiter)
            if not waiter.future.done():
                waiter.future.set_result(EntriesAppended(waiter.first, waiter.last, last))
        self.tails.advance(last)
        if not self._is_lac_due:
            self._is_lac_due = True
            self._ports.clock.after(EXPLICIT_LAC_S, self._send_explicit_lac, last)
        if self._gathered or self._close is not None:
            self._flush()

    def _send_explicit_lac(self, known: int) -> None:
        """Sends the explicit LAC once no entry was confirmed for `EXPLICIT_LAC_S`. This is safe for
        a fenced or closed ledger too, because no end is below a confirmed entry (I1).
        """
        if not self.is_live:
            return
        lac = self.last_add_confirmed
        if lac != known:
            self._ports.clock.after(EXPLICIT_LAC_S, self._send_explicit_lac, lac)
            return
        self._is_lac_due = False
        row = self.row
        for member in row.last_fragment.bookies:
            self._lacs.write_lac(member, self.ledger_id, lac, row.ledger_key)

    def _release(self, waiter: _Waiter) -> None:
        self._ledger_in_flight.used_bytes -= waiter.size
        self._gateway_in_flight.used_bytes -= waiter.size

    def _fail(self, failed: messages.Failed, *, is_final: bool) -> None:
        is_news = self.is_live
        if is_news:
            self._failure = failed
            self._drop_waiters(failed)
            self.tails.wake_all()
        if is_final and self._close is not None and not self._close.done():
            self._close.set_exception(self._error(failed, errors.UNKNOWN))
            self._close.exception()  # else asyncio logs it: all callers may have been cancelled
        if is_final and self.end_code is None:
            self.end_code = failed.code
            self._owner.handle_failed(self)

    def _drop_waiters(self, failed: messages.Failed) -> None:
        """Fails all waiting appends. The outcome is unknown if an entry was sent, else not-done."""
        while self._waiters:
            waiter = self._waiters.popleft()
            self._release(waiter)
            if not waiter.future.done():
                outcome = errors.UNKNOWN if waiter.first < self._sent else errors.NOT_DONE
                error = self._error(failed, outcome)
                waiter.future.set_exception(error)
                waiter.future.exception()  # else asyncio logs it: the client may be gone
        self._gathered, self._gathered_bytes = [], 0
        self._runs.clear()
        self._runs_bytes = 0

    def _error(self, failed: messages.Failed, outcome: errors.Outcome) -> errors.QuorumLogError:
        return error_of(failed, self.ledger_id).with_outcome(outcome)

    def _ended(self, row: LedgerMetadata) -> None:
        if self._closed_row is not None:
            return
        self._closed_row = row
        # The error doesn't name the end, because bookies may have no copies of it yet (rule 18b).
        self._drop_waiters(messages.Failed(errors.LedgerClosed.code, detail=_IS_CLOSED))
        self.tails.wake_all()
        self._driver.stop()
        self._owner.handle_closed(self, row)

    def _answer_close(self, row: LedgerMetadata, end: asyncio.Future[int]) -> None:
        self.copies = end.result()
        if self._close is not None and not self._close.done():
            self._close.set_result(row)

    def _refusal(self) -> errors.QuorumLogError:
        """The error for requests after the handle's end."""
        failed, row = self._failure, self._closed_row
        if row is not None or failed is None:
            return errors.LedgerClosed(_IS_CLOSED, ledger_id=self.ledger_id)
        if failed.code in (errors.LedgerClosed.code, errors.LedgerFenced.code):
            return self._error(failed, errors.NOT_DONE)
        return errors.WriterLost(
            f"the ledger's writer failed ({failed.code}): recover the ledger to learn its end",
            ledger_id=self.ledger_id,
            outcome=errors.NOT_DONE,
        )
