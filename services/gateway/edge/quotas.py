"""What a token may use of this gateway: requests and bytes per second, connections, open ledgers.

Each gateway counts for itself, so a token gets as much as its quotas at each gateway that it asks.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from quorumlog.errors import Overloaded
from quorumlog.wire.token_bodies import TokenQuotas

_BURST_S: Final = 1.0
"""A caller that was idle may use as much at once as it may in this time (taste)."""


class Bucket:
    """So much a second. What was not used is kept for a moment; what was used beyond is a debt, which time pays."""

    __slots__ = ("_at", "_clock", "_level", "_per_s")

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s, self._clock = per_s, clock
        self._level, self._at = per_s * _BURST_S, clock()

    def wait_s(self, count: float) -> float:
        """How long until `count` may be used; 0: now."""
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_s
        self._level, self._at = min(filled, self._per_s * _BURST_S), now
        return max(0.0, (count - self._level) / self._per_s)

    def use(self, count: float) -> None:
        """Use `count`, whatever is there."""
        self._level -= count


class Usage:
    """What one token uses here, or the JWTs of one subject together."""

    __slots__ = ("_bytes", "_ledgers", "_quotas", "_requests", "_who", "connections")

    def __init__(
        self, who: str, quotas: TokenQuotas, clock: Callable[[], float] | None = None
    ) -> None:
        self._who, self._quotas = who, quotas
        clock = clock or asyncio.get_running_loop().time
        requests, count = quotas.requests_per_s, quotas.bytes_per_s
        self._requests = None if requests is None else Bucket(requests, clock)
        self._bytes = None if count is None else Bucket(count, clock)
        self._ledgers: set[int] = set()
        """Those that were created here."""
        self.connections: set[asyncio.Transport] = set()
        """Those of the requests that are under way."""

    def begin(self, announced: int) -> None:
        """A request comes, with a body of so many bytes. Raises: Overloaded, and nothing is used."""
        most = self._quotas.connections
        # A tail whose client is gone notices that when it has something to send.
        if most is not None and sum(not one.is_closing() for one in self.connections) >= most:
            raise self._beyond(f"{most} connections with requests under way", 1)
        if self._bytes is not None and (wait_s := self._bytes.wait_s(1)):
            raise self._beyond(f"{self._quotas.bytes_per_s} bytes per second", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise self._beyond(f"{self._quotas.requests_per_s} requests per second", wait_s)
            self._requests.use(1)
        self.charge(announced)

    def charge(self, count: int) -> None:
        """So many bytes have come, or were sent."""
        if self._bytes is not None:
            self._bytes.use(count)

    def begin_ledger(self, is_open: Callable[[int], bool]) -> None:
        """A ledger is about to be created. Raises: Overloaded."""
        most = self._quotas.open_ledgers
        if most is None or len(self._ledgers) < most:
            return
        self._ledgers = {ledger_id for ledger_id in self._ledgers if is_open(ledger_id)}
        if len(self._ledgers) >= most:
            raise self._beyond(f"{most} open ledgers", 1)

    def note_ledger(self, ledger_id: int) -> None:
        """A ledger was created."""
        if self._quotas.open_ledgers is not None:
            self._ledgers.add(ledger_id)

    def _beyond(self, quota: str, wait_s: float) -> Overloaded:
        return Overloaded(
            f"{self._who} may use {quota} of this gateway", retry_after_s=math.ceil(wait_s)
        )
