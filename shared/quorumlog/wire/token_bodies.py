"""Bodies of the metadata service's API for access tokens (docs/adr/0021-access-tokens.md), and for
the audit log, which records requests and their callers (docs/adr/0022-audit-log.md).

The program that creates a token chooses the secret at random, and sends only its SHA-256. No
service stores the secret, and only gateways receive it, in requests.
"""

import json
from typing import Annotated, Final

from pydantic import Field, StringConstraints, ValidationError

from quorumlog.protocol.values import ATTEMPT, Attempt, Key
from quorumlog.wire.bodies import Body, received

GRANTS_MAX: Final = 32
"""Maximum number of grants of a token: a request may be compared with each (by judgement)."""
EXPIRES_IN_S_MAX: Final = 10 * 365 * 24 * 3600

TOKEN_ID: Final = "[0-9a-f]{16}"  # noqa: S105
_NAME: Final = "[A-Za-z0-9._-]{1,200}"
GRANT: Final = rf"(read|append|work|manage|admin):(\*|cluster|(logs|ledgers)/(\*|{_NAME}\*?))"
"""A scope and its target: logs by name, ledgers by namespace, the whole cluster, or everything. A
`*` at the end stands for any further characters."""

NAMESPACE: Final = "namespace"
"""The key in a ledger's custom metadata by which grants select ledgers."""

Grant = Annotated[str, StringConstraints(pattern=rf"^{GRANT}$")]
_PRINTABLE: Final = r"^[^\x00-\x1f\x7f]+$"
TokenName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=_PRINTABLE)]


_Quota = Annotated[int | None, Field(default=None, ge=1, le=1 << 53)]


class TokenQuotas(Body):
    """A token's limits at each gateway; None means no limit for this token."""

    requests_per_s: _Quota = None
    bytes_per_s: _Quota = None
    """Bytes of request bodies and responses."""
    connections: _Quota = None
    """Number of connections with requests in flight."""
    open_ledgers: _Quota = None


class TokenFields(Body):
    """The fields of a token that its creator determines."""

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
    """A token to store. Without `expires_in_s`, the token is valid until it is revoked."""

    token: TokenFields
    expires_in_s: int | None = Field(default=None, ge=1, le=EXPIRES_IN_S_MAX)
    attempt: Attempt


class TokenRevoke(Body):
    """A request to delete a token."""

    attempt: Attempt


class TokenList(Body):
    """All tokens; None if the caller already has the list of this version."""

    version: Annotated[str, StringConstraints(pattern=rf"^{ATTEMPT}$")]
    tokens: tuple[TokenRow, ...] | None
    ticket_key: Key = Field(min_length=32, max_length=32)


class IssuedToken(Body):
    """The claims of a verified JWT of an issuer. A ticket for the JWT contains these claims."""

    subject: Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_PRINTABLE)]
    grants: tuple[Grant, ...] = Field(max_length=GRANTS_MAX)
    quotas: TokenQuotas = TokenQuotas()
    ends_at: int
    """The expiry of the JWT, in seconds since 1970."""
    key: str
    """The thumbprint of the issuer's key that signed the JWT (RFC 7638)."""


TARGET_CHARS_MAX: Final = 300
"""Maximum length of a target, above that of any existing name; a longer target is cut."""

_Text = Annotated[str, StringConstraints(max_length=TARGET_CHARS_MAX)]


class AuditedRequest(Body):
    """An audited request, in the form that services send to each other."""

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
        """Parse a header, which may be from a later release; None if it can't be parsed."""
        try:
            return received(cls, text)
        except ValidationError:
            return None


class AuditRow(AuditedRequest):
    """A record of an audited change, stored in the same transaction as the change."""

    number: int
    at: str
    via: _Text
    """The service that requested the change; empty if `who` did so directly."""


class AuditList(Body):
    """A page of changes, in the order of their numbers."""

    audit: tuple[AuditRow, ...]
    next: int | None
