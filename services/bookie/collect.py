"""Garbage collection: drop ledgers on proof, never on absence (rule 18).

A ledger's entries are dropped only when the metadata service says twice, a grace period apart, that
the ledger is deleted (a tombstone), or that it is CLOSED and this bookie is no member of it. A
missing row without a tombstone raises an alarm. Nothing is dropped while the metadata service
serves another cluster's database, or one that went back in time: each row is read in one snapshot
with the witnesses that this bookie keeps over restarts (rule 18a), and with the changes of which it
holds copies (rule 18c).

The bookie follows announced tombstones; a periodic scan finds missed ones. space.py frees segments.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from quorumlog.errors import CopyLost, MetadataUnavailable, NoSuchLedger
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import NO_ENTRY, member_name
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.row_copy import COPIES_KEPT, RowName
from quorumlog.wire.bodies import COPIES_PRESENTED_MAX
from services.bookie.fresh import FreshCopies, witnesses_of
from services.bookie.index import IndexRow
from services.bookie.pace import Pace
from services.bookie.space import COMPACT_BYTES_PER_S, LIVE_SHARE_MIN, Space
from services.bookie.store import Store

log = logging.getLogger(__name__)


class Disposal(Enum):
    """What a ledger's row in the metadata service allows this bookie to do with its copy."""

    KEEP = auto()
    DROP = auto()
    """The ledger has a tombstone."""
    DROP_KEEP_STUB = auto()
    """The ledger is CLOSED without this bookie: the entries go, key and fence stay (rule 16)."""


class Rows(Protocol):
    """The queries that collection makes to the metadata service."""

    async def read(
        self, ledger_id: int, held: Sequence[RowName]
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary; UNKNOWN unless the database is proven to be the one
        that this bookie knows, and to contain the changes of the held copies of its rows.
        """

    async def cluster_id(self) -> str:
        """The cluster that the rows belong to."""

    async def confirm(self) -> None:
        """Learn which answers the database has given, and store the witnesses, before anything
        rests on them.

        Raises: DatabaseWentBack.
        """

    async def ledgers_naming(self, bookie: str) -> set[int]:
        """Ledgers whose rows name a bookie in any incarnation. Saves reads and proves nothing."""


class MetadataRows:
    """The rows of the metadata service."""

    def __init__(
        self, client: MetadataClient, keep: Callable[[tuple[str, ...]], None] | None = None
    ) -> None:
        """Reads through `client`. `keep` stores witnesses durably, and runs in a thread."""
        self._client = client
        self._keep = keep
        self._kept: tuple[str, ...] = client.witnesses
        self._lock = asyncio.Lock()
        """The collector and the heartbeat confirm concurrently: one at a time may replace the file."""
        self.missing_count = 0
        """Rows that were missing without a tombstone."""
        self.kept: set[int] = set()
        """Ledgers that this bookie keeps, since the database lacks a change of which it holds a copy."""
        self._fresh = FreshCopies()
        self._holder = self._cluster_id = ""

    def present(self, fresh: FreshCopies, holder: str, cluster_id: str) -> None:
        """From now on present these copies, and name their holder."""
        self._fresh, self._holder, self._cluster_id = fresh, holder, cluster_id

    async def read(
        self, ledger_id: int, held: Sequence[RowName]
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary."""
        try:
            row = await self._client.get(
                ledger_id, proof=True, held=held, holder=self._holder or None
            )
            self.kept.discard(ledger_id)
            return CasStatus.OK, row
        except CopyLost as error:
            if ledger_id not in self.kept:
                log.error("ledger-kept", extra={"ledger": ledger_id, "why": error.detail})  # noqa: TRY400
                self.kept.add(ledger_id)
            return CasStatus.UNKNOWN, None
        except NoSuchLedger as error:
            if error.members.get("deleted") is True:
                self.kept.discard(ledger_id)
                return CasStatus.MISSING, None
            # An alarm, not a proof: a database that went back in time looks like this.
            log.error("row-missing", extra={"ledger": ledger_id})  # noqa: TRY400
            self.missing_count += 1
            return CasStatus.UNKNOWN, None
        except MetadataUnavailable:
            return CasStatus.UNKNOWN, None

    async def cluster_id(self) -> str:
        """The cluster that the rows belong to."""
        return await self._client.cluster_id()

    async def confirm(self) -> None:
        """Exchange witnesses, present fresh copies, and store the current witnesses."""
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
        """Ledgers whose rows name a bookie."""
        naming = await self._client.ledgers_naming(bookie)
        self.kept -= naming  # as a member anyway
        return naming


class Collector:
    """Drops ledgers that no longer belong here. Invariant: a first look drops nothing."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        cluster_id: str,
        *,
        grace_s: float,
        live_share_min: float = LIVE_SHARE_MIN,
        bytes_per_s: int = COMPACT_BYTES_PER_S,
        pace: Pace | None = None,
    ) -> None:
        """`grace_s` passes between the first look at a row and the second."""
        self._space = Space(
            store, live_share_min=live_share_min, bytes_per_s=bytes_per_s, pace=pace
        )
        self._store = store
        self._rows = rows
        self._cluster_id = cluster_id
        self._grace_s = grace_s
        self._candidates: dict[int, tuple[Disposal, float]] = {}
        """Ledgers that the first look found droppable, with the disposal found and its time."""
        self._lock = asyncio.Lock()
        """Serializes looks, so that a second look comes after the first."""
        self._has_dropped = True
        """True at startup too: ledgers dropped before a crash may have left segments behind."""

    async def round(self) -> None:
        """Look at every ledger once, and free segments if a ledger was dropped."""
        async with self._lock:
            if not await self._is_own_cluster():
                return
            await self._rows.confirm()
            naming = await self._rows.ledgers_naming(member_name(self._store.me))
            for ledger_id, row in list(self._store.ledgers()):
                await self._examine(ledger_id, row, is_named=ledger_id in naming)
            await self._free_if_due()

    async def deletion_announced(self, ledger_id: int) -> None:
        """Take a first look at a ledger announced as deleted; the announcement itself is no proof.
        `recheck` takes the second look.
        """
        async with self._lock:
            row = self._store.row(ledger_id)
            if (
                row is not None
                and ledger_id not in self._candidates
                and await self._is_own_cluster()
            ):
                await self._examine(ledger_id, row, is_named=False)

    async def recheck(self) -> None:
        """Look again at candidates whose first look is at least a grace period ago."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            due = [
                item
                for item, (_, since) in self._candidates.items()
                if now - since >= self._grace_s
            ]
            if not due or not await self._is_own_cluster():
                return
            await self._rows.confirm()
            for ledger_id in due:
                row = self._store.row(ledger_id)
                if row is None:
                    del self._candidates[ledger_id]
                else:
                    await self._examine(ledger_id, row, is_named=False)
            await self._free_if_due()

    async def _is_own_cluster(self) -> bool:
        is_ours = await self._rows.cluster_id() == self._cluster_id
        if not is_ours:
            log.error("another-cluster", extra={"ours": self._cluster_id})
        return is_ours

    async def _examine(self, ledger_id: int, row: IndexRow, *, is_named: bool) -> None:
        disposal = Disposal.KEEP
        if not is_named or row.copy_count > COPIES_KEPT:
            disposal = await self._disposal(ledger_id)
        is_stub = row.highest == NO_ENTRY
        now = asyncio.get_running_loop().time()
        if disposal is Disposal.KEEP or (disposal is Disposal.DROP_KEEP_STUB and is_stub):
            self._candidates.pop(ledger_id, None)
            return
        known, since = self._candidates.get(ledger_id, (None, now))
        if known is not disposal:
            self._candidates[ledger_id] = (disposal, now)
        elif now - since >= self._grace_s:
            await self._drop(ledger_id, disposal)
            del self._candidates[ledger_id]

    async def _free_if_due(self) -> None:
        if self._has_dropped:
            self._has_dropped = False
            await self.free_segments()

    async def _drop(self, ledger_id: int, disposal: Disposal) -> None:
        """Drop a ledger's entries after a last look at its row.

        A repair names this bookie in the row before its first copy (rule 20). Reads and adds of
        the ledger are withheld meanwhile, so a repair that begins after the last look gets no
        answer until the entries are gone.
        """
        self._store.withhold(ledger_id, withheld=True)
        try:
            if await self._disposal(ledger_id) is disposal:
                keep_stub = disposal is Disposal.DROP_KEEP_STUB
                self._store.moves.drop(ledger_id, keep_stub=keep_stub)
                self._has_dropped = True
                log.info("ledger-dropped", extra={"ledger": ledger_id, "stub": keep_stub})
        finally:
            self._store.withhold(ledger_id, withheld=False)

    async def _disposal(self, ledger_id: int) -> Disposal:
        held = self._store.row_names(ledger_id)
        status, row = await self._rows.read(ledger_id, held)
        if self._store.row_names(ledger_id) != held:
            return Disposal.KEEP  # a copy came meanwhile, and nobody was asked about its change
        if status is CasStatus.MISSING:
            return Disposal.DROP
        if status is not CasStatus.OK or row is None:
            return Disposal.KEEP  # unknown, or lost without a tombstone: no proof
        self._store.moves.forget_copies(ledger_id)
        members = {member_name(member) for member in row.all_members}
        if row.state is State.CLOSED and member_name(self._store.me) not in members:
            return Disposal.DROP_KEEP_STUB
        return Disposal.KEEP

    async def free_segments(self) -> None:
        """Remove segments that no part references, and compact nearly empty ones."""
        await self._space.free()
