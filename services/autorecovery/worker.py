"""Workers: take what members lack from the queue, and see that it is there again."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from quorumlog import header
from quorumlog.errors import (
    EntryUnavailable,
    NoSuchLedger,
    NotEnoughBookies,
    QuorumLogError,
    VersionConflict,
)
from quorumlog.net.conclude import conclude
from quorumlog.net.directory import Directory
from quorumlog.net.ports import Ports
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.timers import Tasks
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import Begin, CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.repair import FragmentRepair, Part, parts
from quorumlog.wire.repair_bodies import Repair
from services.autorecovery.check import ReplicaCheck
from services.autorecovery.losses import Losses
from services.autorecovery.steering import Steering

log = logging.getLogger(__name__)

_LEASE_S: Final = 60.0
_REPAIR_S: Final = 24 * 3600.0
"""Against a defect only: a repair under a small limit may take hours, and its lease is renewed."""
_IDLE_S: Final = 1.0
_BUSY_S: Final = 0.1
_ASK_S: Final = 5.0
_CHANGE_S: Final = 3.0
"""For a writer that was told to have changed its ensemble; else the item comes again later."""
_LOOK_S: Final = 0.05


class StillOpen(NotEnoughBookies):
    """The fragment is open: its writer was told, or a recovery must close it first."""


class Away(NotEnoughBookies):
    """The bookie is not there, and not lost either: it may be restarting (rule 8)."""


@dataclass(slots=True)
class Done:
    """What this process has mended since its start."""

    repaired: int = 0
    failed: int = 0


class Workers:
    """As many workers as operators want at a time."""

    def __init__(
        self,
        repairs: RepairClient,
        directory: Directory,
        ports: Ports,
        session: aiohttp.ClientSession,
        done: Done,
        steering: Steering,
        losses: Losses,
    ) -> None:
        """`ports` are those of repair: paced, and without a quorum timer."""
        self._worker = Worker(repairs, directory, ports, session, done, losses)
        self._repairs = repairs
        self._steering = steering
        self.working = 0

    async def run(self, tasks: Tasks) -> None:
        """Claim items and start work on them, for ever."""
        while True:
            room = 0 if self._steering.is_paused else self._steering.concurrency - self.working
            items: tuple[Repair, ...] = ()
            if room > 0:
                try:
                    items = await self._repairs.claim(lease_s=_LEASE_S, limit=room)
                except QuorumLogError as error:
                    log.warning("queue-away", extra={"why": error.detail})
            for item in items:
                self.working += 1
                tasks.start(self._work(item))
            await asyncio.sleep(_BUSY_S if self.working else _IDLE_S)

    async def _work(self, item: Repair) -> None:
        try:
            await self._worker.take(item)
        except Exception:
            # A defect of ours with one item must not end the work on all others; its lease runs
            # out by itself.
            log.exception("repair-failed", extra={"ledger": item.ledger_id})
        finally:
            self.working -= 1


class Worker:
    """Mends items of the queue.

    Invariants: entries go only to a member that metadata names, if only as a repair's target
    (rule 20); an item ends when its member's disk was seen to hold what it should (rule 20a); an open
    fragment is left to its writer (rule 21, I25); a member keeps its place
    unless it is lost, drained, or an earlier incarnation.
    """

    def __init__(
        self,
        repairs: RepairClient,
        directory: Directory,
        ports: Ports,
        session: aiohttp.ClientSession,
        done: Done,
        losses: Losses,
    ) -> None:
        self._repairs = repairs
        self._directory = directory
        self._ports = ports
        self._session = session
        self._done = done
        self._losses = losses
        self._replicas = ReplicaCheck(directory, session)

    async def take(self, item: Repair) -> None:
        """Mend an item, or let go of it with the reason."""
        where = {"ledger": item.ledger_id, "bookie": item.member}
        try:
            try:
                async with self._held(item):
                    await self.mend(item)
            except NoSuchLedger:
                self._losses.forget(item.ledger_id)  # deleted ledgers clear themselves
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

    @contextlib.asynccontextmanager
    async def _held(self, item: Repair) -> AsyncIterator[None]:
        """Hold on to an item for as long as the block takes. Two workers on one item lose nothing,
        and copy twice.
        """

        async def renew() -> None:
            while True:
                await asyncio.sleep(_LEASE_S / 3)
                with contextlib.suppress(QuorumLogError):
                    await self._repairs.progress(item, (), lease_s=_LEASE_S)

        renewal = asyncio.get_running_loop().create_task(renew())
        try:
            yield
        finally:
            renewal.cancel()

    async def mend(self, item: Repair) -> None:
        """See that a member has what it should have, or that another has taken its place.

        Raises: what keeps it from that, if only for now.
        """
        row = await self._row(item.ledger_id)
        if self._may_stay(item.member):
            if await self._is_later(item.member, row.ledger_id):
                raise Away("it came back as a later incarnation just now", bookie=item.member)
            for first, last in item.ranges:
                for part in parts(row, MissedRange(item.member, first, last)):
                    row = await self._fill(row, item.member, part)
            return
        if not self._may_move(item):
            names = map(member_name, row.all_members)
            if row.state is State.CLOSED and member_name(item.member) not in names:
                return  # it has no place any more, and who took it was verified (rule 20a)
            raise Away("the bookie is waited for: it is away, and not lost yet", bookie=item.member)
        row = await self._told(row, item.member)
        for index, fragment in enumerate(row.fragments):
            if item.member not in fragment.bookies:
                continue
            if not row.is_closed_fragment(index):
                raise StillOpen("its last fragment is open", ledger_id=row.ledger_id)
            target = self._target(row, index, item.member)
            repair = FragmentRepair(
                row,
                fragment=fragment.first_entry,
                leaving=item.member,
                target=target,
                held=await self._held_by(target, row),
            )
            row = await self._conclude(repair, row)

    async def _fill(self, row: LedgerMetadata, member: str, part: Part) -> LedgerMetadata:
        """Give a member what it lacks of a part. Which that is it tells after a look at its disk; a
        member that got its place a moment ago mostly lacks nothing, and so nothing travels for the
        second look that the change of its place has queued (rule 20a).
        """
        said = await self._replicas.lacking(row, member, part.first, part.last)
        for first, last in ((part.first, part.last),) if said is None else said:
            repair = FragmentRepair(
                row,
                fragment=part.fragment,
                leaving=member,
                target=member,
                first=first,
                last=last,
            )
            row = await self._conclude(repair, row)
        return row

    async def _conclude(self, repair: FragmentRepair, row: LedgerMetadata) -> LedgerMetadata:
        try:
            return await conclude(repair, row.ledger_id, self._ports, Begin(), deadline_s=_REPAIR_S)
        except EntryUnavailable as error:
            # Rule 31: where all who could have it say that they have not, it is lost, and told.
            lost = await self._losses.look(repair.metadata, ranges_of(repair.unreadable))
            if lost:
                raise error.replace(detail=f"lost: {lost[0]}") from error
            raise

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

    def _may_move(self, item: Repair) -> bool:
        """Whether another member may take the place. What a writer missed while a bookie was
        restarting is no reason (rule 8: it is queued for that very member).
        """
        if item.moves:
            return True
        for bookie in self._directory.bookies:
            if member_name(bookie.id) == member_name(item.member):
                is_later = member_incarnation(bookie.id) > member_incarnation(item.member)
                return is_later or bookie.state == "draining"
        return self._directory.is_known  # decommissioned

    def _target(self, row: LedgerMetadata, index: int, leaving: str) -> str:
        """Who is to take a place: whom an earlier worker began to fill, else a later incarnation of
        the same bookie, which may still have most of it (BP-46), else the best free one.
        """
        fragment = row.fragments[index]
        staying = tuple(member for member in fragment.bookies if member != leaving)
        placed = {member_name(member) for member in staying}
        for repair in row.repairs:
            is_this = (repair.first_entry, repair.leaving) == (fragment.first_entry, leaving)
            # It may have got another place of the fragment since, by another repair.
            is_free = member_name(repair.target) not in placed
            if is_this and is_free and self._may_stay(repair.target):
                return repair.target
        for bookie in self._directory.bookies:
            is_it = member_name(bookie.id) == member_name(leaving) and bookie.id != leaving
            if is_it and self._may_stay(bookie.id) and bookie.id not in fragment.bookies:
                return bookie.id
        found = self._directory.candidates(fragment.bookies, staying)
        if not found:
            raise NotEnoughBookies("no bookie is free to take its place", ledger_id=row.ledger_id)
        return found[0]

    async def _is_later(self, member: str, ledger_id: int) -> bool:
        """Whether a later incarnation answers, of which the directory has not heard yet: to fill
        the earlier one would end the item, and leave the place to a name that is gone (rule 15).
        """
        found = await self._said_by(member, ledger_id)
        bookie = found.get("bookie")
        return isinstance(bookie, str) and bookie != member

    async def _held_by(self, target: str, row: LedgerMetadata) -> tuple[tuple[int, int], ...]:
        """What a target has of a ledger by its own word, so that a repair goes on where an earlier
        one ended. It is read back as all else is (rule 20a). What is there of a ledger that does not
        name the bookie may be about to be dropped (rules 18 and 20), and is sent again.
        """
        if member_name(target) not in map(member_name, row.all_members):
            return ()
        found = await self._said_by(target, row.ledger_id)
        try:
            if found["bookie"] != target:
                return ()
            return tuple((int(first), int(last)) for first, last in found["ranges"] or ())
        except (ValueError, KeyError, TypeError):
            return ()

    async def _said_by(self, member: str, ledger_id: int) -> dict[str, Any]:
        """What a bookie says of a ledger; {} where it does not answer or holds nothing."""
        url = self._directory.address(member_name(member))
        try:
            async with self._session.get(
                f"{url}/v1/ledgers/{ledger_id}",
                timeout=aiohttp.ClientTimeout(total=_ASK_S),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    return {}
                found = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _told(self, row: LedgerMetadata, member: str) -> LedgerMetadata:
        """Rule 21: a live writer changes its ensemble itself; nobody fences it. Gives the row that
        comes of it.
        """
        is_open = row.state is State.OPEN and member in row.last_fragment.bookies
        if not is_open or row.writer is None:
            return row
        url = f"{row.writer.url}/internal/ledgers/{row.ledger_id}/replace"
        try:
            async with self._session.post(
                url,
                params={"member": member},
                headers={header.FORWARDED_WRITER: row.writer.id},
                timeout=aiohttp.ClientTimeout(total=_ASK_S),
                allow_redirects=False,
            ) as response:
                log.info("writer-told", extra={"ledger": row.ledger_id, "status": response.status})
        except (aiohttp.ClientError, TimeoutError, OSError):
            return row  # the auditor looks after ledgers whose writers are gone
        end = asyncio.get_running_loop().time() + _CHANGE_S
        while member in row.last_fragment.bookies and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_LOOK_S)
            row = await self._row(row.ledger_id)
        return row
