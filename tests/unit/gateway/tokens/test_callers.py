"""Tokens while lists of them come, do not come, or change; without a cluster around."""

import asyncio
import contextlib
import logging
from datetime import datetime
from pathlib import Path

import pytest

from loadtest.stores import Stores
from quorumlog.errors import Forbidden, MetadataUnavailable, Unauthenticated
from quorumlog.net.connections import ListenLimits
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.net.listen import listening
from quorumlog.net.metadata_requests import MetadataRequests
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.token_bodies import TokenList, TokenQuotas, TokenRow
from services.gateway.app import build_app
from services.gateway.edge.access import callers as callers_module
from services.gateway.edge.access.callers import TICKET_S, Callers, Ticket
from services.gateway.edge.access.jwts import Jwts
from services.gateway.edge.access.scopes import Caller, Kind, Scope
from services.gateway.edge.http.limits import Limits
from services.gateway.edge.tokens import AccessTokenCreate
from services.gateway.interface import LedgerOptions
from services.gateway.logs.values import STREAM_PREFIX
from tests.support.issuer import Issuer
from tests.support.waiting import SETTLED_S, until, within
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.tokens.support import LOG, NAMESPACE, guarded


class Listing(TokenClient):
    """Lists as a metadata service does that never answers while it `hangs`, and is away otherwise until `rows` are."""

    def __init__(self, *rows: TokenRow) -> None:
        super().__init__(MetadataRequests(["http://127.0.0.1:1"]))
        self.rows: tuple[TokenRow, ...] | None = rows or None
        self.hangs = False
        self.asked = self.ended = 0

    async def list(self, known: str | None = None) -> TokenList:
        del known
        self.asked += 1
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if self.rows is None:
                raise MetadataUnavailable
            version = f"00000000-0000-4000-8000-{self.asked:012}"
            return TokenList(version=version, tokens=self.rows, ticket_key=bytes(32))
        finally:
            self.ended += 1


class Connection:
    """Of a request under way."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def row(*, grant: str = "read:*", expires_at: str | None = None) -> tuple[str, TokenRow]:
    quotas = TokenQuotas(requests_per_s=1)
    secret, drawn = AccessTokenCreate(name="a", grants=[grant], quotas=quotas).drawn()
    created_at = "2026-01-02T03:04:05Z"
    return secret, TokenRow(**drawn.model_dump(), created_at=created_at, expires_at=expires_at)


async def test_a_crowd_of_strangers_asks_the_metadata_service_as_one() -> None:
    for listing, refusal in (
        (Listing(row()[1]), Unauthenticated),
        (Listing(), MetadataUnavailable),
    ):
        callers = Callers(listing)

        found = await asyncio.gather(
            *(callers.identify(f"stranger {number}") for number in range(100)),
            return_exceptions=True,
        )

        assert {type(error) for error in found} == {refusal}
        assert listing.asked == 1


async def test_strangers_do_not_wait_for_silent_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "_LIST_S", SETTLED_S)
    listing = Listing()
    callers = Callers(listing)
    with pytest.raises(MetadataUnavailable):
        await callers.identify("a stranger")
    listing.hangs = True
    following = asyncio.create_task(callers.follow())
    await until(lambda: listing.asked == 2, "a list is waited for")

    with pytest.raises(MetadataUnavailable):
        await callers.identify("another stranger")

    assert listing.ended == 1, "the list is still waited for"
    following.cancel()
    await asyncio.wait({following})


async def test_each_outage_of_the_list_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callers_module, "REFRESH_S", 0.01)
    caplog.set_level(logging.INFO)
    listing = Listing()
    following = asyncio.create_task(Callers(listing).follow())

    for outages in (1, 2):
        listing.rows = None
        before = listing.asked
        await until(lambda: listing.asked >= before + 3, "the list is asked for")  # noqa: B023
        assert caplog.messages.count("tokens-unknown") == outages
        listing.rows = (row()[1],)
        before = listing.asked
        await until(lambda: listing.asked >= before + 2, "it is there again")  # noqa: B023

    following.cancel()
    await asyncio.wait({following})


async def test_a_new_list_keeps_the_tokens_it_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "REFRESH_S", 0.01)
    secret, kept = row(expires_at="2026-01-03T00:00:00Z")
    other, gone = row()
    listing, connection = Listing(kept, gone), Connection()
    now = datetime.fromisoformat("2026-01-02T23:59:59Z").timestamp()
    callers = Callers(listing, now=lambda: now)
    caller, ended = await callers.identify(secret), await callers.identify(other)
    caller.connections.add(connection)  # type: ignore[arg-type]
    cut = Connection()
    ended.connections.add(cut)  # type: ignore[arg-type]

    listing.rows = (kept, row()[1])
    following = asyncio.create_task(callers.follow())
    await until(lambda: cut.is_aborted, "the token that is gone is cut")

    assert await callers.identify(secret) is caller, "with what it has used"
    assert not connection.is_aborted
    now += 1
    await until(lambda: connection.is_aborted, "the token that has expired is cut")
    following.cancel()
    await asyncio.wait({following})


async def test_a_waiting_request_ends_with_its_token(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(FakeEngine):
        is_asked, answers = asyncio.Event(), asyncio.Event()

        async def row(self, ledger_id: int) -> LedgerMetadata:
            self.is_asked.set()
            await self.answers.wait()
            return await self.get(ledger_id)

    engine = Slow()
    made = await engine.create(LedgerOptions(custom=(("namespace", NAMESPACE),)))
    secret, revoked = row(grant=f"manage:ledgers/{NAMESPACE}")
    listing = Listing(revoked)
    callers = Callers(listing)
    app = build_app(engine, Limits(), callers=callers)
    async with listening(app, host="127.0.0.1", port=0, limits=ListenLimits()) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(
            f"DELETE /v1/ledgers/{made.ledger_id} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {secret}\r\n\r\n".encode()
        )
        await engine.is_asked.wait()
        listing.rows = (row()[1],)
        with pytest.raises(Unauthenticated):
            await callers.identify("a stranger, for whom the list is read")
        async with within("the connection is cut"):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""

        engine.answers.set()

        await until(lambda: "deleteLedger" in caplog.messages, "the request is over")
        writer.close()
    assert engine.deleted == set()


async def test_a_ticket_ends_at_its_instant_and_with_its_token(tmp_path: Path) -> None:
    secret, kept = row()
    listing = Listing(kept)
    jwts = Jwts(Issuer(tmp_path / "keys.json").rules)
    callers = Callers(listing, jwts=jwts, now=lambda: now)
    now, path = 1_800_000_000.0, f"/v1/logs/{LOG}/records"
    caller = await callers.identify(secret)
    ticket = await callers.ticket(caller, path)

    now += TICKET_S - 0.5
    assert await callers.identify_by_ticket(ticket, path) is caller
    assert listing.asked == 1, "the token is known"
    now += 0.5
    with pytest.raises(Unauthenticated, match="has expired"):
        await callers.identify_by_ticket(ticket, path)
    of_none = Ticket("0" * 16, path, int(now) + 1).signed(bytes(32))
    with pytest.raises(Unauthenticated, match="the token was revoked, or never created"):
        await callers.identify_by_ticket(of_none, path)


@pytest.mark.parametrize(
    ("kind", "name", "where"),
    [
        (Kind.CLUSTER, "", "the cluster"),
        (Kind.LOGS, "orders-1", "the log orders-1"),
        (Kind.LEDGERS, NAMESPACE, f"ledgers of the namespace {NAMESPACE}"),
        (Kind.LEDGERS, "", "ledgers without a namespace"),
    ],
)
def test_a_refusal_says_what_is_lacked_and_where(kind: Kind, name: str, where: str) -> None:
    caller = Caller("ann", ("read:logs/orders", "append:*", "read:ledgers/team"))

    with pytest.raises(Forbidden, match=f"ann has no grant of read on {where}$"):
        caller.check(Scope.READ, kind, name)
    caller.check(Scope.APPEND, kind, name)


SOURCE, FORK = "/v1/stream/secret", "/v1/stream/mine"
TEXT = {"Content-Type": "text/plain"}
FORKED = {**TEXT, "Stream-Forked-From": SOURCE}


async def test_a_fork_needs_the_right_to_read_its_source(stores: Stores) -> None:
    mine = tuple(f"{scope}:logs/{STREAM_PREFIX}mine" for scope in ("manage", "append", "read"))
    async with guarded(stores) as found:
        made = await found.ask(found.admin, "PUT", SOURCE, headers=TEXT, body=b"s")
        blind, _ = await found.token(*mine)
        reader, _ = await found.token(*mine, f"read:logs/{STREAM_PREFIX}secret")

        refused = await found.ask(blind, "PUT", FORK, headers=dict(FORKED), body=b"")
        unknown = await found.ask(
            blind, "PUT", FORK, headers=FORKED | {"Stream-Forked-From": f"{SOURCE}-2"}, body=b""
        )
        nothing = await found.ask(blind, "GET", FORK)
        forked = await found.ask(reader, "PUT", FORK, headers=dict(FORKED), body=b"")
        read = await found.ask(blind, "GET", FORK)

    assert made.status == 201
    assert (refused.status, refused.json["code"]) == (403, "forbidden")
    assert unknown.status == 403, "whether there is such a stream is not told"
    assert nothing.status == 404
    assert (forked.status, read.body) == (201, b"s")
