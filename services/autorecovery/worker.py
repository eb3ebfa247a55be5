"""Workers: take what members lack from the queue, and see that it is there again."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

import aiohttp

from quorumlog.errors import NoSuchLedger, NotEnoughBookies, QuorumLogError, VersionConflict
from quorumlog.net.conclude import conclude
from quorumlog.net.directory import Directory
from quorumlog.net.ports import Ports
from quorumlog.net.repair_client import RepairClient
from quorumlog.protocol.messages import Begin, CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.repair import FragmentRepair, parts
from quorumlog.wire.repair_bodies import Repair

log = logging.getLogger(__name__)

_LEASE_S: Final = 120.0
_REPAIR_S: Final = 100.0
"""Below the lease: two workers on one fragment lose nothing, and copy twice."""
_IDLE_S: Final = 1.0
_ASK_S: Final = 5.0


class StillOpen(NotEnoughBookies):
    """The fragment is open: its writer was told, or a recovery must close it first."""


@dataclass(slots=True)
class Done:
    """What this process has mended since its start."""

    repaired: int = 0
    failed: int = 0


class Worker:
    """Mends one item of the queue at a time.

    Invariants: entries go only to a member that metadata names, if only as a repair's target
    (rule 20); an open fragment is left to its writer (rule 21, I25).
    """

    def __init__(
        self,
        repairs: RepairClient,
        directory: Directory,
        ports: Ports,
        session: aiohttp.ClientSession,
        done: Done,
    ) -> None:
        self._repairs = repairs
        self._directory = directory
        self._ports = ports
        self._session = session
        self._done = done

    async def run(self) -> None:
        """Work for ever."""
        while True:
            items: tuple[Repair, ...] = ()
            try:
                items = await self._repairs.claim(lease_s=_LEASE_S)
            except QuorumLogError as error:
                log.warning("queue-away", extra={"why": error.detail})
            for item in items:
                try:
                    await self._take(item)
                except Exception:
                    # A defect of ours with one item must not end the work on all others; its
                    # lease runs out by itself.
                    log.exception("repair-failed", extra={"ledger": item.ledger_id})
            if not items:
                await asyncio.sleep(_IDLE_S)

    async def _take(self, item: Repair) -> None:
        where = {"ledger": item.ledger_id, "bookie": item.member}
        try:
            try:
                await self.mend(item)
            except NoSuchLedger:
                pass  # deleted ledgers clear themselves
            except QuorumLogError as error:
                self._done.failed += 1
                log.info("repair-put-off", extra={**where, "why": f"{error.code}: {error.detail}"})
                await self._repairs.fail(item, f"{error.code}: {error.detail}"[:500])
                return
            await self._repairs.progress(item, item.ranges, lease_s=_LEASE_S)
            self._done.repaired += 1
            log.info("repaired", extra=where)
        except VersionConflict:
            log.info("repair-taken-over", extra=where)
        except QuorumLogError as error:
            log.warning("queue-away", extra={"why": error.detail})

    async def mend(self, item: Repair) -> None:
        """See that a member has what it should have, or that another has taken its place.

        Raises: what keeps it from that, if only for now.
        """
        row = await self._row(item.ledger_id)
        if self._may_stay(item.member):
            for first, last in item.ranges:
                for part in parts(row, MissedRange(item.member, first, last)):
                    repair = FragmentRepair(
                        row,
                        fragment=part.fragment,
                        leaving=item.member,
                        target=item.member,
                        first=part.first,
                        last=part.last,
                    )
                    row = await self._conclude(repair, row)
            return
        for index, fragment in enumerate(row.fragments):
            if item.member not in fragment.bookies:
                continue
            if row.is_closed_fragment(index):
                repair = FragmentRepair(
                    row,
                    fragment=fragment.first_entry,
                    leaving=item.member,
                    target=self._target(row, index, item.member),
                )
                row = await self._conclude(repair, row)
            else:
                await self._tell_the_writer(row, item.member)

    async def _conclude(self, repair: FragmentRepair, row: LedgerMetadata) -> LedgerMetadata:
        return await conclude(repair, row.ledger_id, self._ports, Begin(), deadline_s=_REPAIR_S)

    async def _row(self, ledger_id: int) -> LedgerMetadata:
        status, row = await self._ports.metadata.read(ledger_id)
        if status is CasStatus.MISSING:
            raise NoSuchLedger("it is deleted", ledger_id=ledger_id)
        if row is None:
            raise NotEnoughBookies("the ledger's row can't be read now", ledger_id=ledger_id)
        return row

    def _may_stay(self, member: str) -> bool:
        """Whether a member is there and is to keep what it has: neither lost nor drained."""
        return any(
            bookie.id == member and bookie.state in {"writable", "read-only"}
            for bookie in self._directory.bookies
        )

    def _target(self, row: LedgerMetadata, index: int, leaving: str) -> str:
        """Who is to take a place: whom an earlier worker began to fill, else the best free one."""
        fragment = row.fragments[index]
        for repair in row.repairs:
            is_this = (repair.first_entry, repair.leaving) == (fragment.first_entry, leaving)
            if is_this and self._may_stay(repair.target):
                return repair.target
        staying = tuple(member for member in fragment.bookies if member != leaving)
        found = self._directory.candidates(fragment.bookies, staying)
        if not found:
            raise NotEnoughBookies("no bookie is free to take its place", ledger_id=row.ledger_id)
        return found[0]

    async def _tell_the_writer(self, row: LedgerMetadata, member: str) -> None:
        """Rule 21: a live writer changes its ensemble itself; nobody fences it."""
        if row.state is State.OPEN and row.writer is not None:
            url = f"{row.writer.url}/internal/ledgers/{row.ledger_id}/replace"
            timeout = aiohttp.ClientTimeout(total=_ASK_S)
            try:
                async with self._session.post(
                    url,
                    params={"member": member},
                    headers={"X-Forwarded-Writer": row.writer.id},
                    timeout=timeout,
                    allow_redirects=False,
                ) as response:
                    log.info(
                        "writer-told", extra={"ledger": row.ledger_id, "status": response.status}
                    )
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the auditor looks after ledgers whose writers are gone
        raise StillOpen("its last fragment is open", ledger_id=row.ledger_id, bookie=member)
