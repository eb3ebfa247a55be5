"""One log in this process: its machine (`protocol/log/route.py`) and the machine's driver.

Appends that arrive in one turn of the event loop reach the machine in one step.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError
from quorumlog.protocol.log import LogMetadata, messages
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.log.route import LogRoute
from quorumlog.protocol.log.takeover import ending
from quorumlog.protocol.once import Once
from services.gateway.logs.driver import Broke, LogDriver, LogOutcome, LogPorts

log = logging.getLogger(__name__)


LOGS_COUNTED_MAX: Final = 100
"""Maximum number of logs with their own metrics labels: the first logs to receive appends. The
bound is needed because clients choose the names (chosen by judgement)."""

OTHER_LOGS: Final = "_other"
"""The metrics label of all other logs. No log has this name."""


@dataclass(slots=True)
class Appended:
    """Counts of records and bytes appended to one log or to several."""

    records: int = 0
    bytes: int = 0
    """Bytes of the stored batches."""


@dataclass(slots=True)
class LogCounts:
    """Counters of this process's logs since its start."""

    requests: int = 0
    records: int = 0
    duplicates: int = 0
    takeovers: int = 0
    bytes: int = 0
    """Bytes of the stored batches, including logs that are no longer in `by_log`."""
    by_log: dict[str, Appended] = field(default_factory=dict)

    def add(self, name: str, done: messages.RecordsAppended, size: int) -> None:
        """Count one append of `size` bytes that an owner in this process acknowledged."""
        self.requests += 1
        if done.is_duplicate:
            self.duplicates += 1
            return
        count = done.last_offset - done.first_offset + 1
        self.records += count
        self.bytes += size
        appended = self.by_log.get(name)
        if appended is None:
            named = len(self.by_log) - (OTHER_LOGS in self.by_log)
            is_named = named < LOGS_COUNTED_MAX
            appended = self.by_log.setdefault(name if is_named else OTHER_LOGS, Appended())
        appended.records += count
        appended.bytes += size


class LogHandle:
    """This gateway's state of one log. Each request returns a future at once. A caller that stops
    waiting for a future calls `abandon`.

    Invariant: `_pending` maps each returned future to the number of bytes that it appends, until
    the future is answered or abandoned. If a defective machine loses requests, their futures fail.
    """

    def __init__(
        self,
        name: str,
        ports: LogPorts,
        *,
        settle_s: float,
        counts: LogCounts,
        on_gone: Callable[["LogHandle"], None],
    ) -> None:
        """`on_gone` is called when the log no longer exists or the machine raised an exception."""
        self.name = name
        self._machine = LogRoute(name, ports.engine.writer.id, settle_s=settle_s)
        self._driver = LogDriver(self._machine, name, ports, self._on_outcome)
        self._counts = counts
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._gathered: list[tuple[asyncio.Future[messages.RecordsAppended], messages.Append]] = []
        self._pending: dict[asyncio.Future[Any], int] = {}
        self._broken: QuorumLogError | None = None

    @property
    def owner(self) -> Owner | None:
        """The log's owner, if it is in this process and has not ended."""
        owner = self._machine.owner
        return None if owner is None or owner.is_ended else owner

    def append(self, call: messages.Append) -> asyncio.Future[messages.RecordsAppended]:
        """Append records. Requests are appended in the order of the calls."""
        future: asyncio.Future[messages.RecordsAppended] = self._promise(len(call.data))
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append((future, call))
        return future

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._driver.post(messages.AppendsAsked(tuple(gathered)))

    def request(
        self,
        call: messages.Publish | messages.Consult | None,
        sizes: messages.Sizes = (),
        *,
        is_forwarded: bool,
    ) -> asyncio.Future[Any]:
        """Ask the log's owner to publish a transaction (rule 28), to answer a Consult, or to roll
        if `call` is None (rule 23). An empty ledger is not rolled. `sizes` lists the sizes of the
        transaction's ledgers. If the transaction has ended, the first answer is returned again.
        """
        return self._ask(lambda future: messages.LogRequest(future, call, sizes, is_forwarded))

    def force(
        self,
        *,
        creates: bool,
        finish: messages.Finish,
        created_at: str | None = None,
        once: Once | None = None,
    ) -> asyncio.Future[LogMetadata]:
        """Take the log over from its owner if the log was created at `created_at`. The takeover
        continues even if the caller is cancelled. `once` is the client's request that `finish`
        performs.
        """
        return self._ask(
            lambda future: messages.ForceAsked(future, creates, finish, created_at, once)
        )

    def heal(self, ledger_id: int) -> asyncio.Future[bool]:
        """Seal the log's last ledger if its writer is gone. Returns False if the writer is alive."""
        return self._ask(lambda future: messages.HealAsked(future, ledger_id))

    def delete(
        self, created_at: str | None = None, term: str | None = None
    ) -> asyncio.Future[LogMetadata]:
        """Fence the log's writer and delete the log's metadata, if the log has this creation time
        and this expiry keeper's term. Returns the deleted metadata.
        """
        return self._ask(partial(messages.DeletionAsked, created_at=created_at, term=term))

    def drain(self) -> asyncio.Future[None]:
        """Give up the log and seal its last ledger, so another gateway can own the log at once."""
        return self._ask(messages.DrainAsked)

    def _ask(self, event: Callable[[asyncio.Future[Any]], messages.Event]) -> asyncio.Future[Any]:
        future = self._promise()
        self._driver.post(event(future))
        return future

    def _promise(self, size: int = 0) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._broken is None:
            self._pending[future] = size
        else:
            resolve(future, self._broken.with_outcome(NOT_DONE))
        return future

    def _lose(self, error: QuorumLogError) -> None:
        """Fail the requests that the machine will not answer, with the outcome `unknown`."""
        lost, self._pending = self._pending, {}
        for future in lost:
            resolve(future, error.with_outcome(UNKNOWN))

    def abandon(self, future: asyncio.Future[Any]) -> None:
        """Drop a request whose client has stopped waiting."""
        if self._pending.pop(future, None) is not None:
            self._driver.post(messages.Abandoned(future))

    def hear(self, event: messages.Event) -> None:
        """Pass an event to the machine, such as new metadata or a tick."""
        self._driver.post(event)

    def stop(self) -> None:
        """Stop the machine because the process ends."""
        self._flush()
        self._driver.post(messages.Stopped())
        self._lose(ending(self.name))

    def _on_outcome(self, outcome: LogOutcome) -> None:
        match outcome:
            case messages.Resolve(future, answer):
                size = self._pending.pop(future, 0)
                if isinstance(answer, messages.RecordsAppended):
                    self._counts.add(self.name, answer, size)
                resolve(future, answer)
            case messages.Relay(future, answer):
                self._pending.pop(future, None)
                resolve(future, answer)
            case Broke(error):
                self._broken = error
                self._lose(error)
                self._on_gone(self)
            case messages.OwnerEnded(error):
                log.info("log-owner-ended", extra={"log": self.name, "error": repr(error)})
            case messages.TakeoverDone(LogMetadata() as row):
                self._counts.takeovers += 1
                log.info("log-taken-over", extra={"log": self.name, "version": row.version})
            case messages.TakeoverDone(QuorumLogError() as error) if not error.retryable:
                log.warning("takeover-failed", extra={"log": self.name, "error": repr(error)})
            case messages.RewriteDone():
                raise AssertionError("a log handle got the result of a rewrite that it didn't run")
            case messages.TakeoverDone():
                pass  # another gateway won, or the takeover will be retried
            case messages.LogGone():
                self._counts.by_log.pop(self.name, None)  # a new log may get the name
                self._on_gone(self)


def resolve(future: asyncio.Future[Any], answer: object) -> None:
    """Resolve the future, unless it is already done."""
    if future.done():
        return
    if isinstance(answer, QuorumLogError):
        # Each waiter gets its own error, because raising an error adds to its traceback.
        future.set_exception(answer.replace())
        future.exception()  # without a waiter, asyncio would log it as never retrieved
    else:
        future.set_result(answer)
