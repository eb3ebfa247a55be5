"""Tickets: what a page in a browser puts into the URL of a stream or a socket, since it can't send headers there.

A ticket stands for a token on one path for half a minute. It may come to stand in the log of a proxy, and is worth
nothing by then. Gateways share the key, so each of them knows the tickets of all.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import Unauthenticated
from quorumlog.wire.token_bodies import TOKEN_ID

TICKET_S: Final = 30
"""Long enough to connect over a slow line (taste)."""
NO_TICKET: Final = "anonymous"
"""The ticket of a gateway that asks nobody."""
TICKET: Final = rf"({TOKEN_ID}\.[0-9]{{1,12}}\.[0-9a-f]{{64}}|{NO_TICKET})"


@dataclass(frozen=True, slots=True)
class Ticket:
    """For a token, on a path, until an instant (seconds since 1970)."""

    token_id: str
    path: str
    ends_at: int

    def signed(self, key: bytes) -> str:
        """The ticket as it stands in a URL."""
        return f"{self.token_id}.{self.ends_at}.{self._mac(key)}"

    @classmethod
    def checked(cls, text: str, path: str, key: bytes, now: float) -> "Ticket":
        """The ticket of a URL's text. Raises: Unauthenticated."""
        token_id, _, rest = text.partition(".")
        ends_at, _, mac = rest.partition(".")
        if not (ends_at.isascii() and ends_at.isdecimal() and len(ends_at) <= 12 and mac.isascii()):
            raise Unauthenticated("this is no ticket")
        ticket = cls(token_id, path, int(ends_at))
        if not hmac.compare_digest(mac, ticket._mac(key)):
            raise Unauthenticated("the ticket is not of this cluster, or for another path")
        if ticket.ends_at <= now:
            raise Unauthenticated("the ticket has expired: get another one (POST /v1/tickets)")
        return ticket

    def _mac(self, key: bytes) -> str:
        text = f"{self.token_id}.{self.ends_at}.{self.path}"
        return hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
