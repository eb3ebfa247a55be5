"""Requests to append to a log that wait for their answer."""

import asyncio
from dataclasses import dataclass, replace

from quorumlog.protocol.log import Answer
from services.gateway.interface import Appended
from services.gateway.logs.ports import Append, LogAppended


@dataclass(slots=True, eq=False)
class Pending:
    """One request that waits for its answer."""

    call: Append
    future: asyncio.Future[LogAppended]
    submitted: asyncio.Future[Appended] | None = None
    entry_id: int = -1
    first_offset: int = -1
    content: str = ""
    appended_ms: int = 0

    def answer(self, ledger_id: int) -> LogAppended:
        """What the client is told when the entry is durable."""
        last = self.first_offset + len(self.call.records) - 1
        return LogAppended(self.first_offset, last, ledger_id, self.entry_id)

    def resolve(self, result: LogAppended | BaseException) -> None:
        """Answer, unless the client went away."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def pending_of(call: Append) -> Pending:
    """A request that nobody has to wait for: its error is never reported as forgotten."""
    future: asyncio.Future[LogAppended] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return Pending(call, future)


def repeated(answer: Answer) -> LogAppended:
    """What a repeat of an acknowledged request is told."""
    return LogAppended(
        answer.first_offset,
        answer.last_offset,
        answer.ledger_id,
        answer.entry_id,
        is_duplicate=True,
    )


def follow(pending: Pending, first: asyncio.Future[LogAppended]) -> None:
    """A duplicate of a request in flight gets what that gets."""
    error = asyncio.CancelledError() if first.cancelled() else first.exception()
    pending.resolve(error or replace(first.result(), is_duplicate=True))
