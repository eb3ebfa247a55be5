"""Tickets: what a page in a browser puts into the URL of a stream or a socket, since it can't send headers there.

A ticket stands for a token on one path for half a minute. It may come to stand in the log of a proxy, and is worth
nothing by then. Gateways share the key, so each of them knows the tickets of all. The ticket of a token that this
cluster made has the token's id. That of a JWT has what the JWT says, since the other gateways may not know the JWT.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import Unauthenticated
from quorumlog.wire.token_bodies import TOKEN_ID, IssuedToken

TICKET_S: Final = 30
"""Long enough to connect over a slow line (taste)."""
NO_TICKET: Final = "anonymous"
"""The ticket of a gateway that asks nobody."""
TICKET: Final = rf"([A-Za-z0-9_-]{{16,6000}}\.[0-9]{{1,12}}\.[0-9a-f]{{64}}|{NO_TICKET})"
"""What a JWT of 4,096 characters says fits."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """For a token, on a path, until an instant (seconds since 1970)."""

    holder: str
    """A token's id, or what a JWT says."""
    path: str
    ends_at: int

    def signed(self, key: bytes) -> str:
        """The ticket as it stands in a URL."""
        return f"{self.holder}.{self.ends_at}.{self._mac(key)}"

    @classmethod
    def checked(cls, text: str, path: str, key: bytes, now: float) -> "Ticket":
        """The ticket of a URL's text. Raises: Unauthenticated."""
        holder, _, rest = text.partition(".")
        ends_at, _, mac = rest.partition(".")
        if not (ends_at.isascii() and ends_at.isdecimal() and len(ends_at) <= 12 and mac.isascii()):
            raise Unauthenticated("this is no ticket")
        ticket = cls(holder, path, int(ends_at))
        if not hmac.compare_digest(mac, ticket._mac(key)):
            raise Unauthenticated("the ticket is not of this cluster, or for another path")
        if ticket.ends_at <= now:
            raise Unauthenticated("the ticket has expired: get another one (POST /v1/tickets)")
        return ticket

    def _mac(self, key: bytes) -> str:
        text = f"{self.holder}.{self.ends_at}.{self.path}"
        return hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def holder_of(issued: IssuedToken) -> str:
    """What a ticket says of a JWT."""
    said = base64.urlsafe_b64encode(issued.model_dump_json().encode())
    return said.rstrip(b"=").decode()


def issued_to(holder: str) -> IssuedToken | None:
    """What the ticket of a JWT says of it; None for a ticket of a token that has an id. Raises: Unauthenticated."""
    if re.fullmatch(TOKEN_ID, holder):
        return None
    padding = "=" * (-len(holder) % 4)
    try:
        return IssuedToken.model_validate_json(base64.urlsafe_b64decode(holder + padding))
    except ValueError:
        raise Unauthenticated("the ticket is of a gateway of another version") from None
