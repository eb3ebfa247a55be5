"""Garbage collection: drop ledgers on proof, never on absence (rule 18).

A ledger's entries are dropped only if two reads of its metadata, a grace period apart, show that
the ledger is deleted (a tombstone), or CLOSED and without this bookie as a member. Missing metadata
without a tombstone raises an alarm. Nothing is dropped while the metadata service serves another
cluster's database, or a database that went back in time. As proof, the snapshot with the metadata
must have this bookie's witnesses (rule 18a) and the changes of its copies (rule 18c).

Ledgers are checked in pages, with one request to the metadata service for each page and check.

The bookie checks announced deletions, and scans for missed deletions. space.py frees segments.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Final

from quorumlog.errors import MetadataUnavailable
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import NO_ENTRY, member_name
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.row_copy import COPIES_KEPT, RowName
from quorumlog.wire.bodies import COPIES_PRESENTED_MAX, PROOFS_MAX, LedgerProof
from services.bookie.index import IndexRow
from services.bookie.space import Space
from services.bookie.store import Store
from services.bookie.witnesses import FreshCopies, witnesses_of

log = logging.getLogger(__name__)


LEDGERS_AT_ONCE: Final = 500
"""Number of ledgers listed in one turn of the event loop, which takes some 5 ms."""
SCAN_REST: Final = 10
SCAN_SHORT_S: Final = 0.1
"""After index scans longer than SCAN_SHORT_S, the next freeing of segments waits SCAN_REST times as
long, unless the bookie is read-only. Without the pause, a bookie with many small runs would scan
its index all the time. Chosen by judgement."""


class Disposal(Enum):
    """The parts of a ledger that this bookie is allowed to drop by the ledger's metadata."""

    KEEP = auto()
    DROP = auto()
    """The ledger has a tombstone."""
    DROP_KEEP_STUB = auto()
    """The ledger is CLOSED without this bookie: drop the entries, keep key and fence (rule 16)."""


Found = tuple[CasStatus, LedgerMetadata | None]
"""The metadata service's answer about a ledger; MISSING is a tombstone."""


class MetadataRows:
    """Reads the ledger metadata that garbage collection is based on."""

    def __init__(
        self, client: MetadataClient, keep: Callable[[tuple[str, ...]], None] | None = None
    ) -> None:
        """Reads through `client`. `keep` stores witnesses durably, and runs in a thread."""
        self._client = client
        self._keep = keep
        self._kept: tuple[str, ...] = client.witnesses
        self._lock = asyncio.Lock()
        """Serializes replacements of the file, because collector and heartbeat both cause them."""
        self.missing_count = 0
        """Number of times that a ledger's metadata was missing without a tombstone."""
        self.kept: set[int] = set()
        """Ledgers kept because the database lacks a change that this bookie has a copy of."""
        self._fresh = FreshCopies()
        self._holder = self._cluster_id = ""

    def present(self, fresh: FreshCopies, holder: str, cluster_id: str) -> None:
        """Make `confirm` present these copies from now on, for the member that stores them."""
        self._fresh, self._holder, self._cluster_id = fresh, holder, cluster_id

    async def read(self, held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        """Read ledgers' metadata from the primary; `held` lists the copies that the bookie stores.
        A ledger is UNKNOWN or omitted unless the answer proves that the database contains this
        bookie's witnesses and the changes of these copies.
        """
        try:
            proofs = await self._client.proofs(held, self._holder)
        except MetadataUnavailable:
            return {}
        return {ledger_id: self._found(proof) for ledger_id, proof in proofs.items()}

    def _found(self, proof: LedgerProof) -> Found:
        ledger_id = proof.ledger_id
        if proof.lost:
            if ledger_id not in self.kept:
                log.error("ledger-kept", extra={"ledger": ledger_id, "lost": proof.lost})
                self.kept.add(ledger_id)
            return CasStatus.UNKNOWN, None
        if proof.row is None and not proof.deleted:
            # Raise an alarm, but keep the ledger: a database that went back looks the same.
            log.error("row-missing", extra={"ledger": ledger_id})
            self.missing_count += 1
            return CasStatus.UNKNOWN, None
        self.kept.discard(ledger_id)
        if proof.row is None:
            return CasStatus.MISSING, None
        return CasStatus.OK, proof.row

    async def cluster_id(self) -> str:
        """The id of the cluster that the metadata belongs to."""
        return await self._client.cluster_id()

    async def confirm(self) -> None:
        """Exchange witnesses, present fresh copies, and store the current witnesses. Call this
        before a decision based on the database's answers. Raises: DatabaseWentBack.
        """
        await self._client.confirm()
        await self._keep_current()
        while attempts := self._fresh.newest(COPIES_PRESENTED_MAX):
            witnesses = witnesses_of(self._cluster_id, attempts)
            await self._client.confirm_copies(witnesses, self._holder)
            await self._keep_current()
            self._fresh.confirmed(attempts)
            if len(attempts) < COPIES_PRESENTED_MAX:
                break

    async def _keep_current(self) -> None:
        async with self._lock:
            witnesses = self._client.witnesses
            if self._keep is not None and witnesses != self._kept:
                await asyncio.to_thread(self._keep, witnesses)
                self._kept = witnesses

    async def ledgers_naming(self, bookie: str) -> set[int]:
        """Ledgers whose metadata names a bookie in any incarnation; only a hint, to save reads."""
        naming = await self._client.ledgers_naming(bookie)
        self.kept -= naming  # the bookie keeps these as a member
        return naming


@dataclass(eq=False)
class Collector:
    """Drops ledgers that no longer belong on this bookie. Invariant: a first check drops nothing."""

    _store: Store
    _rows: MetadataRows
    _cluster_id: str
    grace_s: float
    """The time between a ledger's checks."""
    space: InitVar[Space | None] = None
    """Frees the store's segments."""
    _candidates: dict[int, tuple[Disposal, float]] = field(default_factory=dict)
    """Disposal and time of the first check, for each ledger that this check found droppable."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes checks, so that a second check comes after the first."""
    _has_dropped: bool = True
    """True at startup too: ledgers dropped before a crash may have left segments behind."""
    _free_at: float = 0.0

    def __post_init__(self, space: Space | None) -> None:
        self._space = space or Space(self._store)

    async def round(self) -> None:
        """Check every ledger once, and free segments if a ledger was dropped."""
        async with self._lock:
            if not await self._is_own_cluster():
                return
            await self._rows.confirm()
            naming = await self._rows.ledgers_naming(member_name(self._store.me))
            rows: dict[int, IndexRow] = {}
            for number, (ledger_id, row) in enumerate(self._store.holdings.ledgers(), start=1):
                if number % LEDGERS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if ledger_id not in naming or row.copy_count > COPIES_KEPT:
                    rows[ledger_id] = row
                else:
                    self._candidates.pop(ledger_id, None)
            await self._examine(rows)
            await self._free_if_due()

    async def deletions_announced(self, ledger_ids: Iterable[int]) -> None:
        """Make the first check of ledgers announced as deleted, because an announcement is no
        proof. `recheck` makes the second check.
        """
        async with self._lock:
            rows = self._rows_here(each for each in ledger_ids if each not in self._candidates)
            if rows and await self._is_own_cluster():
                await self._examine(rows)

    async def recheck(self) -> None:
        """Make the second check of candidates whose first check was at least a grace period ago."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            due = [
                item for item, (_, since) in self._candidates.items() if now - since >= self.grace_s
            ]
            if not due or not await self._is_own_cluster():
                return
            await self._rows.confirm()
            rows = self._rows_here(due)
            for ledger_id in due:
                if ledger_id not in rows:
                    del self._candidates[ledger_id]
            await self._examine(rows)
            await self._free_if_due()

    def _rows_here(self, ledger_ids: Iterable[int]) -> dict[int, IndexRow]:
        """The index rows of these ledgers, except ledgers that this bookie does not have."""
        found = ((ledger_id, self._store.holdings.row(ledger_id)) for ledger_id in ledger_ids)
        return {ledger_id: row for ledger_id, row in found if row is not None}

    async def _is_own_cluster(self) -> bool:
        is_ours = await self._rows.cluster_id() == self._cluster_id
        if not is_ours:
            log.error("another-cluster", extra={"ours": self._cluster_id})
        return is_ours

    async def _examine(self, rows: Mapping[int, IndexRow]) -> None:
        """Check ledgers, page by page, and drop those whose second check confirms the first."""
        ledger_ids = list(rows)
        for at in range(0, len(ledger_ids), PROOFS_MAX):
            disposals = await self._disposals(ledger_ids[at : at + PROOFS_MAX])
            due = {
                ledger_id: disposal
                for ledger_id, disposal in disposals.items()
                if self._is_second_look(
                    ledger_id, disposal, is_stub=rows[ledger_id].highest == NO_ENTRY
                )
            }
            if due:
                await self._drop(due)
            for ledger_id in due:
                del self._candidates[ledger_id]

    def _is_second_look(self, ledger_id: int, disposal: Disposal, *, is_stub: bool) -> bool:
        """Record a check's result. True if a check a grace period ago had the same result."""
        now = asyncio.get_running_loop().time()
        if disposal is Disposal.KEEP or (disposal is Disposal.DROP_KEEP_STUB and is_stub):
            self._candidates.pop(ledger_id, None)
            return False
        known, since = self._candidates.get(ledger_id, (None, now))
        if known is not disposal:
            self._candidates[ledger_id] = (disposal, now)
            return False
        return now - since >= self.grace_s

    async def _free_if_due(self) -> None:
        loop, store = asyncio.get_running_loop(), self._store
        if not self._has_dropped or (loop.time() < self._free_at and not store.takes_no_adds):
            return
        self._has_dropped = False
        await self._space.free()
        scan_s = self._space.scan_s
        self._free_at = loop.time() + SCAN_REST * scan_s if scan_s > SCAN_SHORT_S else 0.0

    async def _drop(self, due: Mapping[int, Disposal]) -> None:
        """Drop the entries of a page of ledgers after a last check of their metadata.

        A repair names this bookie in the metadata before its first copy (rule 20). Reads and adds
        of the ledgers are withheld during the drop, so a repair that begins after the last check
        gets no answer until the entries are gone.
        """
        self._store.withheld.update(due)
        try:
            # No copy arrives between the check and the drops: nothing is awaited in between.
            for ledger_id, disposal in (await self._disposals(due)).items():
                if disposal is due[ledger_id]:
                    keep_stub = disposal is Disposal.DROP_KEEP_STUB
                    self._store.drop(ledger_id, keep_stub=keep_stub)
                    self._has_dropped = True
                    log.info("ledger-dropped", extra={"ledger": ledger_id, "stub": keep_stub})
        finally:
            self._store.withheld.difference_update(due)

    async def _disposals(self, ledger_ids: Iterable[int]) -> Mapping[int, Disposal]:
        """Check a page of ledgers once."""
        held = {item: self._store.holdings.row_names(item) for item in ledger_ids}
        found = await self._rows.read(held)
        unknown = (CasStatus.UNKNOWN, None)
        return {
            ledger_id: self._disposal(ledger_id, names, found.get(ledger_id, unknown))
            for ledger_id, names in held.items()
        }

    def _disposal(self, ledger_id: int, held: Sequence[RowName], found: Found) -> Disposal:
        """The disposal after a check; `held`: the copies that the check's request listed."""
        status, row = found
        if self._store.holdings.row_names(ledger_id) != held:
            return Disposal.KEEP  # a copy arrived meanwhile, and its change was not checked
        if status is CasStatus.MISSING:
            return Disposal.DROP
        if status is not CasStatus.OK or row is None:
            return Disposal.KEEP  # unknown, or lost without a tombstone: no proof
        if len(held) > COPIES_KEPT:
            self._store.forget_copies(ledger_id)
        members = {member_name(member) for member in row.all_members}
        if row.state is State.CLOSED and member_name(self._store.me) not in members:
            return Disposal.DROP_KEEP_STUB
        return Disposal.KEEP
