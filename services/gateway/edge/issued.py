"""The callers that this gateway knows by JWTs of an issuer. No service is asked for that."""

from collections.abc import Callable
from typing import Final

from quorumlog.errors import Unauthenticated
from quorumlog.wire.token_bodies import IssuedToken, TokenQuotas
from services.gateway.edge.access import Caller
from services.gateway.edge.jwts import Jwts
from services.gateway.edge.quotas import Usage

ISSUED_MAX: Final = 10_000
"""JWTs that are remembered, and subjects whose use is (taste)."""
_NO_QUOTAS: Final = TokenQuotas()


class IssuedCallers:
    """Callers by the hash of their JWTs, so that a signature is verified once, or by what a ticket says of a JWT.

    Invariant: a ticket is no key of a JWT, which it is not worth.
    """

    def __init__(self, jwts: Jwts, now: Callable[[], float]) -> None:
        self._jwts, self._now = jwts, now
        self._known: dict[bytes | IssuedToken, Caller] = {}
        self._usages: dict[tuple[str, TokenQuotas], Usage] = {}
        """By subject: who gets many JWTs gets no more than one of them allows."""

    def identify(self, digest: bytes, text: str) -> Caller:
        """Who calls with a JWT that has this hash. Raises: Unauthenticated."""
        known = self._known.get(digest)
        return known or self._note(digest, self._jwts.verified(text))

    def identify_by_ticket(self, issued: IssuedToken) -> Caller:
        """Who calls with a ticket that a gateway has signed. Raises: Unauthenticated."""
        if (known := self._known.get(issued)) is not None:
            return known
        if not self._jwts.has(issued.key):
            self._jwts.look()
        if not self._jwts.has(issued.key):
            raise Unauthenticated("the issuer of the ticket's JWT has its key no longer")
        return self._note(issued, issued)

    def refresh(self) -> None:
        """Take changed keys, and end the callers whose JWT has expired or whose key is gone."""
        self._jwts.look()
        now = self._now()
        for key, caller in list(self._known.items()):
            assert caller.issued is not None
            if caller.issued.ends_at <= now or not self._jwts.has(caller.issued.key):
                del self._known[key]
                caller.end()

    def charge_flows(self) -> None:
        """Charge subjects what has come and was sent of their requests that are under way."""
        for usage in self._usages.values():
            usage.charge_flows()

    def _note(self, key: bytes | IssuedToken, issued: IssuedToken) -> Caller:
        who = f"the JWT of {issued.subject}"
        caller = Caller(who, issued.grants, ends_at=issued.ends_at, issued=issued)
        if issued.quotas != _NO_QUOTAS:
            caller.usage = self._usage(who, issued)
        if len(self._known) >= ISSUED_MAX:
            # Those that are forgotten are verified once more. Who is connected must be ended at the end of the JWT.
            self._known = {one: known for one, known in self._known.items() if known.connections}
        self._known[key] = caller
        return caller

    def _usage(self, who: str, issued: IssuedToken) -> Usage:
        key = (issued.subject, issued.quotas)
        if key not in self._usages:
            if len(self._usages) >= ISSUED_MAX:
                del self._usages[next(iter(self._usages))]
            self._usages[key] = Usage(who, issued.quotas)
        return self._usages[key]
