"""Ledger rows: a cache that follows the stream of changes, and rereads of the rows on which this process relies after a gap
in the stream (rule 16a).

A cached row may be old, so it proves no absence: negative answers need a read of the primary
(`fresh`). While the metadata service is away, cached rows serve.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from quorumlog import errors
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import HEADS_MAX

log = logging.getLogger(__name__)

Key = TypeVar("Key", int, str)
Head = TypeVar("Head")

_RETRY_S: Final = 0.5
"""Pause between tries to reread without metadata; each try also takes its client's deadline."""
_LOGGED_MAX: Final = 10
_ROWS_MAX: Final = 100_000
"""A row of three members takes about 1 KiB, so at most 100 MB (measured with sys.getsizeof) and what clients keep
in the rows."""
_TEXT_BYTES_MAX: Final = 16 << 20
"""Custom metadata of cached rows: a ledger may have 16 KiB, so 100,000 rows could hold 1.6 GB (taste)."""
_FRESH_S: Final = 0.5
"""How long a read waits for metadata if it has an old row to fall back on (taste)."""
_REQUESTS_MAX: Final = 32
"""Above the parallelism of one Postgres, below what hurts it (taste)."""
_AWAY_PAUSE_S: Final = 1.0
"""After the metadata service did not answer, old rows serve at once for this long (taste)."""


@dataclass(slots=True)
class _PendingReads:
    """Reads of one row from the primary that are under way, and the changes heard meanwhile."""

    count: int = 0
    version: int = 0
    has_gap: bool = False


class LedgerRows:
    """The cache.

    Invariants: a cached row never goes back to a lower version; a row older than a version heard
    of, before or after it was read, is stale.
    """

    def __init__(
        self,
        metadata: MetadataClient,
        changed: Callable[[int], None],
        ended: Callable[[int], None],
    ) -> None:
        """`changed` gets ledgers whose row changed, `ended` those that are not OPEN any more."""
        self._metadata = metadata
        self._changed = changed
        self._ended = ended
        self.on_gap: list[Callable[[], None]] = []
        """Called when changes may have been missed."""
        self._rows: OrderedDict[int, LedgerMetadata] = OrderedDict()
        self._stale: set[int] = set()
        """Rows older than a version heard of."""
        self._reads: dict[int, _PendingReads] = {}
        self._text_bytes = 0
        self._deleted: OrderedDict[int, None] = OrderedDict()
        self._cached_until = 0.0

    async def follow(self) -> None:
        """Follow the stream of changes, for ever."""
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
                elif change.ledger_id is not None:
                    self._on_change(
                        change.ledger_id, change.version or 0, is_deleted=change.deleted
                    )
                    if change.deleted or change.state is not State.OPEN:
                        self._ended(change.ledger_id)

    def cached(self, ledger_id: int) -> LedgerMetadata | None:
        """The last known row."""
        return self._rows.get(ledger_id)

    def is_current(self, ledger_id: int) -> bool:
        """Whether the row is known, and none of a higher version was heard of."""
        return ledger_id in self._rows and ledger_id not in self._stale

    def put(self, row: LedgerMetadata) -> None:
        """Cache a row that was read or written."""
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
        """The ledger has a tombstone and never comes back (rule 17)."""
        self._forget(ledger_id)
        self._deleted[ledger_id] = None
        if ledger_id in self._reads:
            # Its answer may come when the tombstone is remembered no more.
            self._reads[ledger_id].has_gap = True
        if len(self._deleted) > _ROWS_MAX:
            self._deleted.popitem(last=False)
        self._changed(ledger_id)

    async def row(self, ledger_id: int, *, newer_than: int = 0) -> LedgerMetadata:
        """The row, possibly some moments old; with `newer_than`, of a higher version if there is
        one.

        Raises: NoSuchLedger, MetadataUnavailable if it was never known here.
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
        """The row from the primary. Raises: NoSuchLedger, MetadataUnavailable."""
        if ledger_id in self._deleted:
            raise errors.NoSuchLedger("the ledger was deleted", ledger_id=ledger_id, deleted=True)
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
            # The notification overtook the answer, on another connection, and is not repeated.
            self._stale.add(ledger_id)
        return row

    async def fresh_closed(self, ledger_id: int) -> LedgerMetadata:
        """The row from the primary, of a ledger that somebody just closed. The outcome of a close is
        never told by a row from before the close, nor by its absence (rule 18a).

        Raises: NoSuchLedger where it was deleted since, MetadataUnavailable, DatabaseWentBack.
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
        """Look once more whether the database has a deletion that members were told of, before a client is told: the
        answer to it may be of a database that was lost since (rule 18e).

        Raises: MetadataUnavailable and DatabaseWentBack, whose outcome is unknown.
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


class Rereads(Generic[Key, Head]):
    """The rows of ledgers or logs to reread after a gap in the stream of changes.

    A write handle or a log's owner that missed the change by which it was superseded would go on writing to a
    ledger or log that nobody reads any more. All rows are read from the primary, in bulk and in the background.
    Appends go on meanwhile, since writing an open ledger needs no metadata. The handle or owner judges its row.

    Invariant: a key stays wanted until its row was read by a request that began after
    the key became wanted.
    """

    def __init__(
        self,
        live_keys: Callable[[], Iterable[Key]],
        read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]],
        apply: Callable[[Head], None],
    ) -> None:
        """`live_keys` gives the keys of all rows on which this process relies; `read` asks the primary,
        and `apply` gets each row. A missing row is logged as an error and proves nothing: its handle or owner goes
        on (rule 18).
        """
        self._live_keys: Callable[[], Iterable[Key]] = live_keys
        self._read: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Head]]] = read
        self._apply: Callable[[Head], None] = apply
        self._wanted: dict[Key, int] = {}
        """Each key with the number of the request before or during which it became wanted."""
        self._requests = 0
        self._is_due = asyncio.Event()
        self.gaps = 0
        """Gaps in the stream of changes so far."""

    @property
    def waiting(self) -> int:
        """Rows to reread."""
        return len(self._wanted)

    def gap(self) -> None:
        """Reread every row: changes may have been missed."""
        self.gaps += 1
        for key in self._live_keys():
            self.want(key)

    def want(self, key: Key) -> None:
        """Reread one row."""
        self._wanted[key] = self._requests
        self._is_due.set()

    async def run(self) -> None:
        """Reread wanted rows for ever."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._wanted:
                if not await self._read_some():
                    await asyncio.sleep(_RETRY_S)

    async def _read_some(self) -> bool:
        """Send one request; False if it failed."""
        asked = sorted(self._wanted)[:HEADS_MAX]
        self._requests += 1
        try:
            heads = await self._read(asked)
            for key in asked:
                if key in heads:
                    self._apply(heads[key])
        except errors.QuorumLogError as error:
            log.warning("rows-not-reread", extra={"rows": len(asked), "error": repr(error)})
            return False
        except Exception:
            # A bug must not end a task that the gateway depends on.
            log.exception("rereading-broke")
            return False
        missing = [key for key in asked if key not in heads]
        if missing:
            log.error("rows-missing", extra={"rows": missing[:_LOGGED_MAX], "count": len(missing)})
        for key in asked:
            # A key that became wanted meanwhile stays: this answer may be older.
            if self._wanted[key] < self._requests:
                del self._wanted[key]
        return True


class ThrottledMetadata:
    """Machines' requests for rows, a few at a time: when a bookie dies, thousands of ledgers change
    their ensembles at once. Implements `ports.MetadataPort`.
    """

    def __init__(self, metadata: MetadataClient) -> None:
        """Sends requests through `metadata`."""
        self._metadata = metadata
        self._room = asyncio.Semaphore(_REQUESTS_MAX)
        self.ensemble_changes = 0
        """Counted by rows left OPEN: no other change by a gateway's machines leaves a row OPEN."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """The row from the primary."""
        async with self._room:
            return await self._metadata.read(ledger_id)

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """Compare-and-swap, until the outcome is settled."""
        async with self._room:
            status, row = await self._metadata.cas(metadata, missed, attempt=attempt)
        if status is CasStatus.OK and metadata.state is State.OPEN:
            self.ensemble_changes += 1
        return status, row


def went_back(ledger_id: int, done: str, known: str) -> errors.DatabaseWentBack:
    """The error where the database contradicts what was done to a ledger."""
    return errors.DatabaseWentBack(
        f"the ledger was {done}, and the database has {known}",
        ledger_id=ledger_id,
        outcome=errors.UNKNOWN,
    )


def is_closed(row: LedgerMetadata) -> bool:
    """Whether the ledger's end is final."""
    return row.state is State.CLOSED


def _text_bytes(row: LedgerMetadata) -> int:
    """The length of what a client keeps in a row, which may be many times the rest."""
    return sum(len(key) + len(value) for key, value in row.custom)
