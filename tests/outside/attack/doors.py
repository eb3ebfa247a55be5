"""Doors: who has no credentials, wrong ones, or another's."""

import asyncio
import secrets
from functools import partial
from typing import Final

from loadtest.waiting import DeadlineMissed, until
from services.gateway.edge.access.scopes import Named
from tests.outside.attack.api import Operation, operations
from tests.outside.attack.arena import Arena, made_token
from tests.outside.attack.hostile import Maker
from tests.outside.attack.report import Kind
from tests.support.scopes import operations as public_operations

_SCOPES: Final = {one.name: one.scope for one in public_operations()}
ELSEWHERE: Final = ("admin:logs/elsewhere-*", "admin:ledgers/elsewhere")
"""What a token is for that has nothing to do with what is attacked."""


async def strangers(arena: Arena) -> None:
    """Every public operation without a token, with one that nobody made, and with one for something else; every
    internal one without the secret, and with a token in its place.
    """
    found = await operations(arena.cluster)
    elsewhere = await made_token(arena.cluster, *ELSEWHERE)
    maker = Maker(arena, arena.dice)
    shown = {"no token": None, "an unknown token": guess(), "a token for elsewhere": elsewhere}

    async def one(operation: Operation, who: str) -> None:
        token = shown[who]
        line = "" if token is None else f"Authorization: Bearer {token}\r\n"
        name = f"{operation.kind}-1"
        # With its slash it would be the path of nothing.
        path = maker.path(operation).replace("attack/1", "attack-1")
        data = (
            f"{operation.method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{line}"
            "Content-Length: 0\r\n\r\n"
        ).encode()
        answer = await arena.send(
            name, data, operation=operation, method=operation.method, is_bare=True
        )
        if answer is None or answer.status in expected(operation, is_known=token == elsewhere):
            return
        what = f"{operation.method} {operation.path} with {who}: {answer.status}"
        arena.find(Kind.ANSWER, what, name, data)

    await arena.crowd(partial(one, operation, who) for operation in found for who in shown)


def expected(operation: Operation, *, is_known: bool) -> frozenset[int]:
    """What a stranger gets from an operation: a refusal, unless anybody may ask."""
    is_public = operation.kind == "gateway"
    access = _SCOPES.get(operation.name) if is_public else None
    if operation.path.startswith("/health/") or (access and access.named is Named.NOTHING):
        return frozenset(range(200, 600))
    if not is_public or not is_known:
        return frozenset({401, 429, 503})
    if access is not None and access.named is Named.SOME:
        # A list without what is not the token's; or a body that names nothing of it.
        # There is no subscription with the id: a token that may manage something learns just that.
        unknown = {204, 404} if "/subscriptions/{id}" in operation.path else set[int]()
        return frozenset({200, 400, 403, 415, 422, *unknown})
    by_id = ("{transaction}", "{ledger_id}")
    is_missing = operation.method == "DELETE" or any(one in operation.path for one in by_id)
    return frozenset({403, 404}) if is_missing else frozenset({403})


async def names(arena: Arena) -> None:
    """Ids that are counted up, and lists page by page, with a token for something else: no name of what is not the token's
    is in an answer.
    """
    hidden = f"hidden-{secrets.token_hex(8)}"
    metadata = f'{{"metadata":{{"namespace":"{hidden}","customer":"ACME"}}}}'
    for method, path, body in (
        ("PUT", f"/v1/logs/{hidden}", "{}"),
        ("POST", f"/v1/logs/{hidden}/records", '{"text":"a"}'),
        ("POST", "/v1/ledgers", metadata),
        ("POST", "/v1/ledgers", metadata),
    ):
        asked = arena.signed("gateway-1", _with_body(method, path, body))
        made = await arena.send("gateway-1", asked)
        if made is None or made.status >= 300:
            arena.find(Kind.ANSWER, f"{method} {path}: {made}", "gateway-1")
    token = await made_token(arena.cluster, *ELSEWHERE)
    lists = [
        f"/v1/{path}&limit=1"
        for path in (
            "logs?prefix=hidden",
            "logs?after=a",
            "ledgers?metadata[customer]=ACME",
            "consumers?prefix=a",
        )
    ]

    async def one(method: str, path: str) -> None:
        data = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        ).encode()
        answer = await arena.send("gateway-2", data, is_bare=True)
        if answer is None or answer.status in (429, 503):
            return
        is_reported = hidden.encode() in answer.body or answer.status == 403
        if is_reported or (path in lists and b'"next":null' not in answer.body):
            arena.find(Kind.ANSWER, f"{method} {path} tells of others: {answer}", "gateway-2", data)

    await arena.crowd(
        partial(one, method, path)
        for path in [*lists, *(f"/v1/ledgers/{number}" for number in range(100))]
        for method in (("GET",) if path in lists else ("GET", "DELETE"))
    )


def _with_body(method: str, path: str, body: str) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def guess() -> str:
    """A token that nobody made."""
    return f"qlt_{secrets.token_urlsafe(32)}"


async def guesses(arena: Arena) -> None:
    """Thousands of wrong tokens at both gateways; a token that is made meanwhile is known all the same."""

    async def one(number: int) -> None:
        name = f"gateway-{1 + number % 2}"
        answer = await arena.send(name, _asking(guess()), is_bare=True)
        if answer is not None and answer.status not in (401, 429, 503):
            arena.find(Kind.ANSWER, f"{answer.status} for a token that nobody made", name)

    async def join() -> None:
        token = await made_token(arena.cluster, "read:*")
        statuses = []

        async def is_known() -> bool:
            answer = await arena.send("gateway-1", _asking(token), is_bare=True)
            statuses.append(None if answer is None else answer.status)
            return statuses[-1] == 200

        try:
            await until(is_known, "a new token is known", arena.hang_s)
        except DeadlineMissed:
            arena.find(Kind.HANG, f"a new token is not known among guesses: {statuses[-5:]}")

    async with asyncio.TaskGroup() as group:
        group.create_task(join())
        await arena.crowd(partial(one, number) for number in range(arena.requests))


def _asking(token: str) -> bytes:
    return (
        f"GET /v1/logs?limit=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()
