"""Ledgers in limbo (BP-46): what a new incarnation of this bookie may have lost, until it is here.

Phase one comes before the bookie registers: each ledger that metadata places at an older
incarnation is marked, durably. From then on it serves what it has of them and denies nothing.
Where a recovery has begun or ended it is fenced too. An OPEN ledger needs no fence: a recovery
marks the row before it fences, so none was lost, and its writer may go on through the new
incarnation (rule 15).

Phase two runs while the bookie serves: autorecovery, which alone may check authentication codes
(rule 30), copies what is missing and puts the new incarnation in the old one's place. This bookie
asks for that, and ends the limbo of a ledger when no fragment names an older incarnation and its
index holds all that metadata expects here.

A row may come to name an older incarnation after phase one has passed it, or after its limbo has ended:
what was under way for that name ends late. Nothing is marked then, nor need be: asked by that name the
bookie denies nothing and takes no normal add (rule 15, ADR 7), and the place moves as any old place does,
after all was read back (rule 20a). That is also why a count of the index is enough at the end: who took
the place of an older incarnation was read back, and what came to the new one by its own name it acknowledged.

Both begin again after a crash: the mark `limbo` in the directory says that there is something left.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from quorumlog.errors import QuorumLogError
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.repair_client import RepairClient
from quorumlog.protocol import limbo
from quorumlog.protocol.ids import ID_MAX, member_name
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import Ranges
from quorumlog.wire.repair_bodies import RepairAdd
from services.bookie.segments import sync_directory, write_durably
from services.bookie.store import Store

log = logging.getLogger(__name__)

_PAGE: Final = 1000
_MARK: Final = "limbo"
_CHECK_ENTRIES: Final = 10_000
"""Looked at in one go; others have the loop in between."""
_REST: Final = 10
"""A round is followed by a rest of so many times its own length: it reads every row that names
this bookie."""
_RANGES_MAX: Final = 1000
_AGAIN_S: Final = 600.0
"""Until what is in limbo still is queued once more: a repair may take long, and queueing it again
takes it from its worker."""


class Rows(Protocol):
    """What is asked of the metadata service."""

    def placed_here(self, bookie: str) -> AsyncIterator[list[LedgerMetadata]]:
        """The rows that name a bookie in any incarnation, page by page."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A row, from the primary."""

    async def queue(self, items: list[RepairAdd]) -> None:
        """Have autorecovery see to it."""


class PlacedRows:
    """The metadata service."""

    def __init__(self, client: MetadataClient, bookie: str) -> None:
        """Asks through `client`."""
        self._client = client
        self._repairs = RepairClient(client, bookie)

    async def placed_here(self, bookie: str) -> AsyncIterator[list[LedgerMetadata]]:
        """The rows that name a bookie."""
        after: int | None = None
        while True:
            rows, after = await self._client.list(bookie=bookie, after=after, limit=_PAGE)
            yield rows
            if after is None:
                return

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A row, from the primary. Negatives rest on it from then on, so it is of the database
        that this bookie knows (rule 18a).
        """
        return await self._client.read(ledger_id, proof=True)

    async def queue(self, items: list[RepairAdd]) -> None:
        """Add to the repair queue."""
        await self._repairs.add(items)


@dataclass(slots=True)
class Progress:
    """How far it is, since this process began."""

    ledgers: int = 0
    """In limbo now."""
    cleared: int = 0
    checked_entries: int = 0
    """Of ledgers whose limbo ended: all that metadata expects here."""
    missing_entries: int = 0
    """Found missing by such a check, and queued."""


class Limbo:
    """Marks what may be lost, and sees that it comes back.

    Invariants (I27): a ledger leaves limbo only when no fragment names an older incarnation of
    this bookie and every entry of its closed fragments' write sets is in the index; the mark in
    the directory is there whenever a ledger is in limbo.
    """

    def __init__(self, store: Store, rows: Rows, *, rest_s: float) -> None:
        """`rest_s`: the least time between two rounds of phase two."""
        self._store = store
        self._rows = rows
        self._rest_s = rest_s
        self._queued_at: dict[tuple[int, bool], float] = {}
        self.progress = Progress()

    @property
    def _mark(self) -> Path:
        return self._store.directory / _MARK

    # --- phase one ---------------------------------------------------------------------------

    async def enter(self) -> None:
        """Mark every ledger that is placed at an older incarnation; on disk when it returns.

        Raises: MetadataUnavailable.
        """
        store, me = self._store, self._store.me
        write_durably(self._mark, me.encode())
        count = 0
        async for rows in self._rows.placed_here(member_name(me)):
            lost = [row for row in rows if limbo.older_members(row, me)]
            await asyncio.gather(*map(self._enter, lost))
            count += len(lost)
            await store.checkpoint()
            store.holdings.trim()
        self.progress.ledgers = count
        log.warning("limbo-entered", extra={"member": me, "ledgers": count})

    async def _enter(self, row: LedgerMetadata) -> None:
        is_fenced = row.state is not State.OPEN
        await self._store.enter_limbo(row.ledger_id, row.ledger_key, is_fenced=is_fenced)

    # --- phase two ---------------------------------------------------------------------------

    async def run(self) -> None:
        """See to it until nothing is in limbo."""
        clock = asyncio.get_running_loop().time
        while self._mark.exists():
            begun = clock()
            try:
                await self.round()
            except QuorumLogError as error:
                log.warning("limbo-put-off", extra={"why": error.detail})
            except Exception:
                # Nothing leaves limbo without proof; the next round tries again.
                log.exception("limbo-failed")
            if self._mark.exists():
                await asyncio.sleep(max(self._rest_s, _REST * (clock() - begun)))

    async def round(self) -> None:
        """Look once at every ledger that is in limbo."""
        left = {ledger_id async for ledger_id in self._in_limbo()}
        before, self.progress.ledgers = self.progress.ledgers, len(left)
        waiting: set[int] = set()
        async for rows in self._rows.placed_here(member_name(self._store.me)):
            lost = [
                row
                for row in rows
                if row.ledger_id in left and limbo.older_members(row, self._store.me)
            ]
            await self._ask_for(lost)
            waiting.update(row.ledger_id for row in lost)
        for ledger_id in sorted(left - waiting):
            await self._try_to_end(ledger_id)
        if self.progress.ledgers == 0:
            self._mark.unlink(missing_ok=True)
            sync_directory(self._store.directory)
            log.info("limbo-ended", extra={"member": self._store.me})
        elif self.progress.ledgers != before:
            log.info("limbo", extra={"ledgers": self.progress.ledgers})

    async def _in_limbo(self) -> AsyncIterator[int]:
        for number, (ledger_id, row) in enumerate(self._store.ledgers()):
            if row.is_limbo:
                yield ledger_id
            if number % _PAGE == _PAGE - 1:
                await asyncio.sleep(0)

    async def _ask_for(self, rows: list[LedgerMetadata]) -> None:
        """Queue what older incarnations are still named for, now and then."""
        due = [row for row in rows if self._is_due((row.ledger_id, False))]
        items = [
            RepairAdd(
                ledger_id=row.ledger_id, member=member, ranges=tuple(limbo.places(row, member))
            )
            for row in due
            for member in limbo.older_members(row, self._store.me)
        ]
        if items:
            await self._rows.queue(items)
        self._note([(row.ledger_id, False) for row in due])

    def _is_due(self, key: tuple[int, bool]) -> bool:
        """Whether a ledger is to be queued (again), for older incarnations or (True) for us."""
        now = asyncio.get_running_loop().time()
        return now - self._queued_at.get(key, float("-inf")) >= _AGAIN_S

    def _note(self, keys: list[tuple[int, bool]]) -> None:
        """These were queued just now."""
        now = asyncio.get_running_loop().time()
        self._queued_at.update(dict.fromkeys(keys, now))

    async def _try_to_end(self, ledger_id: int) -> None:
        """End the limbo of a ledger if all is here that should be."""
        checked = 0
        missing: Ranges = ()
        status, row = await self._rows.read(ledger_id)
        if status is not CasStatus.MISSING:  # with a tombstone nobody asks for it any more
            if row is None or limbo.older_members(row, self._store.me):
                return
            checked, missing = await self._missing(row)
        if not missing:
            for is_own in (False, True):
                self._queued_at.pop((ledger_id, is_own), None)
            await self._store.leave_limbo(ledger_id)
            self.progress.ledgers -= 1
            self.progress.cleared += 1
            self.progress.checked_entries += checked
            return
        if self._is_due((ledger_id, True)):
            item = RepairAdd(ledger_id=ledger_id, member=self._store.me, ranges=missing)
            await self._rows.queue([item])
            self._note([(ledger_id, True)])
            count = sum(last - first + 1 for first, last in missing)
            self.progress.missing_entries += count
            log.warning("limbo-incomplete", extra={"ledger": ledger_id, "missing": count})

    async def _missing(self, row: LedgerMetadata) -> tuple[int, Ranges]:
        """How many entries metadata expects here, and which of them are not; of a ledger that
        lacks much only the first ranges.
        """
        checked = 0
        missing: list[tuple[int, int]] = []
        for position, first, last in limbo.expected(row, self._store.me):
            for low in range(first, last + 1, _CHECK_ENTRIES):
                high = min(last, low + _CHECK_ENTRIES - 1)
                held = await self._store.holdings.ranges(row.ledger_id, low, high, ID_MAX)
                missing += limbo.lacking(row, position, low, high, held)
                checked += limbo.share(row, position, low, high)
                if len(missing) >= _RANGES_MAX:
                    return checked, tuple(missing[:_RANGES_MAX])
        return checked, tuple(missing)
