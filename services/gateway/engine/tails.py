"""Waiting for entries of other gateways' ledgers: one long poll per ledger for all waiters."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.net.ports import TasksPort
from quorumlog.protocol.ids import NO_ENTRY
from services.gateway.engine.waiters import LacWaiters
from services.gateway.interface import LedgerView

log = logging.getLogger(__name__)

POLL_S: Final = 10.0
"""How long one poll waits at the writer."""
_PAUSE_S: Final = 1.0
"""Between polls that cannot wait at the writer, because the writer is gone (taste)."""

Poll = Callable[[int, int, float], Awaitable[LedgerView]]
"""(ledger, after, wait) to the LAC; waits for a higher one if possible."""


class _Tail:
    """One followed ledger."""

    def __init__(self) -> None:
        self.waiters = LacWaiters()
        self.known = NO_ENTRY
        """The highest LAC heard of."""


class Tails:
    """The followed ledgers. Invariant: a ledger is followed while somebody waits."""

    def __init__(self, poll: Poll, tasks: TasksPort) -> None:
        """No ledger is followed yet."""
        self._poll = poll
        self._tasks = tasks
        self._followed: dict[int, _Tail] = {}

    async def wait(self, ledger_id: int, after: int, wait_s: float) -> bool:
        """True once there may be a LAC above `after`, False after `wait_s`."""
        tail = self._followed.get(ledger_id)
        if tail is None:
            tail = self._followed[ledger_id] = _Tail()
            self._tasks.start(self._follow(ledger_id, tail))
        if tail.known > after:
            return True
        return await tail.waiters.wait(after, wait_s)

    def changed(self, ledger_id: int) -> None:
        """The ledger's row changed: wake all waiters."""
        tail = self._followed.get(ledger_id)
        if tail is not None:
            tail.waiters.wake_all()

    async def _follow(self, ledger_id: int, tail: _Tail) -> None:
        waiters = tail.waiters
        try:
            # The first waiter registers right after this task is started.
            while (after := waiters.lowest) is not None:
                pause_s = 0.0
                try:
                    known = await self._poll(ledger_id, max(after, tail.known), POLL_S)
                except QuorumLogError as error:
                    log.info("tail-unknown", extra={"ledger": ledger_id, "why": error.detail})
                    pause_s = _PAUSE_S
                else:
                    if known.closed:
                        return
                    tail.known = max(tail.known, known.last_add_confirmed)
                    waiters.advance(tail.known)
                    if known.lac_source != "writer":
                        pause_s = _PAUSE_S
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            if self._followed.get(ledger_id) is tail:
                del self._followed[ledger_id]
            waiters.wake_all()
