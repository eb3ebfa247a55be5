"""Bodies of the metadata service's API about access tokens (docs/adr/0021-access-tokens.md), and about the audit log, which
tells what was asked for on whose behalf (docs/adr/0022-audit-log.md).

Whoever makes a token draws its secret and sends SHA-256 of it: no service stores the secret, and only the
gateways see it in use.
"""

import json
from typing import Annotated, Final

from pydantic import Field, StringConstraints, ValidationError

from quorumlog.protocol.values import ATTEMPT, Attempt, Key
from quorumlog.wire.bodies import Body, received

GRANTS_MAX: Final = 32
"""Grants of one token, all of which a request may be compared with (taste)."""
EXPIRES_IN_S_MAX: Final = 10 * 365 * 24 * 3600

TOKEN_ID: Final = "[0-9a-f]{16}"  # noqa: S105
_NAME: Final = "[A-Za-z0-9._-]{1,200}"
GRANT: Final = rf"(read|append|manage|admin):(\*|cluster|(logs|ledgers)/(\*|{_NAME}\*?))"
"""A scope, and what it is for: logs by name, ledgers by namespace, the cluster as a whole, or everything. `*` at the
end stands for any rest."""

NAMESPACE: Final = "namespace"
"""The key of a ledger's custom metadata by which grants on ledgers are judged."""

Grant = Annotated[str, StringConstraints(pattern=rf"^{GRANT}$")]
_PRINTABLE: Final = r"^[^\x00-\x1f\x7f]+$"
TokenName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=_PRINTABLE)]


_Quota = Annotated[int | None, Field(default=None, ge=1, le=1 << 53)]


class TokenQuotas(Body):
    """What a token may use of each gateway; None: as much as anybody."""

    requests_per_s: _Quota = None
    bytes_per_s: _Quota = None
    """Of bodies and answers."""
    connections: _Quota = None
    """With requests under way."""
    open_ledgers: _Quota = None


class TokenFields(Body):
    """What the maker of a token says of it."""

    id: Annotated[str, StringConstraints(pattern=rf"^{TOKEN_ID}$")]
    hash: Key = Field(min_length=32, max_length=32)
    name: TokenName
    grants: tuple[Grant, ...] = Field(min_length=1, max_length=GRANTS_MAX)
    quotas: TokenQuotas = TokenQuotas()


class TokenRow(TokenFields):
    """An access token as it is stored."""

    created_at: str
    expires_at: str | None


class TokenCreate(Body):
    """A token to store. Without `expires_in_s` it is valid until it is revoked."""

    token: TokenFields
    expires_in_s: int | None = Field(default=None, ge=1, le=EXPIRES_IN_S_MAX)
    attempt: Attempt


class TokenRevoke(Body):
    """The deletion of a token."""

    attempt: Attempt


class TokenList(Body):
    """All tokens, or None where the asker knows the list of this version already."""

    version: Annotated[str, StringConstraints(pattern=rf"^{ATTEMPT}$")]
    tokens: tuple[TokenRow, ...] | None
    ticket_key: Key = Field(min_length=32, max_length=32)


class IssuedToken(Body):
    """What a JWT of an issuer says, once its signature is verified. A ticket of such a token carries it."""

    subject: Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_PRINTABLE)]
    grants: tuple[Grant, ...] = Field(max_length=GRANTS_MAX)
    quotas: TokenQuotas = TokenQuotas()
    ends_at: int
    """In seconds since 1970."""
    key: str
    """The thumbprint of the issuer's key that has signed it (RFC 7638)."""


TARGET_CHARS_MAX: Final = 300
"""A longer target is cut: it names nothing that exists."""

_Text = Annotated[str, StringConstraints(max_length=TARGET_CHARS_MAX)]


class AuditedRequest(Body):
    """A request that is audited, as services tell each other of it."""

    id: Attempt
    who: _Text
    remote: _Text
    operation: _Text
    target: _Text

    def to_header(self) -> str:
        """The value of the header, in ASCII."""
        return json.dumps(self.model_dump())

    @classmethod
    def from_header(cls, text: str) -> "AuditedRequest | None":
        """What a header tells, or None. It may be a later release's."""
        try:
            return received(cls, text)
        except ValidationError:
            return None


class AuditRow(AuditedRequest):
    """A change that was made: its row is of the same transaction."""

    number: int
    at: str
    via: _Text
    """The service that asked for the change; empty where that is who asked."""


class AuditList(Body):
    """A page of changes, in the order of their numbers."""

    audit: tuple[AuditRow, ...]
    next: int | None
