"""Hostile requests: on every route, made from the services' descriptions, and bytes on every port."""

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from quorumlog import header
from tests.outside.attack import garbage
from tests.outside.attack.api import KINDS, Operation, operations
from tests.outside.attack.arena import JSON, Arena
from tests.outside.attack.report import Kind

ALL_OF_US: Final = {
    ("bookie", "/v1/state"),
    ("bookie", "/v1/maintenance"),
    ("metadata", "/v1/bookies/{name}/cookie"),
    ("metadata", "/v1/bookies/{name}/log-end"),
    ("metadata", "/v1/bookies/{name}/heartbeat"),
    ("metadata", "/v1/services/{kind}/{id}/heartbeat"),
    ("metadata", "/v1/repair-settings"),
    ("metadata", "/v1/leases/{name}"),
    ("metadata", "/v1/witnesses"),
    ("metadata", "/v1/witnesses/accept"),
    ("autorecovery", "/v1/settings"),
    ("autorecovery", "/v1/lost-bookie-delay"),
    ("gateway", "/v1/autorecovery"),
    ("gateway", "/v1/witnesses/accept"),
}
"""A right request changes the cluster for everybody: these get only bodies that mean nothing."""

NOBODYS: Final = "999999999"
"""The id of no ledger."""

_HOSTILE: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1.5, 1e308, 2**63, 10**400, "", "\0", "\ud800", "x" * 70_000, [], {}, [[[]]],
    [None] * 1000, {"": {"": {}}}, "9" * 400, "../..", "bookie-1@1", -(2**63), {"a": "\0"},
)  # fmt: skip
"""In the place of any value of a JSON body."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is written."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    is_chunked: bool = False

    def bytes(self, host: str) -> bytes:
        """On the wire. Where it frames its body itself (`Content-Length`), it is not framed twice."""
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        body = self.body
        if self.is_chunked:
            lines.append("Transfer-Encoding: chunked")
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = chunk + b"0\r\n\r\n"
        elif body:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Maker:
    """Makes requests that are wrong in one or two places."""

    def __init__(self, arena: Arena, dice: random.Random) -> None:
        self._arena = arena
        self._dice = dice

    def path(self, operation: Operation, *, hostile: str = "") -> str:
        """A path that names the attackers' own things, or `hostile` in one place."""
        arena, path = self._arena, operation.path
        known = {
            "ledger_id": str(self._dice.choice((arena.ledger_id, arena.closed_id))),
            "entry_id": "0",
            "transaction": "attack/1",
            # Names of bookies that are not there: decommissioning one that is would be no attack.
            "name": arena.log if "/logs/" in path else "attack-bookie",
            "bookie": "attack-bookie",
            "member": "attack-bookie@1",
            "kind": "gateways",
            "id": "1",
            "code": "invalid",
            "consumer": "attack",
            "queue": "attack",
            "key": "attack",
            "path": "attack-stream",
            "file": "app.js",
        }
        if operation.method == "DELETE":
            # What is deleted is no longer there to be asked about.
            known |= {"ledger_id": NOBODYS, "name": "nobodys"}
        places = [name for name in known if f"{{{name}}}" in path]
        chosen = self._dice.choice(places) if hostile and places else ""
        for name in places:
            path = path.replace(f"{{{name}}}", hostile if name == chosen else known[name])
        return path

    def request(self, operation: Operation) -> Request:
        """One hostile request on an operation."""
        dice = self._dice
        ways = [self._bad_headers, self._bad_body, self._bad_body]
        if "{" in operation.path and not _is_delicate(operation):
            ways.append(self._bad_path)
        ways += [self._bad_query] * (1 + bool(operation.queries))
        if dice.random() < 0.1:
            ways = [self._bad_method]
        made = dice.choice(ways)(operation)
        if operation.path.startswith("/internal/") and dice.random() < 0.9:
            instance = (header.FORWARDED_WRITER, self._arena.instance)
            made = Request(
                made.method, made.target, (*made.headers, instance), made.body, made.is_chunked
            )
        return made

    def honest(self, operation: Operation) -> Request:
        """A request on an operation with nothing that is wrong, but that what it names may not be there."""
        plain = self._plain(operation, self.path(operation))
        examples = list(operation.bodies.get(JSON, {}).values())
        if not examples or _is_delicate(operation):
            return plain
        headers = (("Content-Type", JSON),)
        return Request(
            operation.method, plain.target, headers, orjson.dumps(self._dice.choice(examples))
        )

    def _bad_path(self, operation: Operation) -> Request:
        value = self._dice.choice(garbage.VALUES)
        return self._plain(operation, self.path(operation, hostile=value))

    def _bad_query(self, operation: Operation) -> Request:
        dice = self._dice
        names = [*operation.queries, "unknown", "limit", "%00", "metadata[k]", "metadata[", ""]
        pairs = [
            f"{dice.choice(names)}={dice.choice(garbage.VALUES)}" for _ in range(dice.randint(1, 3))
        ]
        if dice.random() < 0.2:
            pairs *= 2
        return self._plain(operation, f"{self.path(operation)}?{'&'.join(pairs)}")

    def _bad_headers(self, operation: Operation) -> Request:
        dice = self._dice
        names = [*operation.headers, "X-Request-Id", "Accept"]
        some = dice.choices(garbage.HEADERS, k=dice.randint(1, 3))
        value = dice.choice(("", "\xff", "9" * 400, "-1", "a b", "x" * 5000, "\x80\x81"))
        some.append((dice.choice(names), value))
        if dice.random() < 0.2:
            some *= 2
        # How a message is framed is the subject of another campaign.
        some = [pair for pair in some if pair[0] != "Transfer-Encoding"]
        plain = self._plain(operation, self.path(operation))
        return Request(plain.method, plain.target, (*plain.headers, *some), plain.body)

    def _bad_method(self, operation: Operation) -> Request:
        method = self._dice.choice(garbage.METHODS)
        # A method that another operation of this path has would be a request to that one.
        plain = self._plain(operation, self.path(operation, hostile="none-such"))
        return Request(method, plain.target, plain.headers, plain.body)

    def _bad_body(self, operation: Operation) -> Request:
        dice = self._dice
        media = dice.choice((*operation.bodies, *operation.bodies, *garbage.MEDIA, JSON, JSON))
        body = dice.choice(garbage.BODIES)
        if operation.bodies and not _is_delicate(operation) and dice.random() < 0.6:
            media, body = JSON, self._damaged(operation)
        headers = (("Content-Type", media),) if media else ()
        target = self.path(operation)
        return Request(operation.method, target, headers, body, dice.random() < 0.25)

    def _damaged(self, operation: Operation) -> bytes:
        """A body that is nearly right."""
        examples = list(operation.bodies.get(JSON, {}).values())
        if examples and self._dice.random() < 0.7:
            value = orjson.loads(orjson.dumps(self._dice.choice(examples)))
        else:
            value = self._shaped(operation.schema or {}, operation.components, 0)
        value = self._changed(value)
        return orjson.dumps(value, default=str) if _is_plain(value) else _dumped(value)

    def _shaped(self, schema: Mapping[str, Any], components: Mapping[str, Any], depth: int) -> Any:
        """Some value of a schema, or nearly."""
        if depth > 6:
            return None
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._shaped(components["schemas"][name], components, depth + 1)
        for word in ("anyOf", "oneOf", "enum"):
            if word in schema:
                one = self._dice.choice(schema[word])
                return one if word == "enum" else self._shaped(one, components, depth + 1)
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                fields = schema.get("properties", {})
                required = set(schema.get("required", ()))
                return {
                    name: self._shaped(one, components, depth + 1)
                    for name, one in fields.items()
                    if name in required or self._dice.random() < 0.5
                }
            case "array":
                return [self._shaped(schema.get("items", {}), components, depth + 1)]
            case "integer" | "number":
                return self._dice.choice((schema.get("minimum", 0), 1, self._arena.ledger_id))
            case "boolean":
                return self._dice.random() < 0.5
            case _:
                return self._dice.choice(("attack", "attack-bookie@1", "AAAA", "OPEN", "x" * 300))

    def _changed(self, value: Any) -> Any:
        """The value with one place changed."""
        dice = self._dice
        if isinstance(value, dict) and value and dice.random() < 0.85:
            name = dice.choice(sorted(value))
            if dice.random() < 0.15:
                return {**value, dice.choice(("extra", "", "\0", name * 50)): value[name]}
            return {**value, name: self._changed(value[name])}
        if isinstance(value, list) and value and dice.random() < 0.7:
            place = dice.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        return dice.choice(_HOSTILE)

    def _plain(self, operation: Operation, target: str) -> Request:
        """A request with nothing else that is wrong; where a body is needed, an empty object."""
        if not operation.bodies:
            return Request(operation.method, target, (), b"")
        media = next(iter(operation.bodies))
        return Request(operation.method, target, (("Content-Type", media),), b"{}")


def _is_delicate(operation: Operation) -> bool:
    return (operation.kind, operation.path) in ALL_OF_US


def _is_plain(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _dumped(value: Any) -> bytes:
    """What orjson refuses: integers of any size, lone surrogates."""
    return json.dumps(value).encode()


async def requests(arena: Arena) -> None:
    """Requests on every route of every service, each wrong in some place."""
    await _on_all(arena, lambda maker, operation: maker.request(operation))


async def honest_requests(arena: Arena) -> None:
    """Requests on every route of every service, with nothing wrong in them."""
    await _on_all(arena, lambda maker, operation: maker.honest(operation))


async def _on_all(arena: Arena, make: Callable[[Maker, Operation], Request]) -> None:
    found = await operations(arena.cluster)
    dice = arena.dice
    maker = Maker(arena, dice)
    # Every operation as often as the others, whatever their number; gateways take turns.
    turns = turns_of(found, dice, arena.requests)

    async def one(name: str, operation: Operation) -> None:
        made = make(maker, operation)
        data = made.bytes(arena.address(name))
        operation_meant = meant(found, operation.kind, made)
        await arena.send(name, data, operation=operation_meant, method=made.method)

    await arena.crowd(partial(one, name, operation) for name, operation in turns)


def meant(found: Sequence[Operation], kind: str, made: Request) -> Operation | None:
    """The operation that a request is for; changed paths and methods may be for none, or another."""
    method = "GET" if made.method == "HEAD" else made.method
    given = made.target.partition("?")[0].split("/")
    fitting = [
        one for one in found if (one.kind, one.method) == (kind, method) and _fits(one, given)
    ]
    return min(fitting, key=lambda one: one.path.count("{"), default=None)


def _fits(operation: Operation, given: Sequence[str]) -> bool:
    wanted = operation.path.split("/")
    return len(wanted) == len(given) and all(
        want.startswith("{") or want == have for want, have in zip(wanted, given, strict=True)
    )


def turns_of(
    found: Sequence[Operation], dice: random.Random, count: int
) -> Iterator[tuple[str, Operation]]:
    order: list[Operation] = []
    for _ in range(count):
        if not order:
            order = dice.sample(found, len(found))
        operation = order.pop()
        yield f"{operation.kind}-1", operation


async def numbers(arena: Arena) -> None:
    """Numbers that are none, or huge, in every parameter of every operation; a share of them where
    there are to be fewer requests.
    """
    found = await operations(arena.cluster)
    maker = Maker(arena, arena.dice)

    async def one(operation: Operation, target: str, headers: tuple[tuple[str, str], ...]) -> None:
        name = f"{operation.kind}-1"
        if operation.path.startswith("/internal/"):
            headers = (*headers, (header.FORWARDED_WRITER, arena.instance))
        made = Request(operation.method, target, headers, b"")
        data = made.bytes(arena.address(name))
        operation_meant = meant(found, operation.kind, made)
        await arena.send(name, data, operation=operation_meant, method=made.method)

    def each() -> Iterator[Callable[[], Awaitable[object]]]:
        for operation in found:
            path = maker.path(operation)
            for value in garbage.NUMBERS:
                for query in operation.queries:
                    yield partial(one, operation, f"{path}?{query}={value}", ())
                for name in operation.headers:
                    yield partial(one, operation, path, ((name, value),))
                if "{" in operation.path and not _is_delicate(operation):
                    yield partial(one, operation, maker.path(operation, hostile=value), ())

    jobs = list(each())
    await arena.crowd(arena.dice.sample(jobs, min(len(jobs), arena.requests)))


async def framing(arena: Arena) -> None:
    """Bytes that are no HTTP, or that two servers would read differently, on every port."""
    jobs: list[Callable[[], Awaitable[object]]] = []
    for name in (f"{kind}-1" for kind in KINDS):
        jobs += [
            partial(arena.send, name, one, must_refuse=True, may_end=True)
            for one in garbage.FORBIDDEN
        ]
        jobs += [partial(arena.send, name, one, may_end=True) for one in garbage.ODD]
    arena.dice.shuffle(jobs)
    await arena.crowd(jobs)
    await _nothing_smuggled(arena)


async def damaged(arena: Arena) -> None:
    """Bytes that were requests before some of them changed, and requests that stop, on every port."""
    dice = arena.dice
    jobs: list[Callable[[], Awaitable[object]]] = []
    for name in (f"{kind}-1" for kind in KINDS):
        changed = _damaged_bytes(dice, arena.requests // (2 * len(KINDS)))
        jobs += [
            partial(arena.send, name, one, may_end=True) for one in (*garbage.UNFINISHED, *changed)
        ]
    dice.shuffle(jobs)
    await arena.crowd(jobs)


def _damaged_bytes(dice: random.Random, count: int) -> Iterator[bytes]:
    """Requests of the tables with a few bytes changed, taken out or doubled."""
    for _ in range(count):
        data = bytearray(dice.choice((*garbage.ODD, *garbage.FORBIDDEN))[:5000])
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(data) + 1)
            data[at : at + dice.choice((0, 0, 1, 4))] = dice.choice(
                (
                    b"",
                    b"\0",
                    b"\r",
                    b"\n",
                    b"\r\n\r\n",
                    b" ",
                    b"\xff",
                    b":",
                    b"9" * 30,
                    data[at : at + 40],
                )
            )
        yield bytes(data)


async def _nothing_smuggled(arena: Arena) -> None:
    """A request within the body of a request that is refused was not done."""
    for name in ("gateway-1", "gateway-2"):
        log = f"smuggled-by-{name}"
        inner = (
            f"PUT /v1/logs/{log} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode()
        )
        start = (
            f"POST /v1/ledgers/{arena.ledger_id}/entries HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        )
        for framing_ in (
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(inner),
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            await arena.send(name, start + framing_ + inner, must_refuse=True, may_end=True)
        arena.report.requests += 1
        asked = f"GET /v1/logs/{log} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        answer = await arena.send(name, asked)
        if answer is not None and answer.status == 200:
            arena.find(Kind.ANSWER, f"{name} made the log {log} from a refused request's body")
