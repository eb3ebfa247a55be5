"""Recovers ledgers, reports their ends to clients once bookies have copies of the CLOSED metadata
(rule 18b), and accepts proven losses of entries (rule 31).
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from quorumlog import errors
from quorumlog.net.driver import recover, spread
from quorumlog.net.holdings import HoldingsClient, answers_json
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.net.ports import Ports
from quorumlog.protocol.ends import End, end_after
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LOST_RANGES_MAX, LedgerMetadata
from services.gateway.engine.rows import LedgerRows, is_closed, went_back

log = logging.getLogger(__name__)

T = TypeVar("T")

_DEADLINE_S: Final = 30.0
"""A recovery that takes longer fails with recovery-blocked, which callers may retry."""
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between tries of a background recovery (rule 10)."""
_KEPT_MAX: Final = 100_000
"""Maximum number of ends known to be kept; equals the size of the metadata cache (`rows.py`)."""
_REFUSED_RANGES_MAX: Final = 100
"""A `LossNotProven` error lists at most this many ranges of entries (chosen by judgement)."""


class Ends:
    """Recovers ledgers, and tracks which ends are *kept*: stored by an ack quorum of bookies.

    Until bookies store copies of a ledger's CLOSED metadata, only the database has the end. The
    gateway that closes a ledger waits for the copies. Another gateway can't know whether the copies
    were stored, so it sends copies itself before it first reports the end.

    Invariants: an end counts as kept only if the database still had the end after an ack quorum of
    bookies confirmed copies. At most one recovery of a ledger runs. An end with fewer copies is
    reported too, because bookies may stay down. The next read of the end sends copies again.
    """

    def __init__(self, rows: LedgerRows, ports: Ports) -> None:
        """`rows`: the metadata cache; `ports`: access to bookies and the metadata service."""
        self._rows, self._ports = rows, ports
        self._kept: OrderedDict[int, int | None] = OrderedDict()
        self._asking: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._recovering: dict[int, asyncio.Task[tuple[LedgerMetadata, int]]] = {}
        self._in_background: set[int] = set()

    async def reported(self, row: LedgerMetadata) -> LedgerMetadata:
        """Returns the given metadata or a later version, after a check that bookies keep a CLOSED
        ledger's end (rule 18b). Concurrent callers share one check.

        Raises: NoSuchLedger, MetadataUnavailable, DatabaseWentBack.
        """
        ledger_id = row.ledger_id
        is_kept = ledger_id in self._kept and self._kept[ledger_id] == row.last_entry
        if is_kept or not is_closed(row):
            return row
        if ledger_id not in self._asking:
            _share(self._asking, ledger_id, self._keep(row))
        return await asyncio.shield(self._asking[ledger_id])

    async def copied(self, row: LedgerMetadata) -> LedgerMetadata:
        """Sends copies of CLOSED metadata to bookies, then returns the result of `kept`."""
        return await self.kept(row, await spread(row, self._ports))

    async def kept(self, closed: LedgerMetadata, copies: int = 0) -> LedgerMetadata:
        """Reads CLOSED metadata again from the primary, before its end is reported to a client. The
        database that confirmed the close may have been lost since (rule 18b). `copies`: the number
        of bookies that have confirmed a copy.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        try:
            return await self._read(closed, copies)
        except errors.NoSuchLedger:
            return closed  # deleted since; only a CLOSED ledger can be deleted
        except errors.MetadataUnavailable as error:
            raise error.with_outcome(errors.UNKNOWN) from error

    async def recover(
        self, row: LedgerMetadata, *, declare_lost: tuple[str, ...] = ()
    ) -> tuple[LedgerMetadata, int]:
        """Recovers a ledger, or joins its running recovery. A call that declares members lost (rule
        14) starts its own recovery. Returns the CLOSED metadata, and how many bookies confirmed it.

        Raises: RecoveryBlocked, NoSuchLedger, MetadataUnavailable.
        """
        ledger_id = row.ledger_id
        while declare_lost and ledger_id in self._recovering:
            await asyncio.wait([self._recovering[ledger_id]])
            row = await self._rows.fresh(ledger_id)
        if ledger_id not in self._recovering:
            _share(self._recovering, ledger_id, self._recover(row, declare_lost))
        return await asyncio.shield(self._recovering[ledger_id])

    async def _recover(
        self, row: LedgerMetadata, declare_lost: tuple[str, ...]
    ) -> tuple[LedgerMetadata, int]:
        closed, copies = await recover(
            row, self._ports, deadline_s=_DEADLINE_S, declare_lost=declare_lost
        )
        self._rows.put(closed)
        return closed, copies

    def start_recovery(self, ledger_id: int) -> None:
        """Recovers a ledger in the background, with retries until it is CLOSED (rule 10)."""
        if ledger_id not in self._in_background:
            self._in_background.add(ledger_id)
            self._ports.tasks.start(self._retry_until_closed(ledger_id))

    async def _retry_until_closed(self, ledger_id: int) -> None:
        try:
            for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
                try:
                    row = await self._rows.fresh(ledger_id)
                    # The process that closed the ledger may have ended before it sent copies.
                    await (spread(row, self._ports) if is_closed(row) else self.recover(row))
                    return
                except errors.NoSuchLedger:
                    return
                except errors.QuorumLogError as error:
                    log.warning("recovery-failed", extra={"ledger": ledger_id, "why": error.detail})
                except Exception:
                    # A defect must not end the retries, because no writer will close this ledger.
                    log.exception("recovery-broke", extra={"ledger": ledger_id})
                await asyncio.sleep(pause_s)
        finally:
            self._in_background.discard(ledger_id)

    async def accept_loss(
        self,
        row: LedgerMetadata,
        first: int,
        last: int,
        declared: tuple[str, ...],
        holdings: HoldingsClient,
    ) -> LedgerMetadata:
        """Declares entries first..last of a ledger lost, for an operator; returns the new metadata.
        Each bookie that could have the entries must report that it lacks them, or be in `declared`
        (permanently gone).

        Raises: InvalidRequest, LossNotProven, NoSuchLedger, MetadataUnavailable.
        """
        while True:
            if not is_closed(row) or row.last_entry is None:
                raise errors.LossNotProven(
                    "the ledger is not CLOSED: recover the ledger first", ledger_id=row.ledger_id
                )
            if last > row.last_entry:
                raise errors.InvalidRequest(
                    f"`last` must be at most {row.last_entry} (got {last})", ledger_id=row.ledger_id
                )
            kept = row.kept(first, last)
            if not kept:
                return row  # all of these entries were declared lost earlier
            await _prove_lost(row, kept, declared, holdings)
            changed = row.given_up(first, last, declared)
            if len(changed.lost_entries) > LOST_RANGES_MAX:
                raise errors.InvalidRequest(
                    f"the ledger may have at most {LOST_RANGES_MAX} ranges of lost entries",
                    ledger_id=row.ledger_id,
                )
            # The proof holds for this version of the metadata only: after a repair or another
            # operator's change, other bookies may have the entries.
            status, now = await self._ports.metadata.cas(changed, (), attempt=new_attempt())
            if status is CasStatus.MISSING:
                raise errors.NoSuchLedger("the ledger was deleted", ledger_id=row.ledger_id)
            if now is None:
                raise errors.MetadataUnavailable(ledger_id=row.ledger_id)
            self._rows.put(now)
            if status is CasStatus.OK:
                log.warning(
                    "loss-accepted",
                    extra={
                        "ledger": row.ledger_id,
                        "first": first,
                        "last": last,
                        "declared": declared,
                    },
                )
                return now
            row = now

    async def close(self) -> None:
        """Cancels running recoveries and checks of ends, which is safe at any time."""
        under_way = [*self._asking.values(), *self._recovering.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _keep(self, row: LedgerMetadata) -> LedgerMetadata:
        return await self._read(row, await spread(row, self._ports))

    async def _read(self, closed: LedgerMetadata, copies: int) -> LedgerMetadata:
        """Reads the metadata after copies were sent, and remembers an end that bookies keep."""
        row = await self._rows.fresh_closed(closed.ledger_id)
        end = end_after(closed, copies, row)
        if end is End.MOVED:
            raise went_back(row.ledger_id, "closed", f"the end {row.last_entry}")
        if end is End.UNSURE:
            return row
        self._kept[row.ledger_id] = row.last_entry
        self._kept.move_to_end(row.ledger_id)
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return row


async def _prove_lost(
    row: LedgerMetadata,
    ranges: tuple[tuple[int, int], ...],
    declared: tuple[str, ...],
    holdings: HoldingsClient,
) -> None:
    """Raises LossNotProven if a bookie may be able to serve one of these entries."""
    against: list[Answers] = []
    async for found in holdings.answers(row, ranges):
        if not found.is_lost(declared):
            against.append(found)
            if len(against) >= _REFUSED_RANGES_MAX:
                break
    if against:
        raise errors.LossNotProven(
            str(against[0]),
            ledger_id=row.ledger_id,
            entry_id=against[0].first,
            answers=[answers_json(found) for found in against],
        )


def _share(
    running: dict[int, asyncio.Task[T]], ledger_id: int, work: Coroutine[Any, Any, T]
) -> None:
    """Starts one task per ledger, shared by all callers. Ended tasks are removed from `running`."""

    def ended(task: asyncio.Task[T]) -> None:
        del running[ledger_id]
        if not task.cancelled():
            task.exception()  # else asyncio logs it: all callers may have been cancelled

    running[ledger_id] = asyncio.get_running_loop().create_task(work)
    running[ledger_id].add_done_callback(ended)
