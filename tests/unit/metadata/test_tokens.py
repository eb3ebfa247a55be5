"""Access tokens in the database: stored by the hash of their secret, listed since a version, and gone for good."""

import hashlib
import secrets

import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, MetadataUnavailable, NoSuchToken
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.wire.bodies import witness_of
from quorumlog.wire.token_bodies import TokenFields
from services.metadata import tokens as token_store
from tests.support.database import sql
from tests.unit.metadata.support import Service
from tests.unit.metadata.test_went_back import NOBODY


def drawn(name: str = "ci", *grants: str) -> TokenFields:
    return TokenFields(
        id=secrets.token_hex(8),
        hash=hashlib.sha256(secrets.token_bytes(32)).digest(),
        name=name,
        grants=grants or ("read:*",),
    )


async def test_a_token_is_listed_until_it_is_revoked(service: Service) -> None:
    tokens = TokenClient(service.client)
    first, second = drawn("one", "append:logs/orders-*"), drawn("two", "admin:*")
    await tokens.create(first, expires_in_s=None)
    row = await tokens.create(second, expires_in_s=60)
    listed = await tokens.list()

    assert listed.tokens is not None
    assert [(one.id, one.hash, one.grants) for one in listed.tokens] == [
        (token.id, token.hash, token.grants) for token in (first, second)
    ]
    assert [one.expires_at is None for one in listed.tokens] == [True, False]
    assert listed.tokens[1] == row
    assert (await tokens.list(listed.version)).tokens is None

    await tokens.revoke(first.id)

    later = await tokens.list(listed.version)
    assert later.tokens == (row,)
    with pytest.raises(NoSuchToken):
        await tokens.revoke(first.id)


async def test_an_empty_list_has_a_version_too(service: Service) -> None:
    tokens = TokenClient(service.client)

    listed = await tokens.list()

    assert listed.tokens == ()
    assert (await tokens.list(listed.version)).tokens is None


async def test_a_repeat_of_an_attempt_gets_the_first_answer(service: Service) -> None:
    token, attempt = drawn(), new_attempt()
    body = {"token": token.model_dump(mode="json"), "attempt": attempt}
    first = await service.send("POST", "/v1/tokens", body)
    again = await service.send("POST", "/v1/tokens", body)
    end = {"attempt": new_attempt()}
    ends = [await service.send("DELETE", f"/v1/tokens/{token.id}", end) for _ in range(2)]

    assert first[0] == 201
    assert again == first
    assert ends == [(204, None), (204, None)]
    assert (await service.send("POST", "/v1/tokens", body))[0] == 404


async def test_neither_an_id_nor_a_secret_is_used_twice(service: Service) -> None:
    tokens, token = TokenClient(service.client), drawn()
    await tokens.create(token, expires_in_s=None)

    for other in (drawn().model_copy(update={"id": token.id}),
                  drawn().model_copy(update={"hash": token.hash})):  # fmt: skip
        with pytest.raises(InvalidRequest, match="already in use"):
            await tokens.create(other, expires_in_s=None)


@pytest.mark.parametrize(
    "grant",
    [
        "write:*",
        "read",
        "read:logs",
        "read:logs/",
        "read:logs/a/b",
        "read:ledgers/7*8",
        "admin:cluster/*",
    ],
)
async def test_a_grant_that_is_none_is_refused(service: Service, grant: str) -> None:
    token = drawn().model_dump(mode="json") | {"grants": [grant]}

    status, problem = await service.send(
        "POST", "/v1/tokens", {"token": token, "attempt": new_attempt()}
    )

    assert status == 422, problem


@pytest.mark.parametrize(
    ("grants", "expires_in_s"), [(33, 60), (1, 10 * 365 * 24 * 3600 + 1), (0, 60), (1, 0)]
)
async def test_a_token_beyond_the_bounds_is_refused(
    service: Service, grants: int, expires_in_s: int
) -> None:
    token = drawn().model_dump(mode="json") | {"grants": ["read:*"] * grants}
    body = {"token": token, "expires_in_s": expires_in_s, "attempt": new_attempt()}

    assert (await service.send("POST", "/v1/tokens", body))[0] == 422


async def test_one_more_than_the_most_tokens_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "TOKENS_MAX", 1)
    tokens = TokenClient(service.client)
    await tokens.create(drawn(), expires_in_s=None)

    with pytest.raises(InvalidRequest, match="revoke some"):
        await tokens.create(drawn(), expires_in_s=None)


async def test_a_token_that_expired_long_ago_is_forgotten(service: Service, stores: Stores) -> None:
    tokens, old, kept = TokenClient(service.client), drawn(), drawn()
    await tokens.create(old, expires_in_s=60)
    await sql(stores, "UPDATE access_tokens SET expires_at = now() - interval '8 days'")

    await tokens.create(kept, expires_in_s=None)

    listed = (await tokens.list()).tokens
    assert listed is not None
    assert [one.id for one in listed] == [kept.id]


async def test_a_database_that_went_back_lists_no_tokens(service: Service) -> None:
    """It may have one that was revoked since."""
    await TokenClient(service.client).create(drawn(), expires_in_s=None)
    witness = witness_of(await service.client.cluster_id(), NOBODY)
    asker = MetadataClient([service.url], service.session, deadline_s=0.1)
    asker.witnesses = (witness,)

    with pytest.raises(MetadataUnavailable):
        await TokenClient(asker).list()
