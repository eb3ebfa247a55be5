"""Quotas of a token at this gateway: requests and bytes per second, connections, open ledgers.

Each gateway counts separately, so a token may use its whole quotas at each gateway.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import web

from quorumlog.errors import Overloaded
from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.edge.http.codings import SAVED, UNPACKED

_BURST_S: Final = 1.0
"""How many seconds of its quota an idle caller may use at once (chosen by judgement)."""


class Bucket:
    """A token bucket with a capacity of `_BURST_S` seconds of refill. Its level may be negative."""

    __slots__ = ("_at", "_clock", "_level", "_per_s")

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s, self._clock = per_s, clock
        self._level, self._at = per_s * _BURST_S, clock()

    def wait_s(self, count: float) -> float:
        """How many seconds until `count` may be used; 0 means now."""
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_s
        self._level, self._at = min(filled, self._per_s * _BURST_S), now
        return max(0.0, (count - self._level) / self._per_s)

    def use(self, count: float) -> None:
        """Subtract `count` from the level, which may become negative."""
        self._level -= count


class Flow:
    """Counts the bytes of one request in progress, received and sent."""

    __slots__ = ("_announced", "_charged", "_request", "connection")

    def __init__(self, request: web.Request, connection: asyncio.Transport, announced: int) -> None:
        """`announced`: how many bytes of the request's body are already charged."""
        self._request, self.connection = request, connection
        self._announced = self._charged = announced

    def more(self) -> int:
        """Return the number of uncompressed bytes received and sent since the last call."""
        came = max(
            self._request.content.total_bytes, self._announced, self._request.get(UNPACKED, 0)
        )
        sent = self._request.writer.output_size + self._request.get(SAVED, 0)
        before, self._charged = self._charged, came + sent
        return self._charged - before


class Usage:
    """The use of quotas at this gateway by one token, or by all JWTs of one subject together."""

    __slots__ = ("_begun_ledgers", "_bytes", "_ledgers", "_requests", "_who", "flows", "quotas")

    def __init__(
        self, who: str, quotas: TokenQuotas, clock: Callable[[], float] | None = None
    ) -> None:
        self._who, self.quotas = who, quotas
        clock = clock or asyncio.get_running_loop().time
        requests, count = quotas.requests_per_s, quotas.bytes_per_s
        self._requests = None if requests is None else Bucket(requests, clock)
        self._bytes = None if count is None else Bucket(count, clock)
        self._ledgers: set[int] = set()
        """Ids of ledgers that the token created at this gateway."""
        self._begun_ledgers = 0
        """How many ledgers are being created now."""
        self.flows: set[Flow] = set()
        """The byte counters of requests in progress."""

    def begin(self, announced: int) -> None:
        """Charge a new request and its `announced` bytes. Raises: Overloaded, charging nothing."""
        most = self.quotas.connections
        # Skip closing connections: after a disconnection, a tail ends only at its next write.
        if (
            most is not None
            and sum(not flow.connection.is_closing() for flow in self.flows) >= most
        ):
            raise self._beyond(f"{most} connections with requests in progress", 1)
        if self._bytes is not None and (wait_s := self._bytes.wait_s(1)):
            raise self._beyond(f"{self.quotas.bytes_per_s} bytes per second", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise self._beyond(f"{self.quotas.requests_per_s} requests per second", wait_s)
            self._requests.use(1)
        self.charge(announced)

    def charge(self, count: int) -> None:
        """Charge `count` bytes, received or sent."""
        if self._bytes is not None:
            self._bytes.use(count)

    def take_message(self, count: int) -> float:
        """Charge a WebSocket message of `count` bytes as a request. Returns the seconds for which
        the socket must pause, because a refusal would end the socket.
        """
        wait_s = 0.0
        if self._requests is not None:
            wait_s = self._requests.wait_s(1)
            self._requests.use(1)
        if self._bytes is not None:
            wait_s = max(wait_s, self._bytes.wait_s(1))
        self.charge(count)
        return wait_s

    def charge_flows(self) -> None:
        """Charge the bytes that requests in progress have received and sent since the last call."""
        for flow in self.flows:
            self.charge(flow.more())

    @contextlib.contextmanager
    def new_ledger(self, is_open: Callable[[int], bool]) -> Iterator[set[int]]:
        """Reserve quota for a ledger, whose id the block adds to the set. Raises: Overloaded."""
        most = self.quotas.open_ledgers
        if most is None:
            yield set()
            return
        if len(self._ledgers) + self._begun_ledgers >= most:
            self._ledgers -= {one for one in self._ledgers if not is_open(one)}
        if len(self._ledgers) + self._begun_ledgers >= most:
            raise self._beyond(f"{most} open ledgers", 1)
        self._begun_ledgers += 1
        try:
            yield self._ledgers
        finally:
            self._begun_ledgers -= 1

    def _beyond(self, quota: str, wait_s: float) -> Overloaded:
        return Overloaded(
            f"{self._who} exceeds its quota ({quota}): retry later", retry_after_s=math.ceil(wait_s)
        )
