"""Workers: claim items of the repair queue, and copy missing entries to members."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from quorumlog import errors, header
from quorumlog.net.directory import Directory
from quorumlog.net.driver import conclude
from quorumlog.net.holdings import ask_bookie
from quorumlog.net.identity import Role
from quorumlog.net.metadata_client import RepairClient
from quorumlog.net.ports import Ports
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import Tasks, restarted
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import Begin, CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.repair import FragmentRange, FragmentRepair, fragment_ranges
from quorumlog.wire.repair_bodies import RepairItem
from services.autorecovery.check import ReplicaCheck
from services.autorecovery.findings import KnownLosses
from services.autorecovery.steering import Steering

log = logging.getLogger(__name__)

_LEASE_S: Final = 60.0
_REPAIR_S: Final = 24 * 3600.0
"""Deadline of a repair, as a guard against defects. Under a low copy limit, a repair may take
hours; its lease is renewed until the repair ends."""
_IDLE_S: Final = 1.0
_BUSY_S: Final = 0.1
_ASK_S: Final = 5.0
_CHANGE_S: Final = 3.0
"""Maximum wait for an ensemble change by a writer, before the item goes back to the queue."""
_POLL_S: Final = 0.05


class FragmentOpen(errors.NotEnoughBookies):
    """The fragment is open: its writer must replace the bookie, or the ledger must be recovered."""


class BookieAway(errors.NotEnoughBookies):
    """The bookie is absent but not lost yet: it may be restarting (rule 8)."""


@dataclass(eq=False)
class Worker:
    """Performs the repairs in the queue; the settings limit how many run at a time.

    Invariants:
    - entries are copied only to members and repair targets in the metadata (rule 20);
    - an item is done only after a check that the member has its entries on disk (rule 20a);
    - only its writer changes an open fragment (rule 21, I25);
    - a member stays in its ensembles unless it is lost, drained, or an earlier incarnation.
    """

    _repairs: RepairClient
    _directory: Directory
    _ports: Ports
    """The network clients of repairs, with rate-limited adds and without a quorum timeout."""
    _session: aiohttp.ClientSession
    _losses: KnownLosses
    _steering: Steering

    def __post_init__(self) -> None:
        self._replicas = ReplicaCheck(self._directory, self._session)
        self.working = self.repaired = self.failed = 0
        """The numbers of running, completed and failed repairs since the start of this process."""

    async def run(self, tasks: Tasks) -> None:
        """Claims items of the queue, and starts their repairs. Never returns."""
        while True:
            room = 0 if self._steering.is_paused else self._steering.concurrency - self.working
            items: tuple[RepairItem, ...] = ()
            if room > 0:
                try:
                    items = await self._repairs.claim(lease_s=_LEASE_S, limit=room)
                except errors.QuorumLogError as error:
                    log.warning("queue-away", extra={"why": error.detail})
            for item in items:
                self.working += 1
                tasks.start(self._work(item))
            await asyncio.sleep(_BUSY_S if self.working else _IDLE_S)

    async def _work(self, item: RepairItem) -> None:
        try:
            await self.process(item)
        except Exception:
            # A defect in one repair must not end the others. The item is retried after its lease.
            log.exception("repair-failed", extra={"ledger": item.ledger_id})
        finally:
            self.working -= 1

    async def process(self, item: RepairItem) -> None:
        """Repairs an item; if the repair fails, returns the item to the queue with the reason."""
        where = {"ledger": item.ledger_id, "bookie": item.member}
        try:
            try:
                async with self._renewing(item):
                    await self.repair(item)
            except errors.NoSuchLedger:
                self._losses.forget(item.ledger_id)  # a deleted ledger needs no repair
            except errors.QuorumLogError as error:
                self.failed += 1
                log.info("repair-put-off", extra={**where, "why": f"{error.code}: {error.detail}"})
                await self._repairs.fail(item, f"{error.code}: {error.detail}"[:500])
                return
            await self._repairs.progress(item, item.ranges, lease_s=_LEASE_S)
            self.repaired += 1
            log.info("repaired", extra=where)
        except errors.VersionConflict:
            log.info("repair-taken-over", extra=where)
        except errors.QuorumLogError as error:
            log.warning("queue-away", extra={"why": error.detail})

    @contextlib.asynccontextmanager
    async def _renewing(self, item: RepairItem) -> AsyncIterator[None]:
        """Renews an item's lease during the block, so that no second worker takes the item."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(_LEASE_S / 3)
                with contextlib.suppress(errors.QuorumLogError):
                    await self._repairs.progress(item, (), lease_s=_LEASE_S)

        renewal = asyncio.get_running_loop().create_task(restarted(renew))
        try:
            yield
        finally:
            renewal.cancel()

    async def repair(self, item: RepairItem) -> None:
        """Copies to a member the entries that it lacks, or replaces the member with another one.

        Raises: QuorumLogError if the repair is not possible now; the item is retried later.
        """
        row = await self._finish_placed(await self._row(item.ledger_id), item.member)
        if self._may_stay(item.member):
            # The bookie may have returned as a later incarnation that the directory does not list
            # yet. A repair to the earlier incarnation would complete the item, and the metadata
            # would keep a member that is gone (rule 15).
            answering = (await self._ledger_info_from(item.member, row.ledger_id)).get("bookie")
            if isinstance(answering, str) and answering != item.member:
                raise BookieAway("the bookie returned as a later incarnation", bookie=item.member)
            for first, last in item.ranges:
                for wanted in fragment_ranges(row, MissedRange(item.member, first, last)):
                    row = await self._copy_missing(row, item.member, wanted)
        elif self._may_move(item):
            row = await self._move(row, item.member)
        elif row.state is not State.CLOSED or member_name(item.member) in map(
            member_name, row.all_members
        ):
            raise BookieAway("the bookie is absent, but not lost yet", bookie=item.member)
        # Here, the member has been replaced, and its replacement was verified (rule 20a).
        for repair in row.placed_repairs:
            if repair.leaving == item.member:
                raise BookieAway(
                    "the new member has no copy of the metadata yet", bookie=repair.target
                )

    async def _finish_placed(self, row: LedgerMetadata, member: str) -> LedgerMetadata:
        """Completes repairs whose worker ended before the last step (rule 20b), if `member` is the
        leaving member or the target. A separate repair replaces a target that is absent.
        """
        for repair in row.placed_repairs:
            is_of_member = member in {repair.leaving, repair.target}
            if is_of_member and self._may_stay(repair.target):
                last_step = FragmentRepair(
                    row, fragment=repair.first_entry, leaving=repair.leaving, target=repair.target
                )
                row = await self._conclude(last_step, row)
        return row

    async def _move(self, row: LedgerMetadata, member: str) -> LedgerMetadata:
        """Replaces a member in all fragments, after its entries were copied to other bookies."""
        row = await self._ask_writer_to_replace(row, member)
        for index, fragment in enumerate(row.fragments):
            if member not in fragment.bookies:
                continue
            if not row.is_closed_fragment(index):
                raise FragmentOpen("the ledger's last fragment is open", ledger_id=row.ledger_id)
            target = self._target(row, index, member)
            repair = FragmentRepair(
                row,
                fragment=fragment.first_entry,
                leaving=member,
                target=target,
                held=await self._ranges_held_by(target, row),
            )
            row = await self._conclude(repair, row)
        return row

    async def _copy_missing(
        self, row: LedgerMetadata, member: str, wanted: FragmentRange
    ) -> LedgerMetadata:
        """Copies the entries of a range that a member, by its own report, lacks on its disk."""
        missing = await self._replicas.missing_on_disk(row, member, wanted.first, wanted.last)
        for first, last in ((wanted.first, wanted.last),) if missing is None else missing:
            repair = FragmentRepair(
                row, fragment=wanted.fragment, leaving=member, target=member, first=first, last=last
            )
            row = await self._conclude(repair, row)
        return row

    async def _conclude(self, repair: FragmentRepair, row: LedgerMetadata) -> LedgerMetadata:
        try:
            return await conclude(repair, row.ledger_id, self._ports, Begin(), deadline_s=_REPAIR_S)
        except errors.EntryUnavailable as error:
            # Rule 31: an entry is lost if each bookie that could have it reports it as absent.
            lost = await self._losses.recheck(repair.metadata, ranges_of(repair.unreadable))
            if lost:
                raise error.replace(detail=f"lost: {lost[0]}") from error
            raise

    async def _row(self, ledger_id: int) -> LedgerMetadata:
        status, row = await self._ports.metadata.read(ledger_id)
        if status is CasStatus.MISSING:
            raise errors.NoSuchLedger("the ledger is deleted", ledger_id=ledger_id)
        if row is None:
            raise errors.NotEnoughBookies(
                "the ledger's metadata can't be read now: retry later", ledger_id=ledger_id
            )
        return row

    def _may_stay(self, member: str) -> bool:
        """Whether a member may stay in its ensembles, because it is neither lost nor drained."""
        return any(
            bookie.id == member and bookie.state in {"writable", "read-only"}
            for bookie in self._directory.bookies
        )

    def _may_move(self, item: RepairItem) -> bool:
        """Whether another bookie may replace the item's member. A bookie that is restarting must
        stay a member; the entries that it missed are copied to it later (rule 8).
        """
        if item.moves:
            return True
        for bookie in self._directory.bookies:
            if member_name(bookie.id) == member_name(item.member):
                is_later = member_incarnation(bookie.id) > member_incarnation(item.member)
                return is_later or bookie.state == "draining"
        return self._directory.is_known  # a bookie that is not listed was decommissioned

    def _target(self, row: LedgerMetadata, index: int, leaving: str) -> str:
        """Chooses the member that replaces `leaving` in a fragment. First choice: the target that
        an earlier worker began to fill. Second: a later incarnation of the same bookie, which may
        still have most entries (BP-46). Third: the best bookie outside of the fragment.
        """
        fragment = row.fragments[index]
        staying = tuple(member for member in fragment.bookies if member != leaving)
        placed = {member_name(member) for member in staying}
        for repair in row.repairs:
            is_this = (repair.first_entry, repair.leaving) == (fragment.first_entry, leaving)
            # By now, another repair may have given the target another position in the fragment.
            is_free = member_name(repair.target) not in placed
            if is_this and is_free and self._may_stay(repair.target):
                return repair.target
        for bookie in self._directory.bookies:
            is_it = member_name(bookie.id) == member_name(leaving) and bookie.id != leaving
            if is_it and self._may_stay(bookie.id) and bookie.id not in fragment.bookies:
                return bookie.id
        found = self._directory.candidates(fragment.bookies, staying)
        if not found:
            raise errors.NotEnoughBookies(
                f"no bookie is free to replace the member: {self._directory.census()}",
                ledger_id=row.ledger_id,
            )
        return found[0]

    async def _ranges_held_by(
        self, target: str, row: LedgerMetadata
    ) -> tuple[tuple[int, int], ...]:
        """Returns the ranges that a target reports as stored, so that a repair continues an earlier
        repair. It reads these entries back like all others (rule 20a). Returns none if the metadata
        does not name the bookie, because it may then drop its copies (rules 18 and 20).
        """
        if member_name(target) not in map(member_name, row.all_members):
            return ()
        found = await self._ledger_info_from(target, row.ledger_id)
        try:
            if found["bookie"] != target:
                return ()
            return tuple((int(first), int(last)) for first, last in found["ranges"] or ())
        except (ValueError, KeyError, TypeError):
            return ()

    async def _ledger_info_from(self, member: str, ledger_id: int) -> dict[str, Any]:
        """Returns a bookie's report on a ledger; {} if the bookie is silent or lacks the ledger."""
        name = member_name(member)
        url = f"{self._directory.address(name)}/v1/ledgers/{ledger_id}"
        found = await ask_bookie(self._session, name, url, dict[str, Any], limit_s=_ASK_S)
        return found or {}

    async def _ask_writer_to_replace(self, row: LedgerMetadata, member: str) -> LedgerMetadata:
        """Asks a live writer to replace the member, because no other process may fence a live
        writer (rule 21). Returns the metadata, which may still name the member.
        """
        is_open = row.state is State.OPEN and member in row.last_fragment.bookies
        if not is_open or row.writer is None:
            return row
        url = f"{row.writer.url_inside}/internal/ledgers/{row.ledger_id}/replace"
        try:
            async with self._session.post(
                url,
                params={"member": member},
                headers={header.FORWARDED_WRITER: row.writer.id},
                timeout=aiohttp.ClientTimeout(total=_ASK_S),
                ssl=ExpectedServer(Role.GATEWAY),
            ) as response:
                log.info("writer-told", extra={"ledger": row.ledger_id, "status": response.status})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("writer-silent", extra={"ledger": row.ledger_id, "why": repr(error)})
            return row  # the auditor recovers ledgers whose writers are gone
        end = asyncio.get_running_loop().time() + _CHANGE_S
        while member in row.last_fragment.bookies and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
            row = await self._row(row.ledger_id)
        return row
