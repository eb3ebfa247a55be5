"""Expires idle logs. Each log's expiry keeper tracks the log's last use (ADR 40).

The expiry keeper is a gateway that the log's metadata names. The keeper need not be the log's
owner, because a closed or empty log has no owner. Only the keeper may declare its log expired, and
only the keeper deletes an expired log.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from quorumlog.errors import NOT_DONE, EntryUnavailable, NoSuchLog, WriterLost
from quorumlog.protocol.idle import Kept, Reported, slack_s
from quorumlog.protocol.log import Expiry, LogMetadata
from quorumlog.protocol.metadata import Writer

_TRIES_MAX: Final = 5
"""Maximum attempts to reach a log's current keeper in one check. Races need fewer attempts."""


class Verdict(StrEnum):
    """An expiry keeper's decision about whether its log has expired."""

    LIVES = "lives"
    GONE = "gone"
    """The log has expired and was deleted."""
    MOVED = "moved"
    """The log has another expiry keeper."""


Ask = Callable[[Writer, str, Expiry, bool], Awaitable[Verdict]]
"""Requests the verdict of a keeper in another process: (keeper, log, expiry, whether to count an
access). Raises: WriterLost, TimeoutError."""


@dataclass(slots=True)
class _Use:
    """A log in use, with one timer and one pending keeper request for all its `during` blocks."""

    row: LogMetadata
    every_s: float
    blocks: int = 0
    timer: asyncio.TimerHandle | None = None
    question: asyncio.Task[bool] | None = None

    def learn(self, row: LogMetadata) -> None:
        """Keep this metadata if it is newer, because it may name another keeper."""
        if row.version > self.row.version:
            self.row = row


class Accesses:
    """Reports accesses to the logs' expiry keepers, and is the keeper of some logs itself."""

    def __init__(
        self,
        *,
        me: Writer,
        ask: Ask,
        is_alive: Callable[[Writer], Awaitable[bool]],
        read: Callable[[str], Awaitable[LogMetadata]],
        appoint: Callable[[str, str], Awaitable[object]],
        remove: Callable[[str, str], Awaitable[bool]],
        start: Callable[[Coroutine[Any, Any, bool]], asyncio.Task[bool]],
        awake_s: Callable[[], float],
    ) -> None:
        """`read` returns a log's metadata. `appoint` makes this process a log's keeper if the
        current keeper still has the given term. `remove` deletes an expired log under the same
        condition, and returns whether the log is gone. `start` runs work that outlives the request
        that began it.
        """
        self._me, self._ask, self._is_alive = me, ask, is_alive
        self._read, self._appoint, self._remove = read, appoint, remove
        self._start, self._awake_s = start, awake_s
        self._loop = asyncio.get_running_loop()
        self._kept, self._reported = Kept(), Reported()
        self._removals: dict[str, asyncio.Task[bool]] = {}
        self._uses: dict[tuple[str, str], _Use] = {}
        """Keyed by the log's name and creation time."""

    async def lives(self, row: LogMetadata, *, is_access: bool) -> bool:
        """Whether a log has not expired, according to metadata that was just read. Returns False
        once an expired log is deleted.

        Raises: EntryUnavailable while the keeper does not answer; the deletion's error if an
        expired log can't be deleted.
        """
        return await self._living(row, is_access=is_access) is not None

    async def _living(self, row: LogMetadata, *, is_access: bool) -> LogMetadata | None:
        """The log's metadata, read again if the keeper changed; None if the log is deleted."""
        made = row.created_at
        for _ in range(_TRIES_MAX):
            expiry = row.expiry
            if expiry is None or row.deletion_protection:
                return row
            verdict = await self._verdict(row.name, expiry, is_access=is_access)
            if verdict is not Verdict.MOVED:
                return row if verdict is Verdict.LIVES else None
            row = await self._read(row.name)
            if row.created_at != made:
                return None  # another log of the same name
        raise _unanswered(row.name, "keeps changing")

    async def _verdict(self, name: str, expiry: Expiry, *, is_access: bool) -> Verdict:
        if expiry.keeper.id == self._me.id:
            return await self.here(name, expiry, is_access=is_access)
        now_s = self._loop.time()
        if not self._reported.is_due(expiry.term, expiry.idle_s, now_s):
            return Verdict.LIVES
        try:
            verdict = await self._ask(expiry.keeper, name, expiry, is_access)
        except (WriterLost, TimeoutError) as error:
            if await self._is_alive(expiry.keeper):
                raise _unanswered(name, "does not answer") from error
            await self._appoint(name, expiry.term)
            return Verdict.MOVED
        if is_access and verdict is Verdict.LIVES:
            self._reported.note(expiry.term, now_s)
        return verdict

    async def here(self, name: str, expiry: Expiry, *, is_access: bool) -> Verdict:
        """Return this process's verdict as the keeper. `expiry` was read after the request began."""
        if self._kept.lives(expiry.term, expiry.idle_s, self._awake_s(), is_access=is_access):
            return Verdict.LIVES
        removal = self._removals.get(expiry.term)
        if removal is None:
            removal = self._start(self._end(name, expiry.term))
            self._removals[expiry.term] = removal
            removal.add_done_callback(lambda _: self._removals.pop(expiry.term))
        return Verdict.GONE if await asyncio.shield(removal) else Verdict.MOVED

    async def _end(self, name: str, term: str) -> bool:
        """Delete an expired log. Until the deletion ends, every check reports the log as expired."""
        is_gone = await self._remove(name, term)
        if is_gone:
            self._kept.deleted(term)
        else:
            self._kept.forget((term,))
        return is_gone

    def begun(self, row: LogMetadata) -> None:
        """Count an access to a log when this process becomes the log's expiry keeper."""
        if row.expiry is not None:
            term, idle_s = row.expiry.term, row.expiry.idle_s
            self._kept.lives(term, idle_s, self._awake_s(), is_access=True)

    @contextlib.contextmanager
    def during(self, row: LogMetadata) -> Iterator[None]:
        """Count accesses to a log while the block runs. `row` was just read."""
        expiry = row.expiry
        if expiry is None or not expiry.idle_s:
            yield
            return
        key = row.name, row.created_at
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = _Use(row, slack_s(expiry.idle_s))
            self._wait(use, use.every_s)
        use.learn(row)
        use.blocks += 1
        try:
            yield
        finally:
            use.blocks -= 1
            self._let_go(use)

    def _let_go(self, use: _Use) -> None:
        """Forget an unused log, unless its request to the keeper is still pending."""
        if not use.blocks and use.question is None:
            del self._uses[use.row.name, use.row.created_at]
            if use.timer is not None:
                use.timer.cancel()

    def _wait(self, use: _Use, delay_s: float) -> None:
        use.timer = self._loop.call_later(delay_s, self._ask_again, use)

    def _ask_again(self, use: _Use) -> None:
        """Count an access, and again after `every_s`, or later if the keeper is slow."""
        began_s = self._loop.time()

        def settled(question: asyncio.Task[bool]) -> None:
            use.timer = use.question = None
            # An error doesn't end the counting. The task is cancelled only when the process ends.
            is_over = question.cancelled() or (
                question.exception() is None and not question.result()
            )
            if use.blocks and not is_over:
                self._wait(use, max(began_s + use.every_s - self._loop.time(), 0.0))
            self._let_go(use)

        use.question = self._start(self._count(use))
        use.question.add_done_callback(settled)

    async def _count(self, use: _Use) -> bool:
        """Count an access to a log in use; False if the log is deleted. Raises like `lives`."""
        try:
            if use.row.deletion_protection:  # the protection may be lifted by now
                row = await self._read(use.row.name)
                if row.created_at != use.row.created_at:
                    return False
                use.learn(row)
            row_now = await self._living(use.row, is_access=True)
        except NoSuchLog:
            return False
        if row_now is None:
            return False
        use.learn(row_now)
        return True

    # --- the sweep -------------------------------------------------------------------------------

    async def sweep(
        self, name: str, expiry: Expiry, is_alive: Callable[[Writer], Awaitable[bool]]
    ) -> bool:
        """Delete a log that has expired, or become its keeper if the current keeper is not alive.
        Returns whether the log still exists. `expiry` may be older than the log's metadata.
        """
        if expiry.keeper.id == self._me.id:
            return await self.here(name, expiry, is_access=False) is not Verdict.GONE
        if not await is_alive(expiry.keeper):
            await self._appoint(name, expiry.term)
        return True

    def terms(self) -> frozenset[str]:
        """The terms of the logs whose last use this process tracks as their keeper."""
        return self._kept.terms()

    def forget(self, terms: AbstractSet[str]) -> None:
        """Forget the terms that no log's metadata names any longer."""
        self._kept.forget(terms - self._removals.keys())


def _unanswered(name: str, what: str) -> EntryUnavailable:
    detail = f"the gateway that tracks the last use of {name} {what}: retry later"
    return EntryUnavailable(detail, log=name, outcome=NOT_DONE)
