"""Budgets, which limit each peer's use of a resource (bytes, requests, connections, ledgers).

One peer may use seven eighths of a budget, since all clients behind a load balancer or on one
machine have one address. The last eighth is reserved for peers that use less than their share, so
that a greedy peer leaves room for other peers.
"""

import ipaddress
from contextvars import ContextVar
from functools import lru_cache
from typing import Final

from quorumlog.errors import Overloaded

PEER: Final = ContextVar("peer", default="")
"""The peer whose request is being handled, inherited by the tasks that the request starts."""

_KEPT: Final = 8
"""The reserve for peers below their share is an eighth of the budget."""
_IPV6_HOST_BITS: Final = 64


@lru_cache(maxsize=4096)
def peer_of(address: str | None) -> str:
    """The peer of an address. For IPv6, the peer is the /64 network, because a single host may own it."""
    if address is None or ":" not in address:
        return address or ""
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else f"{int(found) >> _IPV6_HOST_BITS:x}::/64"


class Budget:
    """Tracks the use of one resource, in total and by peer. Each `take` is undone by one `give`.

    Invariant: `used` is the sum of the peers' uses, and no peer's use is negative.
    """

    __slots__ = ("_free_for_all", "_limit", "_of", "_setting", "_share", "_what", "used")

    def __init__(self, what: str, setting: str, limit: int, share: int) -> None:
        """Errors name `what` and `setting`; the share's setting is `PEER_{setting}`."""
        self._what, self._setting = what, setting
        self._limit, self._share = limit, share
        self._free_for_all = limit - limit // _KEPT
        self._of: dict[str, int] = {}
        self.used = 0

    def of(self, peer: str) -> int:
        """A peer's current use."""
        return self._of.get(peer, 0)

    def check(self, peer: str, count: int) -> None:
        """Raise Overloaded if a peer can't use `count` more. An unused budget allows any count."""
        used = self.used + count
        if used <= self._free_for_all or not self.used:
            return
        if used > self._limit:
            raise Overloaded(f"too many {self._what}: the limit is {self._limit} ({self._setting})")
        if self._of.get(peer, 0) + count > self._share:
            raise Overloaded(
                f"too many {self._what} from one address while other addresses need the rest:"
                f" the limit per address is {self._share} (PEER_{self._setting})"
            )

    def take(self, peer: str, count: int = 1) -> None:
        """Use `count` more. Raises: Overloaded, without a change."""
        if self.used + count > self._free_for_all:
            self.check(peer, count)
        self.back(peer, count)

    def give(self, peer: str, count: int = 1) -> None:
        """Return `count` of the used amount."""
        self.used -= count
        left = self._of.get(peer, 0) - count
        if left:
            self._of[peer] = left
        else:
            self._of.pop(peer, None)

    def back(self, peer: str, count: int = 1) -> None:
        """Use an amount again that `give` returned temporarily. Never refused."""
        self.used += count
        self._of[peer] = self._of.get(peer, 0) + count
