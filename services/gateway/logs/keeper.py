"""Serves requests for the rows of an internal log. The log's owner decides the requests (ADR 37).

The gateway sends a request to the owner as a `Consult`, like any other request to a log, or decides
the request itself as the owner. The store (`protocol/offset_store.py`) is correct in any process,
but only the owner's store appends without conflicts. If a client's change has no token, the gateway
creates a token, because gateways retry requests on their own (rule 32).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar
from uuid import uuid4

from quorumlog import errors
from quorumlog.net.timers import awake
from quorumlog.protocol import offset_store
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.messages import HERE, Append, Consult, Here, RecordsAppended
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rows import CHANGES_MAX, Batch, FreeLog, Key, List, Row, Rows, Stamp
from quorumlog.wire.row_bodies import BadRows, RowBodies
from services.gateway.logs.handle import resolve
from services.gateway.logs.values import LogBatches

log = logging.getLogger(__name__)

_READ_BYTES: Final = 4 << 20
_READ_RECORDS: Final = 1000
_PAUSE_S: Final = 0.05
_ROLL_BYTES: Final = 16 << 20
"""The size at which a log of rows rolls: small, because only whole ledgers are truncated."""
_TOGETHER_MAX: Final = 1000
"""Maximum number of requests that are forwarded to the owner in one message."""

_DELETED_MAX: Final = 10_000
"""Maximum deleted logs that are noted for the next sweep, which deletes their rows. Consumers
of further deleted logs expire instead. Chosen by judgement."""
_SEEN_S: Final = 5.0
"""Time after a response for which changes may name its version. Owners remember tokens longer."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    """A request, and the future that gets the answer."""

    future: asyncio.Future[Any]
    request: Any
    stamp: Stamp | None
    is_forwarded: bool = False


class RowLogs(Protocol):
    """The operations on logs that `RowService` needs."""

    def submit(self, name: str, call: Append) -> asyncio.Future[RecordsAppended]:
        """Begin an append through the log's owner."""

    async def append(self, name: str, call: Append) -> RecordsAppended:
        """Append through the log's owner."""

    async def consult(self, name: str, call: Consult, *, is_forwarded: bool) -> Here | bytes:
        """Send a request to the log's owner."""

    def is_owned(self, name: str) -> bool:
        """Whether this process owns the log."""

    async def retain(self, name: str, begin: Callable[[LogMetadata], int]) -> Any:
        """Release whole ledgers below the offset that `begin` returns."""

    async def put(
        self, name: str, settings: LogSettings, *, deletion_protection: bool | None = None
    ) -> Any:
        """Create a log."""

    async def change(
        self, name: str, limits: Mapping[str, int | str], *, deletion_protection: bool | None = None
    ) -> Any:
        """Set some of a log's limits, and its protection. Writes nothing if nothing changes."""


class RowService(ABC, Generic[R]):
    """Serves this gateway's requests for the rows of one log."""

    def __init__(
        self,
        logs: RowLogs,
        read: Callable[..., Awaitable[LogBatches]],
        bodies: RowBodies[R],
        kind: type[Rows[R]],
        *,
        bookies: Callable[[], Awaitable[int]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        timeout_s: float,
        wall_ms: Callable[[], int],
        database_ms: Callable[[], int | None],
        expiry_s: float = 0.0,
        monotonic_s: Callable[[], float] | None = None,
    ) -> None:
        """`bodies`: the log's name and formats. `kind`: the class of the state. `bookies`: counts
        the bookies. `start`: runs a task until the gateway stops. `monotonic_s`: returns the
        time for which the process was awake. `database_ms`: returns the database's time, or None if
        that time is unknown or must not decide deletions. `expiry_s`: the time without use after
        which a row expires; 0: never.
        """
        self._database_ms, self._expiry_ms = database_ms, int(expiry_s * 1000)
        self._logs, self._read_log, self._bookies = logs, read, bookies
        self._bodies, self._name, self._kind = bodies, bodies.log, kind
        self._start, self._timeout_s, self._wall_ms = start, timeout_s, wall_ms
        self._monotonic_s = monotonic_s or (lambda: awake().time())
        self._loop = asyncio.get_running_loop()
        self._gathered: list[_Ask] = []
        self._deleted: dict[str, str] = {}
        """Logs that this gateway has deleted, each with its creation time."""
        self._keeper = self._new_keeper()
        self._waiting: set[_Ask] = set()
        """Requests that the store has not answered yet."""
        self.seen = 0
        """The highest version that this process has seen in the log of rows."""
        self._seen_s = 0.0
        self._inbox: deque[offset_store.Event] = deque()
        self._is_stepping = False

    def _new_keeper(self) -> offset_store.OffsetStore:
        return offset_store.OffsetStore(self._expiry_ms, self._kind)

    @property
    def kept(self) -> Mapping[Key, R]:
        """The rows in memory, which are complete if this gateway owns their log."""
        return self._keeper.state.rows

    # --- requests --------------------------------------------------------------------------------

    @abstractmethod
    def _counts_once(self, request: Any) -> bool:
        """Whether a request needs a `Stamp`."""

    @abstractmethod
    def _makes(self, request: Any) -> bool:
        """Whether a request may create a row."""

    async def ask(
        self, request: Any, row: LogMetadata | None = None, stamp: Stamp | None = None
    ) -> Any:
        """Decide a request about one row. `stamp`: the sender's stamp of a change, if it has one.
        If there is no log of rows and the request may create a row, creates the log with the quorum
        of the log `row`.

        Raises: the error that rejects the request; RequestOutdated.
        """
        try:
            return await self._ask(request, stamp)
        except errors.NoSuchLog as error:
            if row is None or error.log != self._name or not self._makes(request):
                raise self._shown(request, error) from None
            await self._make(row)
            return await self._ask(request, stamp)

    def _shown(self, request: Any, error: errors.NoSuchLog) -> errors.QuorumLogError:
        """The error for the client. If there is no log of rows, the row does not exist."""
        if error.log != self._name:
            return error
        detail = f"the log {request.log} has no {self._kind.noun}s"
        return self._kind.absent(detail, log=request.log)

    async def page(self, name: str, *, after: str, limit: int) -> tuple[R, ...]:
        """A page of a log's rows, sorted by name."""
        try:
            answer: tuple[R, ...] = await self._ask(List(name, after, limit))
        except errors.NoSuchLog as error:
            if error.log != self._name:
                raise
            return ()
        return answer

    def log_deleted(self, name: str, created: str) -> None:
        """Note that this gateway deleted a log, so that the log's rows are deleted too."""
        if len(self._deleted) < _DELETED_MAX:
            self._deleted[name] = created

    def take_deleted(self) -> dict[str, str]:
        """Return and forget the noted deleted logs, each with its creation time."""
        taken, self._deleted = self._deleted, {}
        return taken

    async def free(self, deleted: Mapping[str, str]) -> None:
        """Delete the rows of logs that were deleted (`take_deleted`)."""
        asked = [self.submit(FreeLog(name, created)) for name, created in deleted.items()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for (name, created), answer in zip(deleted.items(), answers, strict=True):
            if isinstance(answer, errors.QuorumLogError) and not isinstance(
                answer, errors.NoSuchLog
            ):
                self.log_deleted(name, created)  # the next sweep retries

    async def _make(self, row: LogMetadata) -> None:
        quorum, least = row.settings.quorum, Quorum.of(3, 3, 2)
        if quorum.write_quorum < least.write_quorum and await self._bookies() >= 3:
            quorum = least
        settings = LogSettings(quorum, roll_bytes=_ROLL_BYTES, merge_below_bytes=0)
        try:
            await self._logs.put(self._name, settings, deletion_protection=True)
        except errors.QuorumLogError as error:
            if error.code != "log-exists":  # another gateway created it, with another log's quorum
                raise

    @property
    def is_here(self) -> bool:
        """Whether this process owns the log of rows."""
        return self._logs.is_owned(self._name)

    async def _ask(self, request: Any, stamp: Stamp | None = None) -> Any:
        if not self._counts_once(request):
            return await self.submit(request)
        if stamp is not None:
            return await self.submit(request, stamp)
        is_fresh = self._loop.time() < self._seen_s + _SEEN_S
        stamp = Stamp(uuid4().hex, seen=self.seen if is_fresh else 0)
        try:
            return await self.submit(request, stamp)
        except errors.RequestOutdated as error:
            if stamp.seen:
                raise
            # No owner has performed the request, because it named no version.
            return await self.submit(request, replace(stamp, seen=error.members["version"]))

    def submit(self, request: Any, stamp: Stamp | None = None) -> asyncio.Future[Any]:
        """Begin a request. The future gets the answer, the rejection's error, or QuorumTimeout."""
        future: asyncio.Future[Any] = self._loop.create_future()
        timer = self._loop.call_later(self._timeout_s, self._late, future, request.log)
        future.add_done_callback(lambda _future: timer.cancel())
        self._gather(_Ask(future, request, stamp))
        return future

    def _gather(self, one: _Ask) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(one)

    def _late(self, future: asyncio.Future[Any], log_name: str) -> None:
        late = f"the owner of {self._name} did not answer within {self._timeout_s:g} s"
        resolve(future, errors.QuorumTimeout(late, log=log_name))

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self.is_here:
            # Any gateway's store is correct, but only the owner's store has no append conflicts.
            self._keep(gathered)
            return
        for at in range(0, len(gathered), _TOGETHER_MAX):
            _ = self._start(self._consult(gathered[at : at + _TOGETHER_MAX]))

    async def _consult(self, gathered: Sequence[_Ask]) -> None:
        data = self._bodies.encode_requests([(one.request, one.stamp) for one in gathered])
        try:
            reported = await self._logs.consult(self._name, Consult(data), is_forwarded=False)
            if reported is HERE:
                self._keep(gathered)
                return
            assert isinstance(reported, bytes)
            answers, version = self._bodies.decode_answers(reported)
            self._saw(version)
            assert len(answers) == len(gathered), "expected one answer for each request"
            for one, answer in zip(gathered, answers, strict=True):
                resolve(one.future, answer)
        except errors.QuorumLogError as error:
            for one in gathered:
                resolve(one.future, error)
        except Exception as error:
            log.exception("rows-broke", extra={"log": self._name})
            for one in gathered:
                resolve(one.future, errors.QuorumLogError(repr(error)))

    def _saw(self, version: int) -> None:
        self.seen, self._seen_s = max(self.seen, version), self._loop.time()

    async def answer_here(self, data: bytes) -> dict[str, Any]:
        """Decide another gateway's requests. Raises: NotTheOwner (`not-done`), BadRows."""
        requests = self._bodies.decode_requests(data)
        await self._logs.consult(self._name, Consult(data), is_forwarded=True)
        gathered = [_Ask(self._loop.create_future(), *one, is_forwarded=True) for one in requests]
        self._keep(gathered)
        futures = [one.future for one in gathered]
        answers: Sequence[Any] = await asyncio.gather(*futures, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, errors.NotTheOwner):
                raise answer  # the error for all requests: the sender retries at the owner
        return self._bodies.encode_answers(answers, self.seen)

    # --- the store -------------------------------------------------------------------------------

    def _keep(self, gathered: Sequence[_Ask]) -> None:
        self._waiting.update(gathered)
        self._post(
            offset_store.Gathered(
                tuple(offset_store.Asked(one, one.request, one.stamp) for one in gathered)
            )
        )

    def _post(self, event: offset_store.Event) -> None:
        """Pass an event to the offset store, now or after the events that are already queued."""
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                now_s, database_ms = self._monotonic_s(), self._database_ms() or 0
                for effect in self._keeper.step(event, now_s, self._wall_ms(), database_ms):
                    self._perform(effect)
        except Exception:
            # The offset store has a defect. A new store reads its state from the log.
            log.exception("row-keeper-broke", extra={"log": self._name})
            self._keeper = self._new_keeper()
            self._inbox.clear()
            lost, self._waiting = self._waiting, set()
            detail = f"the owner of {self._name} failed with an internal error: see its log"
            broke = errors.QuorumLogError(detail, outcome=errors.UNKNOWN)
            for one in lost:
                resolve(one.future, broke)
        finally:
            self._is_stepping = False

    def _perform(self, effect: offset_store.Effect) -> None:
        match effect:
            case offset_store.Reported(one, errors.NotTheOwner()) if not one.is_forwarded:
                self._waiting.discard(one)
                self._gather(one)
            case offset_store.Reported(one, answer):
                self._waiting.discard(one)
                resolve(one.future, answer)
            case offset_store.Truncate(before):
                _ = self._start(self._truncate(before))
            case offset_store.AppendBatch(expect, batch):
                call = Append.of([Record(self._bodies.encode_batch(batch))], expect=expect)
                done = partial(self._appended, self._keeper, batch)
                self._logs.submit(self._name, call).add_done_callback(done)
            case offset_store.ReadLog() | offset_store.Pause():
                _ = self._start(self._answer(self._keeper, effect))

    def _changed(self, batch: Batch[R]) -> None:
        """Called with each batch that this process has appended, after the batch is in the log."""

    def _appended(
        self,
        keeper: offset_store.OffsetStore,
        batch: Batch[R],
        done: asyncio.Future[RecordsAppended],
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or keeper is not self._keeper:
            return
        match error:
            case None:
                self._saw(done.result().first_offset * CHANGES_MAX + 1)
                self._post(offset_store.Appended())
                self._changed(batch)
            case errors.UnexpectedOffset():
                self._post(offset_store.Overtaken(self.is_here))
            case errors.QuorumLogError():
                self._post(offset_store.Failed(error))
            case _:
                self._post(offset_store.Failed(errors.QuorumLogError(repr(error), log=self._name)))

    async def _answer(
        self,
        keeper: offset_store.OffsetStore,
        effect: offset_store.ReadLog | offset_store.Pause,
    ) -> None:
        event: offset_store.Event
        try:
            match effect:
                case offset_store.ReadLog(start):
                    event = await self._read("earliest" if start is None else start)
                case offset_store.Pause():
                    await asyncio.sleep(_PAUSE_S)
                    event = offset_store.Paused()
        except errors.QuorumLogError as error:
            event = offset_store.Failed(error)
        except Exception as error:
            log.exception("row-question-broke", extra={"log": self._name})
            event = offset_store.Failed(errors.QuorumLogError(repr(error), log=self._name))
        if keeper is self._keeper:
            self._post(event)

    async def _read(self, start: Any) -> offset_store.Event:
        while True:
            try:
                page = await self._read_log(
                    self._name, start, limit=_READ_RECORDS, max_bytes=_READ_BYTES
                )
            except errors.OffsetTruncated:
                return offset_store.Truncated()
            except errors.EntryLost as error:
                # An operator has accepted the loss, so lost records count as never written.
                start = error.members["next_offset"]
                continue
            try:
                batches = tuple(
                    (found.offset, self._bodies.decode_batch(found.record.value))
                    for found in page.records
                )
            except BadRows as error:
                detail = f"a record of {self._name} can't be decoded: {error}"
                raise errors.EntryUnavailable(
                    detail, log=self._name, outcome=errors.NOT_DONE
                ) from error
            return offset_store.BatchesRead(batches, page.next)

    async def _truncate(self, before: int) -> None:
        try:
            # A rebuild restores the log's metadata without limits (rule 18f).
            limits: dict[str, int | str] = {"roll_bytes": _ROLL_BYTES, "merge_below_bytes": 0}
            await self._logs.change(self._name, limits, deletion_protection=True)
            await self._logs.retain(self._name, lambda _row: before)
        except errors.QuorumLogError as error:  # the next truncation retries
            log.warning("rows-not-truncated", extra={"log": self._name, "error": repr(error)})
