"""The auditor looks for lost members and for open ledgers whose writer is gone, and queues repairs.

A lease selects one process as the auditor, to avoid duplicate work. Two auditors at the same time
do no harm: a repair that is queued twice has one item, and every change is a compare-and-swap.
"""

import asyncio
import contextlib
import logging
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import NoSuchBookie, QuorumLogError
from quorumlog.net.driver import recover
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import Ports
from quorumlog.net.timers import awake
from quorumlog.protocol import limbo
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import BookieInfo
from quorumlog.wire.repair_bodies import RepairAdd
from services.autorecovery.config import Config
from services.autorecovery.drains import drain_of
from services.autorecovery.findings import GracePeriod, LostMembers, is_believable, survivors_of
from services.autorecovery.steering import Steering
from services.autorecovery.writers import WriterPresence, Writers

log = logging.getLogger(__name__)

_PAGE: Final = 1000
_RECOVERY_S: Final = 60.0
_DRAIN_SHARE: Final = 20
"""Pause after a round of drains or of checks of open ledgers, as a multiple of its duration, so
that each kind of round takes about 5 % of the auditor's time."""
_PAUSE_MAX_S: Final = 30.0
"""Maximum pause, because a round may be slow only because the metadata service is slow."""
_BLOCKED_MAX: Final = 100
"""Maximum number of blocked recoveries reported with reasons; all are counted and logged."""
_LEASE: Final = "auditor"


@dataclass(eq=False)
class Auditor:
    """Queues repairs for lost and draining members, and recovers abandoned ledgers.

    Invariant: an open ledger is not changed while its writer responds (rule 21).
    """

    _name: str
    """The unique name under which this process takes the lease."""
    _config: Config
    _metadata: MetadataClient
    _repairs: RepairClient
    _ports: Ports
    _writers: Writers
    _steering: Steering

    def __post_init__(self) -> None:
        self._lost = LostMembers(self._steering.lost_bookie_delay_s)
        self._refused = GracePeriod(self._config.abandoned_s)
        self._silent = GracePeriod(self._config.silent_s)
        self._stuck = GracePeriod(self._config.in_recovery_s)
        self._queued_at: dict[str, float] = {}
        self._drain_due_at: dict[str, float] = {}
        self._reported_drains: dict[str, tuple[str, int, int]] = {}
        self._open_check_due_at = 0.0
        self._triggers = 0
        self._recovering: set[int] = set()
        self._writable: frozenset[str] = frozenset()
        self._recovery_slots = asyncio.Semaphore(self._config.recoveries)
        self._wake = asyncio.Event()
        self.is_auditor = False
        self.audits = 0
        self.audit_s = 0.0
        self.recovered = 0
        self.blocked_count = 0
        self.blocked: dict[int, QuorumLogError] = {}
        """The errors of blocked recoveries by ledger id, for at most `_BLOCKED_MAX` ledgers."""
        self.blocked_ledgers: set[int] = set()
        """The ids of all ledgers whose recovery is blocked."""
        self.lost: tuple[str, ...] = ()
        self.draining: tuple[str, ...] = ()
        self.liveness_age_s: float | None = None
        """How long Redis had recorded liveness, at the last audit; None if unknown."""

    def trigger(self) -> None:
        """Starts a full audit now."""
        self._triggers += 1
        self._queued_at.clear()
        self._drain_due_at.clear()
        self._open_check_due_at = 0.0
        self._wake.set()

    async def run(self) -> None:
        """Audits periodically while this process holds the lease. Never returns."""
        while True:
            try:
                lease = await self._repairs.take_lease(_LEASE, ttl_s=self._config.lease_s)
                self.is_auditor = lease.holder == self._name
                if self.is_auditor:
                    await self.audit()
                else:
                    self._note_unobserved()
                    self._keep_blocked(())  # the auditing process reports them
            except QuorumLogError as error:
                self._note_unobserved()
                log.warning("audit-put-off", extra={"why": error.detail})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._config.audit_s, self._config.lease_s / 3)):
                    await self._wake.wait()
            self._wake.clear()

    async def audit(self) -> None:
        """Runs one audit of lost members, drains and open ledgers."""
        triggers = self._triggers
        now = awake().time()
        self._lost.grace_s = self._steering.lost_bookie_delay_s
        found = await self._metadata.bookies()
        await self._hurry_repairs_for_returned(found.bookies)
        self.liveness_age_s = found.liveness_age_s
        share = self._config.lost_share_max
        if found.shows_absence(self._lost.grace_s) and is_believable(
            found.bookies, share_max=share
        ):
            self.lost = self._lost.update(found.bookies, now)
            for member in self.lost:
                if now - self._queued_at.get(member, float("-inf")) >= self._config.full_audit_s:
                    count = await self._queue_places_of(member)
                    if count:
                        log.warning("bookie-lost", extra={"bookie": member, "ledgers": count})
                    self._note_audited(self._queued_at, member, now, triggers)
        else:
            self._lost.note_unobserved(now)
        if not found.stale:
            await self._queue_drains(found.bookies)
        if not found.shows_absence(self._config.abandoned_s):
            self._note_unobserved(from_bookies=False)
        elif now >= self._open_check_due_at:
            begun = awake().time()
            is_silence_proven = found.shows_absence(self._config.silent_s)
            await self._check_open_ledgers(now, is_silence_proven=is_silence_proven)
            ended = awake().time()
            if triggers == self._triggers:
                self._open_check_due_at = ended + _pause_s(ended - begun)
        self.audits += 1
        self.audit_s = awake().time() - now

    def _note_unobserved(self, *, from_bookies: bool = True) -> None:
        """Records that writers (and bookies if `from_bookies`) can't be observed now (rule 21)."""
        now = awake().time()
        self._refused.note_unobserved(now)
        self._silent.note_unobserved(now)
        if from_bookies:
            self._lost.note_unobserved(now)

    def _note_audited(self, when: dict[str, float], member: str, at: float, triggers: int) -> None:
        """Stores `at` for a member in `when`, unless a full audit was triggered in the meantime."""
        if triggers == self._triggers:
            when[member] = at

    async def _hurry_repairs_for_returned(self, bookies: Iterable[BookieInfo]) -> None:
        """Retries waiting repairs at once if a bookie has returned that these repairs may need."""
        there = frozenset(bookie.id for bookie in bookies if bookie.state == "writable")
        if not there <= self._writable:
            await self._repairs.hurry()
        self._writable = there

    async def _queue_drains(self, bookies: Iterable[BookieInfo]) -> None:
        """Queues repairs of all entries of draining members, without a grace period. Each audit
        does so again, because a gateway with an outdated list may still choose the member.
        """
        clock = awake().time
        begun, triggers = clock(), self._triggers
        self.draining = tuple(bookie.id for bookie in bookies if bookie.state == "draining")
        due = [m for m in self.draining if begun >= self._drain_due_at.get(m, begun)]
        if not due:
            return
        queued = await self._queued_items()
        for member in due:
            count = await self._queue_places_of(member, but=queued)
            if count:
                log.info("drain-queued", extra={"bookie": member, "ledgers": count})
            await self._report_drain(member)
        ended = clock()
        again_at = ended + _pause_s(ended - begun)
        self._drain_due_at = {}
        for member in self.draining:
            self._note_audited(self._drain_due_at, member, again_at, triggers)

    async def _report_drain(self, member: str) -> None:
        """Logs that a drain has ended, or why it waits; skips a report that has not changed."""
        is_paused = self._steering.is_paused
        try:
            left = await drain_of(member_name(member), self._metadata, is_paused=is_paused)
        except NoSuchBookie:
            return  # an older database, without the bookie's cookie, was restored in the meantime
        reported = (left.why, left.ledgers, left.repairs)
        if self._reported_drains.get(member) == reported:
            return
        # Forget bookies that are no longer draining.
        kept = {each: was for each, was in self._reported_drains.items() if each in self.draining}
        self._reported_drains = kept | {member: reported}
        if left.done:
            log.info("drained", extra={"bookie": member})
        else:
            waits = left.model_dump(include={"ledgers", "repairs", "why"})
            log.info("drain-waits", extra={"bookie": member, **waits})

    async def _queued_items(self) -> frozenset[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        after: str | None = None
        while True:
            items, after = await self._repairs.list(after=after, limit=_PAGE)
            found += [(item.ledger_id, item.member) for item in items]
            if after is None:
                return frozenset(found)

    async def _queue_places_of(
        self, member: str, *, but: Container[tuple[int, str]] = frozenset()
    ) -> int:
        """Queues repairs of a member's entries in all ledgers; returns the number of ledgers. Skips
        the items in `but`: to queue an item again would end the lease of the item's worker.
        """
        count = 0
        items: list[RepairAdd] = []
        async for row in self._metadata.rows(bookie=member):
            ranges = tuple(limbo.places(row, member))
            if ranges and (row.ledger_id, member) not in but:
                items.append(
                    RepairAdd(
                        ledger_id=row.ledger_id,
                        member=member,
                        ranges=ranges,
                        survivors=survivors_of(row, self.lost),
                        moves=True,
                    )
                )
            if len(items) == _PAGE:
                count += len(items)
                await self._repairs.add(items)
                items = []
        count += len(items)
        await self._repairs.add(items)
        return count

    async def _check_open_ledgers(self, now: float, *, is_silence_proven: bool) -> None:
        # Keep only ids and writers: a ledger may have 16 KiB of custom metadata.
        open_ledgers = {
            row.ledger_id: row.writer async for row in self._metadata.rows(state=State.OPEN)
        }
        # Keep the order of the ledgers, so that a simulation's seed determines the order of the probes.
        writers = [*dict.fromkeys(writer for writer in open_ledgers.values() if writer)]
        answers = dict(
            zip(
                writers, await asyncio.gather(*map(self._writers.presence_of, writers)), strict=True
            )
        )
        gone: dict[Hashable, int] = {}
        silent: dict[Hashable, int] = {}
        for ledger_id, writer in open_ledgers.items():
            presence = WriterPresence.ALIVE if writer is None else answers[writer]
            if presence is WriterPresence.GONE:
                gone[ledger_id] = ledger_id
            if presence is not WriterPresence.ALIVE:
                # A refusal counts as silence too. If a writer alternated between refusals and
                # silence, its ledger would otherwise stay open.
                silent[ledger_id] = ledger_id
        stuck: dict[Hashable, int] = {
            (row.ledger_id, row.version): row.ledger_id
            async for row in self._metadata.rows(state=State.IN_RECOVERY)
        }
        self._keep_blocked({*open_ledgers, *stuck.values()})
        has_been_silent = frozenset(self._silent.expired(silent, now))
        if not is_silence_proven:
            # Rule 21: silence proves nothing until Redis has been up for the grace period of silent
            # writers, which is longer than the grace period of refusals.
            has_been_silent = frozenset()
        for ledger_id in dict.fromkeys(
            (*has_been_silent, *self._refused.expired(gone, now), *self._stuck.expired(stuck, now))
        ):
            if ledger_id not in self._recovering:
                self._recovering.add(ledger_id)
                is_enough = ledger_id in has_been_silent
                self._ports.tasks.start(self._recover(ledger_id, is_silence_enough=is_enough))

    async def _is_abandoned(self, row: LedgerMetadata, *, is_silence_enough: bool) -> bool:
        """Probes the writer again: whether it is gone, or silent if `is_silence_enough`."""
        if row.writer is None or row.state is not State.OPEN:
            return True
        presence = await self._writers.presence_of(row.writer)
        if is_silence_enough:
            return presence is not WriterPresence.ALIVE
        return presence is WriterPresence.GONE

    async def _recover(self, ledger_id: int, *, is_silence_enough: bool) -> None:
        try:
            async with self._recovery_slots:
                row = await self._metadata.get(ledger_id)
                if row.state is State.CLOSED:
                    self._ended(ledger_id)
                    return
                if not await self._is_abandoned(row, is_silence_enough=is_silence_enough):
                    return
                await recover(row, self._ports, deadline_s=_RECOVERY_S)
                self.recovered += 1
                self._ended(ledger_id)
        except QuorumLogError as error:
            self.blocked_count += 1
            self.blocked_ledgers.add(ledger_id)
            if len(self.blocked) < _BLOCKED_MAX or ledger_id in self.blocked:
                self.blocked[ledger_id] = error
            log.warning(
                "recovery-failed",
                extra={
                    "ledger": ledger_id,
                    "why": error.detail,
                    "bookie": error.bookie,
                    "entry": error.entry_id,
                },
            )
        finally:
            self._recovering.discard(ledger_id)

    def _ended(self, ledger_id: int) -> None:
        """Forgets a blocked recovery, because the ledger is CLOSED or deleted."""
        self.blocked.pop(ledger_id, None)
        self.blocked_ledgers.discard(ledger_id)

    def _keep_blocked(self, open_ledgers: Container[int]) -> None:
        """Forgets blocked recoveries of ledgers that other processes have closed or deleted."""
        for ledger_id in [each for each in self.blocked_ledgers if each not in open_ledgers]:
            self._ended(ledger_id)


def _pause_s(spent_s: float) -> float:
    """The pause, in seconds, after work that took `spent_s` seconds."""
    return min(_DRAIN_SHARE * spent_s, _PAUSE_MAX_S)
