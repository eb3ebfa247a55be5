"""A cache of ledger metadata, which follows the stream of changes. After a gap in the stream, the
metadata on which this process relies is read again (rule 16a).

Cached metadata may be stale, so a negative answer requires a read from the primary (`fresh`). While
the metadata service is unavailable, reads use cached metadata.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from quorumlog import errors
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import HEADS_MAX

log = logging.getLogger(__name__)

Head = TypeVar("Head")

_RETRY_S: Final = 0.5
"""Pause after a failed reread. The failed request itself takes up to the client's deadline."""
_LOGGED_MAX: Final = 10
_ROWS_MAX: Final = 100_000
"""Maximum number of ledgers in the cache. A ledger with three members takes about 1 KiB (measured
with sys.getsizeof), so the cache takes at most 100 MB, plus custom metadata."""
_TEXT_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of cached custom metadata (by judgement); 100,000 ledgers may have 1.6 GB of it."""
_FRESH_S: Final = 0.5
"""Maximum wait of a read before it uses cached metadata instead (chosen by judgement)."""
_REQUESTS_MAX: Final = 32
"""Limit of the machines' concurrent requests, to protect Postgres (chosen by judgement)."""
_AWAY_PAUSE_S: Final = 1.0
"""After a failed read, cached metadata is used without a read for this long (by judgement)."""


@dataclass(slots=True)
class _PendingReads:
    """Running reads of one ledger's metadata, and the changes announced since they began."""

    count: int = 0
    version: int = 0
    has_gap: bool = False


@dataclass(eq=False)
class LedgerRows:
    """The cache of ledger metadata.

    Invariants: the cached version of a ledger never decreases; cached metadata is marked stale if a
    higher version was announced before or after the read.
    """

    _metadata: MetadataClient
    _changed: Callable[[int], None]
    """Callback that gets the id of each changed ledger."""
    _ended: Callable[[int], None]
    """Callback that gets the id of each ledger that is no longer OPEN."""
    on_gap: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that are called after a gap in the stream, which may have hidden changes."""
    on_log: list[Callable[[str], None]] = field(default_factory=list)
    """Callbacks that get the name of each changed log."""
    _rows: OrderedDict[int, LedgerMetadata] = field(default_factory=OrderedDict)
    _stale: set[int] = field(default_factory=set)
    """Ledgers whose cached metadata is older than an announced version."""
    _reads: dict[int, _PendingReads] = field(default_factory=dict)
    _text_bytes: int = 0
    _deleted: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _cached_until: float = 0.0

    async def follow(self) -> None:
        """Applies the stream of changes to the cache. Never returns."""
        async with contextlib.aclosing(self._metadata.changes()) as changes:
            async for change in changes:
                if change.kind == "gap":
                    self._stale.update(self._rows)
                    for reads in self._reads.values():
                        reads.has_gap = True
                    for ledger_id in list(self._rows):
                        self._changed(ledger_id)
                    for reread in self.on_gap:
                        reread()
                elif change.log is not None:
                    for heard in self.on_log:
                        heard(change.log)
                elif change.ledger_id is not None:
                    self._on_change(
                        change.ledger_id, change.version or 0, is_deleted=change.deleted
                    )
                    if change.deleted or change.state is not State.OPEN:
                        self._ended(change.ledger_id)

    def cached(self, ledger_id: int) -> LedgerMetadata | None:
        """The cached metadata, possibly stale; None if there is none."""
        return self._rows.get(ledger_id)

    def is_current(self, ledger_id: int) -> bool:
        """Whether the ledger's metadata is cached, and no higher version was announced."""
        return ledger_id in self._rows and ledger_id not in self._stale

    def put(self, row: LedgerMetadata) -> None:
        """Caches metadata that was read or written, unless a higher version is cached."""
        known = self._rows.get(row.ledger_id)
        if row.ledger_id in self._deleted or (known is not None and known.version > row.version):
            return
        self._forget(row.ledger_id)
        self._rows[row.ledger_id] = row
        self._text_bytes += _text_bytes(row)
        while len(self._rows) > _ROWS_MAX or self._text_bytes > _TEXT_BYTES_MAX:
            self._forget(next(iter(self._rows)))
        if known is None or known.version != row.version:
            self._changed(row.ledger_id)

    def _forget(self, ledger_id: int) -> None:
        row = self._rows.pop(ledger_id, None)
        self._text_bytes -= 0 if row is None else _text_bytes(row)
        self._stale.discard(ledger_id)

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether the ledger is known to be deleted."""
        return ledger_id in self._deleted

    def deleted(self, ledger_id: int) -> None:
        """Records that a ledger has a tombstone, so its id is never used again (rule 17)."""
        self._forget(ledger_id)
        self._deleted[ledger_id] = None
        if ledger_id in self._reads:
            # The answer to a running read may arrive after the cache evicted the tombstone.
            self._reads[ledger_id].has_gap = True
        if len(self._deleted) > _ROWS_MAX:
            self._deleted.popitem(last=False)
        self._changed(ledger_id)

    async def row(self, ledger_id: int, *, newer_than: int = 0) -> LedgerMetadata:
        """Returns the ledger's metadata, possibly slightly stale. With `newer_than`, reads from the
        primary unless a higher version is cached.

        Raises: NoSuchLedger, MetadataUnavailable if the metadata is not cached.
        """
        known = self._rows.get(ledger_id)
        if known is not None:
            if ledger_id not in self._stale and known.version > newer_than:
                return known
            loop = asyncio.get_running_loop()
            if loop.time() < self._cached_until:
                return known
            try:
                async with asyncio.timeout(_FRESH_S):
                    return await self.fresh(ledger_id)
            except (TimeoutError, errors.MetadataUnavailable):
                self._cached_until = loop.time() + _AWAY_PAUSE_S
                return known
        return await self.fresh(ledger_id)

    async def fresh(self, ledger_id: int) -> LedgerMetadata:
        """Reads the metadata from the primary. Raises: NoSuchLedger, MetadataUnavailable."""
        if ledger_id in self._deleted:
            raise errors.NoSuchLedger("this ledger was deleted", ledger_id=ledger_id, deleted=True)
        reads = self._reads.setdefault(ledger_id, _PendingReads())
        reads.count += 1
        try:
            row = await self._metadata.get(ledger_id)
        except errors.NoSuchLedger as error:
            if error.members.get("deleted") is True:
                self.deleted(ledger_id)
            raise
        finally:
            reads.count -= 1
            if not reads.count:
                del self._reads[ledger_id]
        self.put(row)
        if self._rows.get(ledger_id) is row and (reads.has_gap or row.version < reads.version):
            # A notification overtook this answer on another connection, and is not repeated.
            self._stale.add(ledger_id)
        return row

    async def fresh_closed(self, ledger_id: int) -> LedgerMetadata:
        """Reads from the primary the metadata of a ledger that was just closed. If the metadata is
        missing or not CLOSED, the database went back, and can't prove the outcome (rule 18a).

        Raises: NoSuchLedger if the ledger was deleted since, MetadataUnavailable, DatabaseWentBack.
        """
        try:
            row = await self.fresh(ledger_id)
        except errors.NoSuchLedger as error:
            if error.members.get("deleted") is True:
                raise
            known = "no such ledger"
        else:
            if is_closed(row):
                return row
            known = f"version {row.version}, {row.state}"
        raise went_back(ledger_id, "closed", known)

    async def require_deleted(self, ledger_id: int) -> None:
        """Checks that the database still has a deletion, before the client gets a response. The
        database may have been lost while bookies got copies of the deletion (rule 18e).

        Raises: MetadataUnavailable, DatabaseWentBack; both with the outcome unknown.
        """
        try:
            row = await self._metadata.get(ledger_id)
        except errors.NoSuchLedger as error:
            if error.members.get("deleted") is True:
                return
            known = "no such ledger"
        except errors.QuorumLogError as error:
            raise error.with_outcome(errors.UNKNOWN) from error
        else:
            known = f"version {row.version}, {row.state}"
        raise went_back(ledger_id, "deleted", known)

    def _on_change(self, ledger_id: int, version: int, *, is_deleted: bool) -> None:
        if is_deleted:
            self.deleted(ledger_id)
            return
        if ledger_id in self._reads:
            reads = self._reads[ledger_id]
            reads.version = max(reads.version, version)
        known = self._rows.get(ledger_id)
        if known is None:
            self._changed(ledger_id)
        elif known.version < version:
            self._stale.add(ledger_id)
            self._changed(ledger_id)


@dataclass(eq=False)
class Rereads(Generic[Head]):
    """Rereads the metadata of ledgers after a gap in the stream of changes.

    A write handle that missed its own replacement would continue to write entries that no reader
    sees. Metadata is read from the primary, in bulk and in the background. Appends continue
    meanwhile, because they need no metadata. The handle decides whether it must end.

    Invariant: a ledger stays wanted until the success of a request sent after its last `want`.
    """

    _live_ids: Callable[[], Iterable[int]]
    """Returns the ids of the ledgers on which this process relies."""
    _read: Callable[[Sequence[int]], Awaitable[Mapping[int, Head]]]
    """Reads the metadata of ledgers from the primary. Missing metadata is logged as an error, but
    the handle continues, because missing metadata proves nothing (rule 18)."""
    _apply: Callable[[Head], None]
    """Callback that gets each result."""
    _wanted: dict[int, int] = field(default_factory=dict)
    """For each wanted ledger: the number of requests that were sent before its last `want`."""
    _requests: int = 0
    _is_due: asyncio.Event = field(default_factory=asyncio.Event)
    gaps: int = 0
    """The number of gaps in the stream of changes so far."""

    @property
    def waiting(self) -> int:
        """The number of ledgers that wait for their reread."""
        return len(self._wanted)

    def gap(self) -> None:
        """Requests a reread of all ledgers in use, after a gap in the stream of changes."""
        self.gaps += 1
        for ledger_id in self._live_ids():
            self.want(ledger_id)

    def want(self, ledger_id: int) -> None:
        """Requests a reread of one ledger."""
        self._wanted[ledger_id] = self._requests
        self._is_due.set()

    async def run(self) -> None:
        """Performs requested rereads. Never returns."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._wanted:
                if not await self._read_some():
                    await asyncio.sleep(_RETRY_S)

    async def _read_some(self) -> bool:
        """Sends one request for up to `HEADS_MAX` ledgers; returns whether it succeeded."""
        asked = sorted(self._wanted)[:HEADS_MAX]
        self._requests += 1
        try:
            heads = await self._read(asked)
            for ledger_id in asked:
                if ledger_id in heads:
                    self._apply(heads[ledger_id])
        except errors.QuorumLogError as error:
            log.warning("rows-not-reread", extra={"rows": len(asked), "error": repr(error)})
            return False
        except Exception:
            # A defect must not end this task, on which the gateway depends.
            log.exception("rereading-broke")
            return False
        missing = [ledger_id for ledger_id in asked if ledger_id not in heads]
        if missing:
            log.error("rows-missing", extra={"rows": missing[:_LOGGED_MAX], "count": len(missing)})
        for ledger_id in asked:
            # A ledger that was wanted again meanwhile stays wanted: this answer may be older.
            if self._wanted[ledger_id] < self._requests:
                del self._wanted[ledger_id]
        return True


class ThrottledMetadata:
    """Limits the concurrent metadata requests of machines, because thousands of ledgers change
    their ensembles at once when a bookie dies. Implements `ports.MetadataPort`.
    """

    def __init__(self, metadata: MetadataClient) -> None:
        """`metadata`: the client that sends the requests."""
        self._metadata = metadata
        self._room = asyncio.Semaphore(_REQUESTS_MAX)
        self.ensemble_changes = 0
        """The number of ensemble changes. No other change by a machine leaves a ledger OPEN."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """Reads the metadata from the primary."""
        async with self._room:
            return await self._metadata.read(ledger_id)

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """Changes the metadata by compare-and-swap; returns once the outcome is known."""
        async with self._room:
            status, row = await self._metadata.cas(metadata, missed, attempt=attempt)
        if status is CasStatus.OK and metadata.state is State.OPEN:
            self.ensemble_changes += 1
        return status, row


def went_back(ledger_id: int, done: str, known: str) -> errors.DatabaseWentBack:
    """The error for a database that lacks an acknowledged change of a ledger."""
    return errors.DatabaseWentBack(
        f"the ledger was {done}, but the database now has {known}: rebuild the metadata",
        ledger_id=ledger_id,
        outcome=errors.UNKNOWN,
    )


def is_closed(row: LedgerMetadata) -> bool:
    """Whether the ledger's end is final."""
    return row.state is State.CLOSED


def _text_bytes(row: LedgerMetadata) -> int:
    """The size of a ledger's custom metadata, which may be much larger than all other metadata."""
    return sum(len(key) + len(value) for key, value in row.custom)
