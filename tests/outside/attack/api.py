"""What the services promise: the operations of their descriptions, and whether an answer keeps to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson

from loadtest.cluster import Cluster
from quorumlog.errors import QuorumLogError, codes
from quorumlog.wire import problems
from tests.outside.attack.raw import Answer
from tests.outside.attack.report import Kind

INTERNAL: Final = "internal"
"""The internal listener of gateways."""
KINDS: Final = ("gateway", INTERNAL, "bookie", "metadata", "autorecovery")
SHARED: Final = ("/health/live", "/health/ready", "/metrics", "/openapi.json", "/docs")
"""Each service has them; the gateway describes them too."""

ANYWHERE: Final = frozenset({400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 501, 503})
"""What a request gets that is none of the operations, or no HTTP at all."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path of one kind of service."""

    kind: str
    method: str
    path: str
    queries: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    bodies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Examples of what it takes, by media type and name."""
    statuses: frozenset[int] | None = None
    """None: any error that has a code."""
    schema: Mapping[str, Any] | None = None
    """Of its JSON body, with references into `components`."""
    components: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """`operationId`."""


def url_of(cluster: Cluster, name: str) -> str:
    """Where a service listens; `internal-1` is `gateway-1` for the cluster's own processes."""
    kind, _, number = name.partition("-")
    return cluster.internal_url(f"gateway-{number}") if kind == INTERNAL else cluster.url(name)


async def operations(cluster: Cluster) -> list[Operation]:
    """All that the services of a cluster do, one service of each kind."""
    found: list[Operation] = []
    async with aiohttp.ClientSession() as session:
        for kind in KINDS:
            url = f"{url_of(cluster, f'{kind}-1')}/openapi.json"
            async with session.get(url, headers=cluster.headers) as answer:
                found += described(kind, await answer.json())
    known = {(one.kind, one.path) for one in found}
    found += [
        Operation(kind, "GET", path)
        for kind in KINDS
        for path in SHARED
        if (kind, path) not in known
    ]
    return found


def described(kind: str, document: Mapping[str, Any]) -> list[Operation]:
    """The operations of a description."""
    return [
        _operation(kind, method.upper(), path, one, document["components"])
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    ]


def _operation(
    kind: str, method: str, path: str, one: Mapping[str, Any], components: Mapping[str, Any]
) -> Operation:
    places: dict[str, list[str]] = {"query": [], "header": [], "path": []}
    for parameter in one.get("parameters", ()):
        places[parameter["in"]].append(parameter["name"])
    content = one.get("requestBody", {}).get("content", {})
    bodies = {
        media: {name: example["value"] for name, example in body.get("examples", {}).items()}
        for media, body in content.items()
    }
    statuses = frozenset(int(status) for status in one["responses"] if status.isdigit())
    return Operation(
        kind,
        method,
        path,
        tuple(places["query"]),
        tuple(places["header"]),
        bodies,
        None if "default" in one["responses"] else statuses,
        content.get("application/json", {}).get("schema"),
        components,
        one.get("operationId", ""),
    )


def wrong(
    operation: Operation | None, method: str, answer: Answer, *, may_be_invalid: bool = False
) -> tuple[Kind, str] | None:
    """What is wrong with an answer to `method` on an operation's path, or None. `may_be_invalid`: the request may be an
    operation's with invalid values, whatever is known of it.

    Without an operation the request was for nothing that there is.
    """
    status = answer.status
    fault = "" if status < 400 else _fault_of_problem(answer, method)
    if operation is None or method not in (operation.method, "HEAD"):
        is_documented = status < 400 or status in ANYWHERE or (status == 422 and may_be_invalid)
    else:
        is_documented = operation.statuses is None or status in operation.statuses
        if fault and operation.statuses is None and operation.kind == "bookie" and status < 500:
            fault = "" if b'"status"' in answer.body else fault
    if is_documented and not fault:
        return None
    what = f"{status} {fault or 'is no status of the operation'}"
    return (Kind.SERVER_ERROR if status >= 500 else Kind.ANSWER), what


def _fault_of_problem(answer: Answer, method: str) -> str:
    """What keeps an error from being a problem that this system knows."""
    if method == "HEAD" or answer.status == 304:
        return ""
    if answer.media != problems.CONTENT_TYPE:
        return f"is no problem document but {answer.media or 'nothing'}: {answer.body[:200]!r}"
    try:
        reported = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return f"has a broken problem document: {answer.body[:200]!r}"
    code = reported.get("code")
    if code not in codes():
        return f"has no code that is known: {code!r}"
    if code == QuorumLogError.code:
        return f"{code}: {reported.get('detail')}"
    missing = {"type", "title", "status", "detail", "retryable", "outcome"} - reported.keys()
    if missing or reported["status"] != answer.status:
        return f"{code} lacks {sorted(missing)} or tells another status: {reported['status']}"
    return ""
