"""Authenticates callers by access token, JWT or ticket.

A gateway reads the metadata service's list of tokens every second, and again before it refuses an
unknown token. Therefore a new token works at once at every gateway, and a revoked token is refused
within seconds. While the metadata service is unavailable, cached tokens work until they expire. An
unknown token may be new, so the gateway responds with 503 instead of 401.

Gateways also accept, and verify locally, the JWTs of a configured issuer (`access/jwts.py`).

A page in a browser can't send headers with an event stream or WebSocket. Instead, it puts a ticket
into the URL. A ticket stands for a token on one path for half a minute, so tickets in a proxy's log
are soon worthless. Gateways share the signing key, so every gateway accepts all tickets. A ticket
contains the token's id, or all claims of a JWT, which other gateways may lack.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from quorumlog.errors import MetadataUnavailable, QuorumLogError, Unauthenticated
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.net.timers import Tasks, restarted, wall_s
from quorumlog.wire.token_bodies import TOKEN_ID, IssuedToken, TokenQuotas, TokenRow
from services.gateway.edge.access.jwts import IssuedCallers, Jwts, is_jwt
from services.gateway.edge.access.quotas import Usage
from services.gateway.edge.access.scopes import Caller

log = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""Interval of reading the list, and thus the longest delay until a revoked token is refused."""
_LIST_S: Final = 3.0
"""Timeout of reading the list: short, because requests wait for it (chosen by judgement)."""
_PAUSE_S: Final = 0.05
"""Minimum pause before a read for an unknown token, to limit the load (chosen by judgement)."""
_TOKEN_CHARS_MAX: Final = 4096
"""Maximum length of a token; a longer token is refused without hashing it."""
_MAY_BE_NEW: Final = "this gateway can't check the token now: retry with the same token"


def _caller_of(row: TokenRow) -> Caller:
    """Create the caller of a token."""
    ends = row.expires_at
    ends_at = None if ends is None else datetime.fromisoformat(ends).timestamp()
    caller = Caller(f"the token {row.name} ({row.id})", row.grants, row.id, ends_at=ends_at)
    if row.quotas != TokenQuotas():
        caller.usage = Usage(caller.who, row.quotas)
    return caller


class Callers:
    """The cached tokens, by the hash of their secrets.

    Invariant: a token is refused only after a read of the list that began after the request.
    """

    def __init__(
        self,
        client: TokenClient,
        *,
        jwts: Jwts | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`jwts` verifies the JWTs of an issuer; None if no issuer is configured. `now` returns the
        time in seconds since 1970, which decides whether a token has expired.
        """
        self._client = client
        self._now = now or wall_s
        self._issued = None if jwts is None else IssuedCallers(jwts, self._now)
        self._rows: dict[bytes, TokenRow] = {}
        self._known: dict[bytes, Caller] = {}
        self._by_id: dict[str, Caller] = {}
        self._ticket_key = b""
        self._version: str | None = None
        self._lists = asyncio.Lock()
        self._begun = self._done = 0
        """How many reads of the list have begun, and the number of the last successful read."""
        self._listed_at = -math.inf
        self._is_away = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, client: TokenClient, jwts: Jwts | None = None
    ) -> AsyncIterator["Callers"]:
        """Create the callers, and keep their list fresh within the block."""
        callers, tasks = cls(client, jwts=jwts), Tasks()
        tasks.start(restarted(callers.follow))
        try:
            yield callers
        finally:
            await tasks.close()

    async def follow(self) -> None:
        """Read the list every `REFRESH_S` seconds, and end callers whose tokens have expired."""
        while True:
            with contextlib.suppress(QuorumLogError):
                async with self._lists:
                    await self._list()
            self._look_after()
            await asyncio.sleep(REFRESH_S)

    async def identify(self, secret: str) -> Caller:
        """Return the caller of a token or JWT. Raises: Unauthenticated, MetadataUnavailable."""
        if len(secret) > _TOKEN_CHARS_MAX:
            raise Unauthenticated(
                f"the token is longer than {_TOKEN_CHARS_MAX} characters: send a valid token"
            )
        # The lookup uses the secret's hash, so that the response time reveals nothing of the secret.
        digest = _digest(secret)
        known = self._known.get(digest)
        if known is None:
            if self._issued is not None and is_jwt(secret):
                return self._valid(self._issued.identify(digest, secret))
            await self._learn()
            known = self._known.get(digest)
        return self._valid(known)

    async def ticket(self, caller: Caller, path: str) -> str:
        """Create a ticket for the caller's token on `path`. Raises: MetadataUnavailable."""
        holder = caller.id if caller.issued is None else holder_of(caller.issued)
        ends_at = int(self._now()) + TICKET_S
        return Ticket(holder, path, ends_at).signed(await self._known_ticket_key())

    async def identify_by_ticket(self, text: str, path: str) -> Caller:
        """Find the caller of a ticket for `path`. Raises: Unauthenticated, MetadataUnavailable."""
        key = await self._known_ticket_key()
        holder = Ticket.checked(text, path, key, self._now()).holder
        known = self._by_id.get(holder)
        if known is None:
            issued = issued_to(holder)
            if self._issued is not None and issued is not None:
                return self._valid(self._issued.identify_by_ticket(issued))
            await self._learn()
            known = self._by_id.get(holder)
        return self._valid(known)

    async def _known_ticket_key(self) -> bytes:
        """Return the key that signs tickets. Raises: MetadataUnavailable."""
        if not self._ticket_key:
            await self._learn()
        return self._ticket_key

    def _valid(self, caller: Caller | None) -> Caller:
        if caller is None:
            raise Unauthenticated("the token was revoked, or never created: send another token")
        if caller.ends_at is not None and caller.ends_at <= self._now():
            ended = datetime.fromtimestamp(caller.ends_at, UTC).isoformat()
            raise Unauthenticated(f"{caller.who} expired at {ended}: send another token")
        return caller

    async def _learn(self) -> None:
        """Wait for a read of the list that began after this call. Raises: MetadataUnavailable."""
        seen = self._begun
        # While the service is unavailable, fail at once, because waiting requests with unknown
        # tokens would use up the budget of requests.
        self._check_away()
        async with self._lists:
            if self._done > seen:
                return
            self._check_away()
            await asyncio.sleep(self._listed_at + _PAUSE_S - asyncio.get_running_loop().time())
            try:
                await self._list()
            except QuorumLogError as error:
                raise MetadataUnavailable(f"{_MAY_BE_NEW}: {error.detail}") from error

    def _check_away(self) -> None:
        """Raise MetadataUnavailable if the last read of the list failed."""
        if self._is_away:
            raise MetadataUnavailable(_MAY_BE_NEW)

    async def _list(self) -> None:
        """Read the list. The caller must hold the lock. Raises: QuorumLogError."""
        self._begun += 1
        try:
            async with asyncio.timeout(_LIST_S):
                listed = await self._client.list(self._version)
        except QuorumLogError as error:
            self._note_away(error.detail)
            raise
        except TimeoutError as error:
            why = "no metadata service returned the list of tokens in time"
            self._note_away(why)
            raise MetadataUnavailable(why) from error
        self._is_away = False
        self._ticket_key = listed.ticket_key
        if listed.tokens is not None:
            self._take(listed.tokens)
            self._version = listed.version
        self._done, self._listed_at = self._begun, asyncio.get_running_loop().time()

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            log.info("tokens-unknown", extra={"why": why})
        self._is_away = True

    def _take(self, rows: tuple[TokenRow, ...]) -> None:
        before, self._rows = self._rows, {row.hash: row for row in rows}
        old, self._known = self._known, {}
        for digest, row in self._rows.items():
            # `old` lacks the token if an earlier list could not be processed completely.
            same = old.pop(digest, None) if before.get(digest) == row else None
            self._known[digest] = same or _caller_of(row)
        self._by_id = {caller.id: caller for caller in self._known.values()}
        for caller in old.values():
            caller.end()

    def _look_after(self) -> None:
        """End callers whose tokens have expired, and charge the bytes of requests in progress."""
        now = self._now()
        for caller in self._known.values():
            if caller.connections and caller.ends_at is not None and caller.ends_at <= now:
                caller.end()
            if caller.usage is not None:
                caller.usage.charge_flows()
        if self._issued is not None:
            self._issued.refresh()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


TICKET_S: Final = 30
"""Lifetime of a ticket, enough to connect over a slow line (chosen by judgement)."""
NO_TICKET: Final = "anonymous"
"""The ticket of a gateway that requires no tokens."""
TICKET: Final = rf"([A-Za-z0-9_-]{{16,6000}}\.[0-9]{{1,12}}\.[0-9a-f]{{64}}|{NO_TICKET})"
"""Regular expression of a ticket, with space for the claims of a JWT of 4,096 characters."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket for one path, valid until `ends_at` (seconds since 1970)."""

    holder: str
    """The token's id, or the encoded claims of a JWT."""
    path: str
    ends_at: int

    def signed(self, key: bytes) -> str:
        """Encode and sign the ticket for a URL."""
        return f"{self.holder}.{self.ends_at}.{self._mac(key)}"

    @classmethod
    def checked(cls, text: str, path: str, key: bytes, now: float) -> "Ticket":
        """Decode and verify the ticket of a URL. Raises: Unauthenticated."""
        holder, _, rest = text.partition(".")
        ends_at, _, mac = rest.partition(".")
        if not (ends_at.isascii() and ends_at.isdecimal() and len(ends_at) <= 12 and mac.isascii()):
            raise Unauthenticated("the ticket is malformed: get a new ticket (POST /v1/tickets)")
        ticket = cls(holder, path, int(ends_at))
        if not hmac.compare_digest(mac, ticket._mac(key)):
            raise Unauthenticated("the ticket is for another cluster or path: get a new ticket")
        if ticket.ends_at <= now:
            raise Unauthenticated("the ticket has expired: get a new ticket (POST /v1/tickets)")
        return ticket

    def _mac(self, key: bytes) -> str:
        text = f"{self.holder}.{self.ends_at}.{self.path}"
        return hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def holder_of(issued: IssuedToken) -> str:
    """Encode the claims of a JWT as the holder of a ticket."""
    said = base64.urlsafe_b64encode(issued.model_dump_json().encode())
    return said.rstrip(b"=").decode()


def issued_to(holder: str) -> IssuedToken | None:
    """Decode the claims of a JWT from a ticket; None for a token's id. Raises: Unauthenticated."""
    if re.fullmatch(TOKEN_ID, holder):
        return None
    padding = "=" * (-len(holder) % 4)
    try:
        return IssuedToken.model_validate_json(base64.urlsafe_b64decode(holder + padding))
    except ValueError:
        raise Unauthenticated(
            "the ticket is of another gateway version: get a new ticket"
        ) from None
