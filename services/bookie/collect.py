"""Space comes back: on proof, not on absence (rule 18), and by whole segments.

A ledger's entries are given up only when the metadata service says twice, a grace apart, that the
ledger is deleted (a tombstone), or that it is CLOSED and this bookie is no member of it. A row that
is missing without a tombstone is an alarm. Another cluster's database stops everything, and so does one
that went back: each row is read in one snapshot with what this bookie knows that the database has
answered, which the bookie keeps over its restarts (rule 18a).

Tombstones are followed as they are announced; a scan from time to time is the net under that. How
segments are then given back stands in space.py.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from quorumlog.errors import MetadataUnavailable, NoSuchLedger
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import NO_ENTRY, member_name
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.bookie.index import LedgerRow
from services.bookie.pace import Pace
from services.bookie.space import COMPACT_BYTES_PER_S, LIVE_SHARE_MIN, Space
from services.bookie.store import Store

log = logging.getLogger(__name__)


class Rows(Protocol):
    """What is asked of the metadata service."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary; UNKNOWN unless the database is proven to be the one
        that this bookie knows.
        """

    async def cluster_id(self) -> str:
        """Whose rows these are."""

    async def confirm(self) -> None:
        """Learn what the database has answered, and keep it, before anything rests on that.

        Raises: DatabaseWentBack.
        """

    async def named(self, bookie: str) -> set[int]:
        """Ledgers that name a bookie, in any incarnation. Only saves reads: it proves nothing."""


class MetadataRows:
    """The rows of the metadata service."""

    def __init__(
        self, client: MetadataClient, keep: Callable[[tuple[str, ...]], None] | None = None
    ) -> None:
        """Asks through `client`. `keep` stores witnesses durably, in a thread."""
        self._client = client
        self._keep = keep
        self._kept: tuple[str, ...] = client.witnesses
        self._one = asyncio.Lock()
        """The collector and the heartbeat confirm at once: one replaces the file at a time."""
        self.missing_count = 0
        """Rows that were not there, without a tombstone."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's row, from the primary."""
        try:
            return CasStatus.OK, await self._client.get(ledger_id, proof=True)
        except NoSuchLedger as error:
            if error.members.get("deleted") is True:
                return CasStatus.MISSING, None
            # An alarm, and no proof of anything: a database that went back looks like this.
            log.error("row-missing", extra={"ledger": ledger_id})  # noqa: TRY400
            self.missing_count += 1
            return CasStatus.UNKNOWN, None
        except MetadataUnavailable:
            return CasStatus.UNKNOWN, None

    async def cluster_id(self) -> str:
        """Whose rows these are."""
        return await self._client.cluster_id()

    async def confirm(self) -> None:
        """Exchange witnesses, and keep what stands for them now."""
        await self._client.confirm()
        async with self._one:
            witnesses = self._client.witnesses
            if self._keep is not None and witnesses != self._kept:
                await asyncio.to_thread(self._keep, witnesses)
                self._kept = witnesses

    async def named(self, bookie: str) -> set[int]:
        """Ledgers that name a bookie."""
        found: set[int] = set()
        after: int | None = None
        while True:
            rows, after = await self._client.list(bookie=bookie, after=after, limit=1000)
            found.update(row.ledger_id for row in rows)
            if after is None:
                return found


class Collector:
    """Gives up what nobody needs. Invariant: nothing is dropped on a first look."""

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
        """`grace_s` passes between the two looks."""
        self._space = Space(
            store, live_share_min=live_share_min, bytes_per_s=bytes_per_s, pace=pace
        )
        self._store = store
        self._rows = rows
        self._cluster_id = cluster_id
        self._grace_s = grace_s
        self._seen: dict[int, tuple[bool | None, float]] = {}
        """Ledgers that looked needless: whether a stub is to be kept, and since when."""
        self._one = asyncio.Lock()
        """Looks come one after another, so that a second one is a second one."""
        self._is_space_due = True
        """Also at a start: what was dropped before a crash left segments behind."""

    async def round(self) -> None:
        """Look at every ledger once, and give up segments if something was dropped."""
        async with self._one:
            if not await self._is_our_cluster():
                return
            await self._rows.confirm()
            named = await self._rows.named(member_name(self._store.me))
            for ledger_id, row in list(self._store.ledgers()):
                await self._look(ledger_id, row, is_named=ledger_id in named)
            await self._free()

    async def announced(self, ledger_id: int) -> None:
        """A ledger is said to be deleted: a first look, and no proof. `settle` looks again."""
        async with self._one:
            row = self._store.row(ledger_id)
            if row is not None and ledger_id not in self._seen and await self._is_our_cluster():
                await self._look(ledger_id, row, is_named=False)

    async def settle(self) -> None:
        """Look again at ledgers whose first look is a grace ago."""
        async with self._one:
            now = asyncio.get_running_loop().time()
            due = [item for item, (_, since) in self._seen.items() if now - since >= self._grace_s]
            if not due or not await self._is_our_cluster():
                return
            await self._rows.confirm()
            for ledger_id in due:
                row = self._store.row(ledger_id)
                if row is None:
                    del self._seen[ledger_id]
                else:
                    await self._look(ledger_id, row, is_named=False)
            await self._free()

    async def _is_our_cluster(self) -> bool:
        is_ours = await self._rows.cluster_id() == self._cluster_id
        if not is_ours:
            log.error("another-cluster", extra={"ours": self._cluster_id})
        return is_ours

    async def _look(self, ledger_id: int, row: LedgerRow, *, is_named: bool) -> None:
        keep_stub = None if is_named else await self._verdict(ledger_id)
        is_stub = row.highest == NO_ENTRY
        now = asyncio.get_running_loop().time()
        if keep_stub is None or (keep_stub and is_stub):
            self._seen.pop(ledger_id, None)
            return
        looked, since = self._seen.get(ledger_id, (None, now))
        if looked is not keep_stub:
            self._seen[ledger_id] = (keep_stub, now)
        elif now - since >= self._grace_s:
            await self._drop(ledger_id, keep_stub=keep_stub)
            del self._seen[ledger_id]

    async def _free(self) -> None:
        if self._is_space_due:
            self._is_space_due = False
            await self.free_segments()

    async def _drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Give up a ledger's entries, if they are needless still. A repair names this bookie
        before its first byte (rule 20), so one that comes after this look is not answered until
        the entries are gone.
        """
        self._store.leave(ledger_id, leaving=True)
        try:
            if await self._verdict(ledger_id) is keep_stub:
                self._store.drop(ledger_id, keep_stub=keep_stub)
                self._is_space_due = True
                log.info("ledger-dropped", extra={"ledger": ledger_id, "stub": keep_stub})
        finally:
            self._store.leave(ledger_id, leaving=False)

    async def _verdict(self, ledger_id: int) -> bool | None:
        """None: keep it. False: it is deleted. True: give up the entries, keep the stub."""
        status, row = await self._rows.read(ledger_id)
        if status is CasStatus.MISSING:
            return False
        if status is not CasStatus.OK or row is None:
            return None  # unknown, or lost without a tombstone: no proof
        names = {member_name(member) for member in row.all_members}
        if row.state is State.CLOSED and member_name(self._store.me) not in names:
            return True
        return None

    async def free_segments(self) -> None:
        """Remove segments that nothing names, and compact those of which little is left."""
        await self._space.free()
