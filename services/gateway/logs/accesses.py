"""Accesses to logs that expire without use: counted by each log's keeper, whichever gateway serves them (ADR 40).

The keeper of a log is named in the log's row, which every request reads. It need not be the log's owner: a log that is
closed or empty has none. Only the keeper says that a log has expired, and only it deletes such a log.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from quorumlog.errors import NOT_DONE, EntryUnavailable, NoSuchLog, WriterLost
from quorumlog.protocol.idle import Kept, Told, slack_s
from quorumlog.protocol.log import Expiry, LogMetadata
from quorumlog.protocol.metadata import Writer

_TRIES_MAX: Final = 5
"""Keepers in turn, each of which is gone or was replaced: more is no race."""


class Verdict(StrEnum):
    """What a log's keeper says of the log."""

    LIVES = "lives"
    GONE = "gone"
    """It has expired, and is deleted."""
    MOVED = "moved"
    """It has another keeper."""


Ask = Callable[[Writer, str, Expiry, bool], Awaitable[Verdict]]
"""Ask a keeper elsewhere: keeper, log, expiry, whether this is an access. Raises: WriterLost, TimeoutError."""


@dataclass(slots=True)
class _Use:
    """A log in use: all blocks of this process that use it share one timer, and one question at a time."""

    row: LogMetadata
    every_s: float
    blocks: int = 0
    timer: asyncio.TimerHandle | None = None
    question: asyncio.Task[bool] | None = None

    def learn(self, row: LogMetadata) -> None:
        """The row was read: it may name another keeper."""
        if row.version > self.row.version:
            self.row = row


class Accesses:
    """The accesses that this gateway serves, and the logs whose keeper it is."""

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
        """`read` reads a row; `appoint` makes this process the keeper of a log in place of the one of a term; `remove`
        deletes a log that has expired unless the term is another one by then, and says whether the log is gone. `start`
        runs work that continues after the request that began it has ended.
        """
        self._me, self._ask, self._is_alive = me, ask, is_alive
        self._read, self._appoint, self._remove = read, appoint, remove
        self._start, self._awake_s = start, awake_s
        self._loop = asyncio.get_running_loop()
        self._kept, self._told = Kept(), Told()
        self._removals: dict[str, asyncio.Task[bool]] = {}
        self._uses: dict[tuple[str, str], _Use] = {}
        """By the log's name and creation."""

    async def lives(self, row: LogMetadata, *, is_access: bool) -> bool:
        """Whether the log of a row that was just read has not expired; an access is counted. False: it is deleted.

        Raises: EntryUnavailable while the keeper does not answer, and why a log that has expired can't be deleted.
        """
        return await self._living(row, is_access=is_access) is not None

    async def _living(self, row: LogMetadata, *, is_access: bool) -> LogMetadata | None:
        """The row by which the log lives, which has another keeper by then perhaps; None: the log is deleted."""
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
                return None  # a namesake
        raise _unanswered(row.name, "changes all the time")

    async def _verdict(self, name: str, expiry: Expiry, *, is_access: bool) -> Verdict:
        if expiry.keeper.id == self._me.id:
            return await self.here(name, expiry, is_access=is_access)
        now_s = self._loop.time()
        if not self._told.is_due(expiry.term, expiry.idle_s, now_s):
            return Verdict.LIVES
        try:
            verdict = await self._ask(expiry.keeper, name, expiry, is_access)
        except (WriterLost, TimeoutError) as error:
            if await self._is_alive(expiry.keeper):
                raise _unanswered(name, "does not answer") from error
            await self._appoint(name, expiry.term)
            return Verdict.MOVED
        if is_access and verdict is Verdict.LIVES:
            self._told.note(expiry.term, now_s)
        return verdict

    async def here(self, name: str, expiry: Expiry, *, is_access: bool) -> Verdict:
        """What this process says as the keeper of a log, by a row that was read after the request began."""
        if self._kept.lives(expiry.term, expiry.idle_s, self._awake_s(), is_access=is_access):
            return Verdict.LIVES
        removal = self._removals.get(expiry.term)
        if removal is None:
            removal = self._start(self._end(name, expiry.term))
            self._removals[expiry.term] = removal
            removal.add_done_callback(lambda _: self._removals.pop(expiry.term))
        return Verdict.GONE if await asyncio.shield(removal) else Verdict.MOVED

    async def _end(self, name: str, term: str) -> bool:
        """Delete a log that has expired. Until that is settled the log stays expired: nobody is told that it lives."""
        is_gone = await self._remove(name, term)
        if is_gone:
            self._kept.deleted(term)
        else:
            self._kept.forget((term,))
        return is_gone

    def begun(self, row: LogMetadata) -> None:
        """This process is the keeper of the log of this row by a change of its own, the creation say: that is an access."""
        if row.expiry is not None:
            term, idle_s = row.expiry.term, row.expiry.idle_s
            self._kept.lives(term, idle_s, self._awake_s(), is_access=True)

    @contextlib.contextmanager
    def during(self, row: LogMetadata) -> Iterator[None]:
        """A block in which the log of a row that was just read is in use: it counts accesses as long as it lasts."""
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
        """Forget a log that nobody uses any more, unless a question is under way: who uses it meanwhile shares that."""
        if not use.blocks and use.question is None:
            del self._uses[use.row.name, use.row.created_at]
            if use.timer is not None:
                use.timer.cancel()

    def _wait(self, use: _Use, delay_s: float) -> None:
        use.timer = self._loop.call_later(delay_s, self._ask_again, use)

    def _ask_again(self, use: _Use) -> None:
        """Count an access, and the next one a slack later, or once this one is settled: the keeper may be silent for long."""
        began_s = self._loop.time()

        def settled(question: asyncio.Task[bool]) -> None:
            use.timer = use.question = None
            # An error is no answer; a question that was cancelled ends with the process.
            is_over = question.cancelled() or (
                question.exception() is None and not question.result()
            )
            if use.blocks and not is_over:
                self._wait(use, max(began_s + use.every_s - self._loop.time(), 0.0))
            self._let_go(use)

        use.question = self._start(self._count(use))
        use.question.add_done_callback(settled)

    async def _count(self, use: _Use) -> bool:
        """Count an access to a log in use; False: it is deleted. Raises: as `lives`."""
        try:
            if use.row.deletion_protection:  # which may be lifted by now
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

    async def sweep(self, row: LogMetadata, is_alive: Callable[[Writer], Awaitable[bool]]) -> bool:
        """Delete the log of a row if it has expired, or keep it in place of a process that does not live. Returns whether
        the log is still there.
        """
        expiry = row.expiry
        if expiry is None or row.deletion_protection:
            return True
        if expiry.keeper.id == self._me.id:
            return await self.here(row.name, expiry, is_access=False) is not Verdict.GONE
        if not await is_alive(expiry.keeper):
            await self._appoint(row.name, expiry.term)
        return True

    def terms(self) -> frozenset[str]:
        """Of the logs that this process remembers as their keeper."""
        return self._kept.terms()

    def forget(self, terms: AbstractSet[str]) -> None:
        """No row names these: their logs were deleted, or have other keepers."""
        self._kept.forget(terms - self._removals.keys())


def _unanswered(name: str, what: str) -> EntryUnavailable:
    detail = f"the process that knows the last use of {name} {what}"
    return EntryUnavailable(detail, log=name, outcome=NOT_DONE)
