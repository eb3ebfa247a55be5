"""A gateway's client for access tokens in the metadata service."""

from quorumlog.net.metadata_requests import MetadataRequests, new_attempt, query_of
from quorumlog.wire.bodies import Body
from quorumlog.wire.token_bodies import TokenCreate, TokenFields, TokenList, TokenRevoke, TokenRow


class TokenClient:
    """Reads and changes access tokens. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def create(self, token: TokenFields, *, expires_in_s: int | None) -> TokenRow:
        """Store a token. Raises: InvalidRequest."""
        body = TokenCreate(token=token, expires_in_s=expires_in_s, attempt=new_attempt())
        return await self._client.ask("POST", "/v1/tokens", body, gives=TokenRow, settles=True)

    async def revoke(self, token_id: str) -> None:
        """Delete a token. Raises: NoSuchToken."""
        body = TokenRevoke(attempt=new_attempt())
        path = f"/v1/tokens/{token_id}"
        await self._client.ask("DELETE", path, body, gives=Body, settles=True)

    async def list(self, known: str | None = None) -> TokenList:
        """All tokens, unless `known` is the list's version. Proven: a database that went back may have tokens
        that were revoked since (rule 18a).
        """
        query = query_of(known=known)
        return await self._client.ask("GET", "/v1/tokens", gives=TokenList, query=query, proof=True)
