"""The public bodies of access tokens as pydantic models."""

from typing import Annotated, Any

from pydantic import FailFast, Field, StringConstraints, WithJsonSchema
from yarl import URL

from quorumlog.wire.new_tokens import draw_token
from quorumlog.wire.token_bodies import (
    EXPIRES_IN_S_MAX,
    GRANT,
    GRANTS_MAX,
    TOKEN_ID,
    TokenFields,
    TokenName,
    TokenQuotas,
    TokenRow,
)
from services.gateway.edge.models import DATE_TIME, Model

Grant = Annotated[str, StringConstraints(pattern=rf"^{GRANT}$")]


class AccessTokenCreate(Model):
    """A token to make."""

    name: TokenName = Field(description="For people: who has it, or what for.")
    grants: Annotated[list[Grant], FailFast()] = Field(
        min_length=1,
        max_length=GRANTS_MAX,
        description="`read`, `append`, `manage` or `admin`, then `:`, and what for: `logs/NAME`, `ledgers/NAMESPACE`"
        " (each with `*` for any rest), `cluster`, or `*` for everything.",
    )
    quotas: TokenQuotas = Field(
        default=TokenQuotas(),
        description="What the token may use of each gateway, in requests and bytes per second, connections with"
        " requests under way, and open ledgers; beyond: 429 overloaded.",
    )
    expires_in_s: int | None = Field(
        default=None, ge=1, le=EXPIRES_IN_S_MAX, description="Without it: valid until revoked."
    )

    def drawn(self) -> tuple[str, TokenFields]:
        """A new secret, and what is stored of it."""
        drawn = draw_token()
        return drawn.secret, TokenFields(
            id=drawn.id,
            hash=drawn.hash,
            name=self.name,
            grants=tuple(self.grants),
            quotas=self.quotas,
        )


class AccessToken(Model):
    """A token without its secret."""

    id: Annotated[str, StringConstraints(pattern=rf"^{TOKEN_ID}$")]
    name: str
    grants: list[str]
    quotas: TokenQuotas
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None


class NewAccessToken(AccessToken):
    """A token with its secret, which is shown this once."""

    token: str


class AccessTokenList(Model):
    """All tokens, by creation."""

    tokens: list[AccessToken]


class TicketCreate(Model):
    """A ticket to make."""

    path: Annotated[
        str,
        StringConstraints(
            pattern=r"^/v1/((logs|ledgers)/[A-Za-z0-9._-]{1,200}/(entries|ws)|stream/[!-\"$->@-~]{1,600})$"
        ),
    ] = Field(description="The path of what is read, as its URL has it, without a query.")

    @property
    def named(self) -> str:
        """The path as a request names it, however the URL was escaped."""
        return URL(self.path, encoded=True).path


class NewTicket(Model):
    """A ticket."""

    ticket: str = Field(description="Goes into the query: `?ticket=…`.")
    expires_in_s: int


def token_json(row: TokenRow) -> dict[str, Any]:
    """A token as clients see it."""
    return row.model_dump(mode="json", exclude={"hash"})
