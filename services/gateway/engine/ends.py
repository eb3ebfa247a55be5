"""Ends of ledgers: runs recoveries, decides which ends may be reported to clients (those that bookies keep, rule 18b), and
accepts proven losses of a CLOSED ledger's entries (rule 31).
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from quorumlog import errors
from quorumlog.net.driver import recover
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.net.ports import Ports
from quorumlog.net.spread import spread
from quorumlog.protocol.ends import End, end_after
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LOST_RANGES_MAX, LedgerMetadata
from services.gateway.engine.rows import LedgerRows, is_closed, went_back

log = logging.getLogger(__name__)

T = TypeVar("T")

_DEADLINE_S: Final = 30.0
"""After this time callers of a recovery get recovery-blocked; they may retry."""
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries of a background recovery (rule 10)."""
_KEPT_MAX: Final = 100_000
"""As many as rows are cached (`rows.py`)."""
_REFUSED_RANGES_MAX: Final = 100
"""How many ranges a refusal names (taste)."""


class Ends:
    """Recovers ledgers, and knows which ends are kept.

    Between the change that closes a ledger and the copies of its row, the end is in the database alone. Whoever closes
    a ledger waits for the copies; whoever reads the row meanwhile does not know whether they are kept, so each gateway
    sends them once before it tells the end of a ledger that another one closed.

    Invariants: an end is known as kept only if the database had it after an ack quorum of bookies confirmed copies; at most
    one recovery of a ledger runs. An end with fewer copies is told too, since nobody can wait for bookies for ever; copies
    are sent again for the next reader.
    """

    def __init__(self, rows: LedgerRows, ports: Ports) -> None:
        """No end is known as kept, and no recovery runs."""
        self._rows, self._ports = rows, ports
        self._kept: OrderedDict[int, int | None] = OrderedDict()
        self._asking: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._recovering: dict[int, asyncio.Task[tuple[LedgerMetadata, int]]] = {}
        self._in_background: set[int] = set()

    async def told(self, row: LedgerMetadata) -> LedgerMetadata:
        """Returns the metadata, or a later version. Reports the end of a CLOSED ledger only once bookies keep it. Concurrent
        callers share one check.

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
        """`kept` for a row of which no copies may have been sent."""
        return await self.kept(row, await spread(row, self._ports))

    async def kept(self, closed: LedgerMetadata, copies: int = 0) -> LedgerMetadata:
        """The row of an end that a client is about to be told, from the primary. Members keep copies of the end now, so
        that a later loss of the row leaves the end as it is; the answer that told of it may be of a database that was
        lost before, and this process may have stood still since (rule 18b). `copies`: how many bookies confirmed one.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        try:
            return await self._read(closed, copies)
        except errors.NoSuchLedger:
            return closed  # deleted since, which only a CLOSED ledger is
        except errors.MetadataUnavailable as error:
            raise error.with_outcome(errors.UNKNOWN) from error

    async def recover(
        self, row: LedgerMetadata, *, declare_lost: tuple[str, ...] = ()
    ) -> tuple[LedgerMetadata, int]:
        """Recover a ledger of which the caller has read this row, or join the running recovery: the closed row, and how many
        bookies confirmed a copy of it. Members declared lost (rule 14) need a recovery of their own.

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
        """Recover a ledger in the background, with retries until it is closed (rule 10)."""
        if ledger_id not in self._in_background:
            self._in_background.add(ledger_id)
            self._ports.tasks.start(self._retry_until_closed(ledger_id))

    async def _retry_until_closed(self, ledger_id: int) -> None:
        try:
            for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
                try:
                    row = await self._rows.fresh(ledger_id)
                    # An earlier recovery may have ended before it had sent copies.
                    await (spread(row, self._ports) if is_closed(row) else self.recover(row))
                    return
                except errors.NoSuchLedger:
                    return
                except errors.QuorumLogError as error:
                    log.warning("recovery-failed", extra={"ledger": ledger_id, "why": error.detail})
                except Exception:
                    # A defect: an open ledger without a writer must end all the same.
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
        """Declare entries first..last lost, of a ledger whose row was just read; returns the new
        row. An operator decides. All possible holders of these entries must deny them, or be in `declared` (permanently gone).

        Raises: InvalidRequest, LossNotProven, NoSuchLedger, MetadataUnavailable.
        """
        while True:
            if not is_closed(row) or row.last_entry is None:
                raise errors.LossNotProven(
                    "the ledger is not CLOSED: recover it first", ledger_id=row.ledger_id
                )
            if last > row.last_entry:
                raise errors.InvalidRequest(
                    f"the ledger ends at {row.last_entry}", ledger_id=row.ledger_id
                )
            kept = row.kept(first, last)
            if not kept:
                return row  # a repeat
            await _prove_lost(row, kept, declared, holdings)
            changed = row.given_up(first, last, declared)
            if len(changed.lost_entries) > LOST_RANGES_MAX:
                raise errors.InvalidRequest(
                    f"at most {LOST_RANGES_MAX} ranges of a ledger are given up",
                    ledger_id=row.ledger_id,
                )
            # The proof holds for this row only: after a change by a repair or another operator,
            # others may have the entries.
            status, now = await self._ports.metadata.cas(changed, (), attempt=new_attempt())
            if status is CasStatus.MISSING:
                raise errors.NoSuchLedger("it is deleted", ledger_id=row.ledger_id)
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
        """Cancel what is under way: a recovery may stop at any point."""
        under_way = [*self._asking.values(), *self._recovering.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _keep(self, row: LedgerMetadata) -> LedgerMetadata:
        return await self._read(row, await spread(row, self._ports))

    async def _read(self, closed: LedgerMetadata, copies: int) -> LedgerMetadata:
        """The row as the database has it now that copies were sent. Raises: NoSuchLedger and as `kept`."""
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
    """Raise LossNotProven unless no bookie can serve any of these entries."""
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
            answers=[
                {"first": found.first, "last": found.last, "answers": dict(found.words)}
                for found in against
            ],
        )


def _share(
    running: dict[int, asyncio.Task[T]], ledger_id: int, work: Coroutine[Any, Any, T]
) -> None:
    """Start one task per ledger that all callers await; the entry is removed when the task ends."""

    def ended(task: asyncio.Task[T]) -> None:
        del running[ledger_id]
        if not task.cancelled():
            task.exception()  # perhaps nobody awaits the task any more

    running[ledger_id] = asyncio.get_running_loop().create_task(work)
    running[ledger_id].add_done_callback(ended)
