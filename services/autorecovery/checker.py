"""Periodic checks of all ledgers' copies, and checks of single ledgers on request.

Before a repair is queued, the checker reads the metadata again, and asks the member again whether
it lacks the entries. Damage that bookies report is checked in the same way. The checker sends
members of CLOSED ledgers a copy of the metadata, because they may have missed a change (rule 18b).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from quorumlog.errors import NoSuchLedger, Overloaded, QuorumLogError
from quorumlog.net.directory import Directory
from quorumlog.net.driver import spread
from quorumlog.net.holdings import ask_bookie
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import Ports
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.limbo import places
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.repair_bodies import RepairAdd, repairs_of
from services.autorecovery.check import ReplicaCheck, ReplicaReport
from services.autorecovery.config import Config
from services.autorecovery.findings import KnownLosses, missing_zones

log = logging.getLogger(__name__)

_REQUESTED_MAX: Final = 4
"""Maximum number of concurrent checks on request (chosen by judgement)."""
_CHECKS_AT_ONCE: Final = 4
_ASK_S: Final = 10.0
_MISPLACED_MAX: Final = 10


@dataclass(eq=False)
class Checker:
    """Checks the copies of ledgers. Invariant: a member's silence never causes a repair."""

    _config: Config
    _metadata: MetadataClient
    _repairs: RepairClient
    _directory: Directory
    _session: aiohttp.ClientSession
    _losses: KnownLosses
    _ports: Ports

    def __post_init__(self) -> None:
        self._replicas = ReplicaCheck(self._directory, self._session)
        self._wake = asyncio.Event()
        self.checked = 0
        self.lacking = 0
        self.differing = 0
        self.unknown = 0
        self.misplaced: list[int] = []
        """Ids of the first ledgers that the last pass found in fewer zones than possible."""
        self.misplaced_count = 0
        self.pass_s = 0.0
        self._requested = 0
        self.is_passing = False
        """Whether a check of all ledgers is running."""
        self.pass_ledgers = 0
        """Number of ledgers checked so far by the running pass, or in total by the last pass."""
        self.former_ledgers: int | None = None
        """Number of ledgers in the last complete pass; None before the first pass."""

    def trigger(self) -> None:
        """Starts a check of all ledgers now."""
        self._wake.set()

    async def run(self, is_auditor: Callable[[], bool]) -> None:
        """Checks periodically while this process is the auditor. Never returns."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._config.check_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.damage_s):
                    await self._wake.wait()
            try:
                await self._recheck_losses()
                if self._wake.is_set() or (is_auditor() and clock() >= due):
                    self._wake.clear()
                    await self.check_all()
                    due = clock() + self._config.check_s
                elif is_auditor():
                    await self._check_damaged()
            except QuorumLogError as error:
                log.warning("check-put-off", extra={"why": error.detail})
            except Exception:
                # An unexpected error in one check must not end all checks.
                log.exception("check-failed")

    async def check_all(self) -> None:
        """Checks every ledger once, with `_CHECKS_AT_ONCE` concurrent checks."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        misplaced: list[int] = []
        running: set[asyncio.Task[Any]] = set()
        self.is_passing, self.pass_ledgers = True, 0
        try:
            async for row in self._metadata.rows():
                if missing_zones(row, self._directory.bookies):
                    misplaced.append(row.ledger_id)
                if len(running) >= _CHECKS_AT_ONCE:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running.add(asyncio.create_task(self._check_row(row)))
            if running:
                await asyncio.wait(running)
            self.former_ledgers = self.pass_ledgers
        finally:
            self.is_passing = False
            for task in running:
                task.cancel()
        self.misplaced, self.misplaced_count = misplaced[:_MISPLACED_MAX], len(misplaced)
        self.pass_s = clock() - begun
        log.info("all-checked", extra={"took_s": round(self.pass_s, 3), "lacking": self.lacking})

    async def verify_on_request(self, ledger_id: int, *, queue: bool) -> ReplicaReport:
        """Runs `verify` for a caller of the API. Concurrent checks are limited, because each check
        reads all copies. Raises: Overloaded if `_REQUESTED_MAX` requested checks already run.
        """
        if self._requested >= _REQUESTED_MAX:
            raise Overloaded(f"{_REQUESTED_MAX} requested checks already run: retry later")
        self._requested += 1
        try:
            return await self.verify(ledger_id, queue=queue)
        finally:
            self._requested -= 1

    async def verify(self, ledger_id: int, *, queue: bool) -> ReplicaReport:
        """Checks one ledger now; queues the repairs if `queue` is true. Raises: NoSuchLedger,
        MetadataUnavailable.
        """
        return await self._verify(await self._metadata.get(ledger_id), queue=queue)

    async def _check_row(self, row: LedgerMetadata) -> None:
        try:
            report = await self._verify(row, queue=True)
        except NoSuchLedger:
            return
        except QuorumLogError as error:
            log.warning("check-put-off", extra={"ledger": row.ledger_id, "why": error.detail})
            return
        except Exception:
            log.exception("check-failed", extra={"ledger": row.ledger_id})
            return
        finally:
            self.pass_ledgers += 1
        self.checked += 1
        self.lacking += len(report.lacks)
        self.differing += len(report.differing)
        self.unknown += len(report.silent)

    async def _verify(self, row: LedgerMetadata, *, queue: bool) -> ReplicaReport:
        if queue:
            await self._queue_placed(row)
        if queue and row.state is State.CLOSED:
            # Don't query members first, because a member that has the copy writes nothing.
            await spread(row, self._ports)
        report = await self._replicas.check(row)
        report.lost = await self._losses.recheck(row, tuple(report.suspects))
        if report.lacks:
            # The ledger may have been repaired, moved or deleted since the metadata was read.
            row = await self._metadata.get(row.ledger_id)
            report.lacks = await self._replicas.recheck(row, report.lacks)
        if report.lacks and queue:
            lacks = ((lack.member, lack.first, lack.last) for lack in report.lacks)
            await self._repairs.add(repairs_of(row.ledger_id, lacks))
        for lack in report.lacks:
            log.warning(
                "entries-lacking",
                extra={
                    "ledger": row.ledger_id,
                    "bookie": lack.member,
                    "first": lack.first,
                    "last": lack.last,
                    "why": lack.why,
                },
            )
        for first, last in report.differing:
            log.error(
                "copies-differ", extra={"ledger": row.ledger_id, "first": first, "last": last}
            )
        return report

    async def _queue_placed(self, row: LedgerMetadata) -> None:
        """Queues repairs that lack only their last step (rule 20b). After a rebuild of the
        database, the queue may lack such repairs, and the replaced member would be kept for ever.
        """
        targets = {repair.target for repair in row.placed_repairs}
        if targets:
            await self._repairs.add(
                [
                    RepairAdd(
                        ledger_id=row.ledger_id, member=target, ranges=tuple(places(row, target))
                    )
                    for target in sorted(targets)
                ]
            )

    async def _recheck_losses(self) -> None:
        """Checks known losses again; an operator may have accepted a loss or restored a copy."""
        for ledger_id in self._losses.oldest:
            try:
                await self._losses.recheck(await self._metadata.get(ledger_id), ())
            except NoSuchLedger:
                self._losses.forget(ledger_id)

    async def _check_damaged(self) -> None:
        """Checks the ledgers for which a bookie reports unreadable entries."""
        for bookie in self._directory.bookies:
            if bookie.state == "lost":
                continue
            name, url = member_name(bookie.id), f"{bookie.url}/v1/damage"
            found = await ask_bookie(self._session, name, url, dict[str, Any], limit_s=_ASK_S)
            damaged: set[int] = set()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                damaged = {int(item["ledger_id"]) for item in (found or {})["entries"]}
            for ledger_id in sorted(damaged):
                with contextlib.suppress(NoSuchLedger):
                    await self.verify(ledger_id, queue=True)
