"""JWTs while they live: used through every door, expired, their keys rotated, and while metadata is away."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from loadtest.stores import StoreServers
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.wire.token_bodies import IssuedToken
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.jwts import QUOTAS_CLAIM, Jwts
from tests.support.issuer import LEEWAY_S, Issuer
from tests.support.waiting import until, within
from tests.unit.gateway.tokens.support import LOG, OTHER_LOG, Guarded, guarded
from tests.unit.gateway.tokens.test_quotas import is_beyond
from tests.unit.gateway.tokens.test_tokens import FORBIDDEN, code

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = (401, "unauthenticated")
ENTRIES = f"/v1/logs/{LOG}/records"


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer") / "keys.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers, issuer: Issuer) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh(), follow=(0, 1), issuer=issuer) as found:
        await found.log(LOG)
        await found.log(OTHER_LOG)
        yield found


async def test_a_jwt_has_its_grants_at_every_gateway(gateways: Guarded, issuer: Issuer) -> None:
    text = issuer.jwt("append:logs/orders-*", "openid")

    for at in (0, 1):
        done = await gateways.ask(text, "POST", ENTRIES, {"text": "a"}, at=at)
        assert done.status == 201
    assert code(await gateways.ask(text, "GET", ENTRIES)) == FORBIDDEN
    other = await gateways.ask(text, "POST", f"/v1/logs/{OTHER_LOG}/records", {"text": "a"})
    assert code(other) == FORBIDDEN
    assert other.json["detail"] == f"the JWT of ann has no grant of append on the log {OTHER_LOG}"
    assert code(await gateways.ask(issuer.jwt(), "GET", ENTRIES)) == FORBIDDEN


async def test_a_refusal_says_why_and_asks_nobody(gateways: Guarded, issuer: Issuer) -> None:
    async with gateways.world.outage():
        answer = await gateways.ask(issuer.jwt("admin:*", aud="another"), "GET", ENTRIES)

    assert code(answer) == UNKNOWN
    assert answer.json["detail"] == "the JWT is for another audience (aud)"
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


async def test_an_expired_jwt_is_refused_and_tails_end(gateways: Guarded, issuer: Issuer) -> None:
    text = issuer.jwt("read:*")
    headers = {"Authorization": f"Bearer {text}"}
    url = gateways.http.urls[0]
    async with (
        gateways.http.session.ws_connect(f"{url}/v1/logs/{LOG}/ws", headers=headers) as socket,
        gateways.http.session.get(
            url + ENTRIES, headers=headers | {"Accept": "text/event-stream"}
        ) as tail,
    ):
        await socket.send_str('{"tail":{"from":0}}')
        await socket.receive()
        await tail.content.readline()

        gateways.skews["s"] = 601.0 + LEEWAY_S
        try:
            async with within("both are cut"):
                message = await socket.receive()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await tail.content.read()
            answer = await gateways.ask(text, "GET", ENTRIES)
        finally:
            gateways.skews["s"] = 0.0

    assert message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
    assert code(answer) == UNKNOWN
    assert "expired at" in answer.json["detail"]


async def test_a_key_removed_from_the_file_ends_its_jwts(gateways: Guarded, issuer: Issuer) -> None:
    issuer.add("leaving", "EdDSA")
    text = issuer.jwt("read:*", key_id="leaving")
    headers = {"Authorization": f"Bearer {text}", "Accept": "text/event-stream"}
    async with gateways.http.session.get(gateways.http.urls[0] + ENTRIES, headers=headers) as tail:
        assert tail.status == 200
        await tail.content.readline()

        issuer.drop("leaving")

        async with within("the tail is cut"):
            with pytest.raises(aiohttp.ClientPayloadError):
                await tail.content.read()

    async def is_refused(at: int) -> bool:
        return (await gateways.ask(text, "GET", ENTRIES, at=at)).status != 200

    for at in (0, 1):
        # Each gateway looks at its file by itself.
        await until(partial(is_refused, at), "the gateway has read the file again")
        assert code(await gateways.ask(text, "GET", ENTRIES, at=at)) == UNKNOWN
    assert (await gateways.ask(issuer.jwt("read:*"), "GET", ENTRIES)).status == 200


async def test_while_metadata_is_away_unseen_jwts_go_on(gateways: Guarded, issuer: Issuer) -> None:
    known = issuer.jwt("append:*")
    assert (await gateways.ask(known, "POST", ENTRIES, {"text": "a"})).status == 201

    async with gateways.world.outage():
        new = issuer.jwt("append:*", sub="bert")
        appended = await gateways.ask(new, "POST", ENTRIES, {"text": "a"})

    assert appended.status == 201


async def test_a_gateway_without_a_token_list_knows_jwts(gateways: Guarded, issuer: Issuer) -> None:
    client = TokenClient(gateways.world.gateways[0].engine.metadata)
    callers = Callers(client, jwts=Jwts(issuer.rules))

    async with gateways.world.outage():
        caller = await callers.identify(issuer.jwt("read:*"))

    assert caller.who == "the JWT of ann"


async def test_a_signature_is_verified_once(gateways: Guarded, issuer: Issuer) -> None:
    class Counting(Jwts):
        count = 0

        def verified(self, text: str) -> IssuedToken:
            self.count += 1
            return super().verified(text)

    jwts = Counting(issuer.rules)
    callers = Callers(TokenClient(gateways.world.metadata), jwts=jwts)
    text = issuer.jwt("read:*")

    found = {id(await callers.identify(text)) for _ in range(10)}

    assert (len(found), jwts.count) == (1, 1)


async def test_a_jwts_ticket_opens_one_path_and_ends(gateways: Guarded, issuer: Issuer) -> None:
    text = issuer.jwt(f"read:logs/{LOG}")
    made = await gateways.ask(text, "POST", "/v1/tickets", {"path": ENTRIES})
    ticket = made.json["ticket"]
    query = f"?ticket={ticket}"
    holder, ends_at, mac = ticket.split(".")
    stronger, _, _ = (
        (await gateways.ask(issuer.jwt("admin:*"), "POST", "/v1/tickets", {"path": ENTRIES}))
        .json["ticket"]
        .split(".")
    )

    assert made.status == 201
    assert not set(text.split(".")) & {holder, ends_at, mac}, "the ticket is no JWT"
    for at in (0, 1):
        assert (await gateways.ask(None, "GET", ENTRIES + query, at=at)).status == 200
    for asked in (
        f"/v1/logs/{LOG}/ws{query}",
        f"/v1/logs/{OTHER_LOG}/records{query}",
        f"{ENTRIES}?ticket={stronger}.{ends_at}.{mac}",
        f"{ENTRIES}?ticket={holder}.9999999999.{mac}",
    ):
        assert code(await gateways.ask(None, "GET", asked)) == UNKNOWN, asked
    assert code(await gateways.ask(ticket, "GET", ENTRIES)) == UNKNOWN, "a ticket is no token"

    url = f"{gateways.http.urls[1]}{ENTRIES}{query}"
    headers = {"Accept": "text/event-stream"}
    async with gateways.http.session.get(url, headers=headers) as tail:
        assert tail.status == 200
        await tail.content.readline()
        gateways.skews["s"] = 601.0 + LEEWAY_S
        try:
            async with within("the tail is cut at the end of the JWT"):
                with pytest.raises(aiohttp.ClientPayloadError):
                    await tail.content.read()
        finally:
            gateways.skews["s"] = 0.0


async def test_quotas_count_all_jwts_of_a_subject(gateways: Guarded, issuer: Issuer) -> None:
    quotas: Any = {QUOTAS_CLAIM: {"connections": 1}}
    one = issuer.jwt("read:*", sub="carl", **quotas)
    another = issuer.jwt("read:*", sub="carl", jti="2", **quotas)
    headers = {"Authorization": f"Bearer {one}", "Accept": "text/event-stream"}

    async with gateways.http.session.get(gateways.http.urls[0] + ENTRIES, headers=headers) as tail:
        await tail.content.readline()
        refused = await gateways.ask(another, "GET", "/v1/logs")
        of_dora = issuer.jwt("read:*", sub="dora", **quotas)
        other = await gateways.ask(of_dora, "GET", "/v1/logs")

    assert is_beyond(refused, "1 connections with requests in progress")
    assert other.status == 200

    async def is_taken() -> bool:
        return (await gateways.ask(another, "GET", "/v1/logs")).status == 200

    await until(is_taken, "the connection is free again")


async def test_without_an_issuer_a_jwt_is_an_unknown_token(
    gateways: Guarded, issuer: Issuer, tmp_path: Path
) -> None:
    callers = Callers(TokenClient(gateways.world.metadata))
    stranger = Issuer(tmp_path / "keys.json")

    found = await asyncio.gather(callers.identify(issuer.jwt("admin:*")), return_exceptions=True)
    answer = await gateways.ask(stranger.jwt("admin:*"), "GET", ENTRIES)

    assert "the token was revoked, or never created" in str(found[0])
    assert code(answer) == UNKNOWN
    assert "does not match its key" in answer.json["detail"]
