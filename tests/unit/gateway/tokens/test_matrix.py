"""Every public operation with every kind of token: what the table in the code says is what happens."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from loadtest.stores import StoreServers
from services.gateway.edge.access.guard import Unguarded, table_of
from services.gateway.edge.access.scopes import Named, Scope
from services.gateway.edge.operations import PublicOperation
from services.gateway.logs.values import STREAM_PREFIX
from tests.support.issuer import Issuer, said_by_default
from tests.support.scopes import PAGE, operations, with_table
from tests.unit.gateway.tokens.support import LOG, NAMESPACE, Guarded, guarded

pytestmark = pytest.mark.asyncio(loop_scope="module")

_NAMES_IN_BODY = {
    "createLedger": {"metadata": {"namespace": NAMESPACE}},
    "beginTransaction": {"log": LOG},
}
"""Bodies by which the handler judges. All others are refused for what they are, by whoever is let in."""
_ALL = frozenset(Scope)
SCOPES = {one.name: one.scope for one in operations()}
ABSENT = {Named.LEDGER: "no-such-ledger", Named.TRANSACTION: "no-such-transaction"}
"""What a token for something else gets, by what an operation is on."""


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer") / "keys.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(
    servers: StoreServers, issuer: Issuer
) -> AsyncIterator[tuple[Guarded, dict[str, str]]]:
    """The gateways, and what the parameters of paths are replaced by."""
    async with guarded(servers.fresh(), issuer=issuer) as found:
        await found.log(LOG)
        ledger_id = await found.ledger(namespace=NAMESPACE)
        begun = await found.done("POST", "/v1/transactions", {"log": LOG})
        yield (
            found,
            {
                "name": LOG,
                "ledger_id": str(ledger_id),
                "entry_id": "0",
                "transaction": begun["transaction"],
                "code": "invalid",
                "file": "app.js",
                "consumer": "me",
                "queue": "mail",
                "key": "k",
                "path": "chat/42",
                "id": "0" * 16,
                "bookie": "bookie-9",
            },
        )


async def test_the_page_has_the_table_of_the_code() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), "run `make docs`"


def on(scope: Scope, logs: str, stream: str, ledgers: str) -> tuple[str, ...]:
    both = (f"{scope}:logs/{name}" for name in (logs, stream))
    return *both, f"{scope}:ledgers/{ledgers}", f"{scope}:cluster"


def expected(name: str, scopes: frozenset[Scope], *, is_here: bool, is_all: bool) -> str:
    """What a known token gets, by the table: "let in" or "forbidden"."""
    access = SCOPES[name]
    if access.named is Named.NOTHING:
        return "let in"
    is_named = {
        Named.EVERYTHING: is_all,
        Named.CLUSTER: True,
        # Lists are for whoever may read anything, and leave out the rest.
        Named.SOME: is_here or name not in _NAMES_IN_BODY,
    }.get(access.named, is_here)
    if is_named and scopes & access.scopes:
        return "let in"
    # An id does not name what grants name, and tells nothing of it.
    is_hidden = access.named in ABSENT and not is_here and scopes & access.scopes
    return ABSENT[access.named] if is_hidden else "forbidden"


async def test_each_cell_of_operation_and_token_is_as_the_table_says(
    places: tuple[Guarded, dict[str, str]], issuer: Issuer
) -> None:
    guarded, names = places
    revoked, revoked_id = await guarded.token("admin:*")
    expired, _ = await guarded.token("admin:*", expires_in_s=60)
    await guarded.tokens.revoke(revoked_id)
    unknown = {
        "none": None,
        "bad": "qlt_" + "a" * 43,
        "revoked": revoked,
        "expired": expired,
        "expired JWT": issuer.jwt("admin:*"),
        "JWT for another audience": issuer.jwt("admin:*", aud="another"),
        "unsigned JWT": issuer.jwt("admin:*").rpartition(".")[0] + ".",
    }
    known = {}
    for scope in Scope:
        scopes = _ALL if scope is Scope.ADMIN else frozenset((scope,))
        for label, is_here, grants in (
            ("here", True, on(scope, "orders-*", f"{STREAM_PREFIX}chat_2F*", f"{NAMESPACE}*")),
            ("exactly here", True, on(scope, LOG, f"{STREAM_PREFIX}chat_2F42", NAMESPACE)),
            ("elsewhere", False, on(scope, "order", f"{STREAM_PREFIX}chat", "team-b*")),
            ("everywhere", True, (f"{scope}:*",)),
        ):
            secret, _ = await guarded.token(*grants)
            known[f"{scope} {label}"] = (secret, scopes, is_here, label == "everywhere")
            issued = issuer.jwt(*grants, exp=said_by_default()["exp"] + 7200)
            known[f"{scope} {label}, JWT"] = (issued, scopes, is_here, label == "everywhere")
    description = (await guarded.ask(None, "GET", "/openapi.json")).json
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    guarded.skews["s"] = 3600.0

    for is_let_in in (False, True):  # first what changes nothing
        for path, item in description["paths"].items():
            for method, operation in item.items():
                name = operation["operationId"]
                needs_token = "Where tokens are required" in operation.get("description", "")
                assert needs_token is (SCOPES[name].named is not Named.NOTHING), name
                where = re.sub(r"{(\w+)}", lambda found: names[found[1]], path)
                body = _NAMES_IN_BODY.get(name, {"nonsense": 1})
                json: Any = body if "requestBody" in operation else None
                for label, text in unknown.items():
                    want = "let in" if SCOPES[name].named is Named.NOTHING else "unauthenticated"
                    if (want == "let in") is is_let_in:
                        got = await answer(guarded, text, method, where, json)
                        cells[name, label] = want, got
                for label, (secret, scopes, is_here, is_all) in known.items():
                    want = expected(name, scopes, is_here=is_here, is_all=is_all)
                    if (want == "let in") is is_let_in:
                        got = await answer(guarded, secret, method, where, json)
                        if is_let_in and got in ABSENT.values():
                            got = want  # another cell has deleted it
                        cells[name, label] = want, got

    assert {cell: reported for cell, reported in cells.items() if reported[0] != reported[1]} == {}
    assert len(cells) == (len(unknown) + len(known)) * len(SCOPES)


async def answer(guarded: Guarded, secret: str | None, method: str, path: str, json: Any) -> str:
    found = await guarded.ask(secret, method, path, json)
    is_hidden = found.status == 404 and "for this token" in found.json["detail"]
    if found.status not in (401, 403) and not is_hidden:
        return "let in"
    if found.status == 401:
        assert found.headers["WWW-Authenticate"].startswith("Bearer")
    code: str = found.json["code"]
    # These operations judge by the token of a wake, and by no access token.
    return "let in" if code == "wake-token-invalid" else code


async def test_a_route_without_a_declaration_of_its_scope_does_not_start() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/new", handler)

    with pytest.raises(Unguarded, match="GET /v1/new"):
        table_of(app, operations())
    with pytest.raises(TypeError, match="scope"):
        PublicOperation("GET /v1/new", "aNewOperation", None, "New.")  # type: ignore[call-arg]
