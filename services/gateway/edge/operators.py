"""Operators' requests, which a gateway forwards to a bookie, a process of autorecovery, or the
metadata service.

The other service validates the body, and the client gets its errors. The gateway only checks access,
and adds the client's name for the audit log.
"""

import contextlib
from asyncio import gather
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import hdrs, web

from quorumlog import errors, header
from quorumlog.net import audit
from quorumlog.net.identity import Role
from quorumlog.net.operations import JSON, Content, Reply
from quorumlog.net.parameters import Given, Parameter, path_text, query_text
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake_timeout
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.values import BOOKIE_NAME
from quorumlog.wire.problems import from_answer
from quorumlog.wire.repair_bodies import REPAIR_PLACE
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Access, Named, Scope, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import NDJSON, accepted, json_bytes, json_value, no_content
from services.gateway.edge.http.sending import opened, write, write_end
from services.gateway.engine import Engine

BODY_BYTES_MAX: Final = 64 << 10
ANSWER_BYTES_MAX: Final = 4 << 20
"""Maximum size of another service's response, and of a line of progress."""
_ANSWER_S: Final = 10.0
_WORK_S: Final = 600.0
"""Timeout of a check, which reads all entries of a ledger on all bookies (chosen by judgement)."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
_AUTORECOVERY: Final = ExpectedServer(Role.AUTORECOVERY)
_METADATA: Final = ExpectedServer(Role.METADATA)

BOOKIE: Final = path_text(
    "bookie", BOOKIE_NAME, "The bookie's name, without an incarnation.", "bookie-1"
)
AFTER: Final = query_text("after", REPAIR_PLACE, "List items after this item (`ledger_id:member`).")

_READ: Final = on(Named.CLUSTER, Scope.READ)
_ADMIN: Final = on(Named.EVERYTHING, Scope.ADMIN)
_LEDGER: Final = on(Named.LEDGER, Scope.MANAGE)
_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_DONE: Final = op.gives("Done.", _OBJECT, {})
_BEGUN: Final = op.gives("The operation has begun.", _OBJECT, {"begun": {}}, status=202)
_LINES: Final = {
    NDJSON: Content(
        {"type": "string", "description": "Lines of progress; the last has the result."}
    )
}
_TRUTH: Final = {"type": "boolean"}
_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_Forward = Callable[["OperatorRoutes", web.Request, Given], Awaitable[web.StreamResponse]]


def _takes(example: dict[str, Any], *required: str, **fields: Any) -> Mapping[str, Content]:
    """Declare a JSON body with these fields, which the other service validates."""
    schema = _OBJECT | {"properties": fields, "additionalProperties": False}
    return op.takes(schema | {"required": list(required)}, {"one": example})


def _forwards(
    key: str,
    name: str,
    scope: Access,
    to: Role,
    path: str,
    text: str,
    *,
    body: Mapping[str, Content] | None = None,
    replies: Mapping[Any, Reply] = _DONE,
    query: tuple[Parameter[Any], ...] = (),
    refusals: tuple[type[errors.QuorumLogError], ...] = (),
    is_slow: bool = False,
) -> _Forward:
    """Declare an operation that forwards requests to `path` of a service, with the same method. The
    audit log records deletions, and operations with a declared body.
    """
    method, has_body = key.partition(" ")[0], body not in (None, op.NOTHING)
    media = tuple(replies[200].content) if 200 in replies else (JSON,)

    async def forward(
        self: "OperatorRoutes", request: web.Request, given: Given
    ) -> web.StreamResponse:
        media_chosen = accepted(request, media) if NDJSON in media else JSON
        asked = await self.read(request) if has_body else None
        server, urls = await self.targets(to, given)
        where = path.format_map(request.match_info)
        where += f"?{request.query_string}" if request.query_string else ""
        if media_chosen == NDJSON:
            return await self.follow(request, urls, where, asked)
        work = self.ask(server, urls, method, where, asked, _WORK_S if is_slow else _ANSWER_S)
        return await (self.waited(work) if is_slow else work)

    forward.__name__, forward.__doc__ = name, text
    named = [one for one in (BOOKIE, op.LEDGER_ID) if f"{{{one.name}}}" in key]
    missing = [errors.NoSuchBookie if one is BOOKIE else errors.NoSuchLedger for one in named]
    return op.operation(
        key,
        (*named, *query),
        scope=scope,
        body=body,
        replies=replies,
        errors=(errors.ServiceUnavailable, errors.ShuttingDown, *missing, *refusals),
        needs_body=has_body and method != "POST",
        is_audited=has_body or method == "DELETE",
    )(forward)


class OperatorRoutes(op.Handlers, tag="Operators"):
    """HTTP handlers that forward operators' requests to the services behind the gateways."""

    def __init__(self, engine: Engine, room: Room) -> None:
        """`engine` provides the HTTP session and the services. `room` limits bodies and waits."""
        self._engine, self._room = engine, room

    # fmt: off
    get_bookie = _forwards(
        "GET /v1/bookies/{bookie}", "get_bookie", _READ, Role.BOOKIE, "/v1/info",
        "Get a bookie's own status: its disk, scrub, damage and counters.")
    put_bookie_state = _forwards(
        "PUT /v1/bookies/{bookie}/state", "put_bookie_state", _ADMIN, Role.BOOKIE, "/v1/state",
        "Set whether a bookie accepts entries.\n\n"
        "`draining` also moves its entries to other bookies. The state survives restarts.",
        body=_takes({"state": "read-only"}, "state", state={"enum": ["writable", "read-only", "draining"]}))
    put_bookie_maintenance = _forwards(
        "PUT /v1/bookies/{bookie}/maintenance", "put_bookie_maintenance", _ADMIN, Role.BOOKIE, "/v1/maintenance",
        "Pause a bookie's scrubbing and compaction, or resume them.\n\nA restart of the bookie resumes them too.",
        body=_takes({"paused": True}, "paused", paused=_TRUTH))
    get_bookie_damage = _forwards(
        "GET /v1/bookies/{bookie}/damage", "get_bookie_damage", _READ, Role.BOOKIE, "/v1/damage",
        "List a bookie's damaged entries, and their locations in the bookie's files.")
    get_bookie_drain = _forwards(
        "GET /v1/bookies/{bookie}/drain", "get_bookie_drain", _READ, Role.AUTORECOVERY, "/v1/drains/{bookie}",
        "Get the progress of a bookie's drain: the ledgers that still name the bookie, and why.")
    decommission_bookie = _forwards(
        "DELETE /v1/bookies/{bookie}", "decommission_bookie", _ADMIN, Role.AUTORECOVERY, "/v1/bookies/{bookie}",
        "Remove a dead bookie from the list.\n\n"
        "The response is 412 if the bookie is alive, or if a ledger or repair references the bookie.",
        replies={204: Reply("The bookie is removed.")}, refusals=(errors.VersionConflict,))
    list_repairs = _forwards(
        "GET /v1/repairs", "list_repairs", _READ, Role.AUTORECOVERY, "/v1/repairs",
        "List the queue of repairs, with the reasons of failed attempts.\n\n"
        "`next` is the `after` of the next page, or null at the end.", query=(AFTER,))
    patch_autorecovery = _forwards(
        "PATCH /v1/autorecovery", "patch_autorecovery", _ADMIN, Role.AUTORECOVERY, "/v1/settings",
        "Pause, resume or limit repairs in all processes of autorecovery.\n\n"
        "Changes the given settings, which survive restarts; null restores a default.",
        body=_takes(
            {"paused": False, "bytes_per_s": 50_000_000}, paused=_TRUTH,
            bytes_per_s={"type": ["integer", "null"], "minimum": 1},
            concurrency={"type": ["integer", "null"], "minimum": 1, "maximum": 64},
            lost_bookie_delay_s={"type": ["number", "null"], "minimum": 0, "maximum": 86_400}))
    start_audit = _forwards(
        "POST /v1/audits", "start_audit", _ADMIN, Role.AUTORECOVERY, "/v1/audits",
        "Start an audit of all ledgers, and retry repairs that wait after a failure.", body=op.NOTHING, replies=_BEGUN)
    check_ledger = _forwards(
        "GET /v1/ledgers/{ledger_id}/check", "check_ledger", _LEDGER, Role.AUTORECOVERY, "/v1/checks/{ledger_id}",
        "Compare the copies of a ledger's entries on all of its bookies.", is_slow=True)
    mend_ledger = _forwards(
        "POST /v1/ledgers/{ledger_id}/check", "mend_ledger", _LEDGER, Role.AUTORECOVERY, "/v1/checks/{ledger_id}",
        "Compare the copies of a ledger's entries, and queue repairs of missing copies.", body=op.NOTHING, is_slow=True)
    get_rebuild = _forwards(
        "GET /v1/rebuild", "get_rebuild", _READ, Role.METADATA, "/v1/rebuild",
        "Get whether the metadata database is empty, or was rebuilt.")
    rebuild_metadata = _forwards(
        "POST /v1/rebuild", "rebuild_metadata", _ADMIN, Role.METADATA, "/v1/rebuild",
        "Rebuild the metadata from the bookies' copies.\n\n"
        "If the client disconnects, the rebuild ends, and the metadata written so far stays.",
        body=_takes(
            {"dry_run": True}, dry_run=_TRUTH, take_over=_TRUTH, bookies=_TEXTS, without=_TEXTS,
            after={"type": ["integer", "null"], "minimum": 0}),
        replies={200: Reply("Progress, and finally the report or an error.", _LINES)}, refusals=(errors.NotAcceptable,))
    get_witnesses = _forwards(
        "GET /v1/witnesses", "get_witnesses", _READ, Role.METADATA, "/v1/witnesses",
        "List the acknowledged changes that the database must contain, and the missing changes.")
    accept_witnesses = _forwards(
        "POST /v1/witnesses/accept", "accept_witnesses", _ADMIN, Role.METADATA, "/v1/witnesses/accept",
        "Accept the loss of changes that the database lost when it went back in time.\n\n"
        "Read the runbook first. A client that accepts `application/x-ndjson` gets lines of progress.",
        body=_takes({"witnesses": []}, witnesses=_TEXTS, lost=_TEXTS, ledgers=_IDS),
        replies={200: Reply("The witnesses.", {JSON: Content(_OBJECT), **_LINES})},
        refusals=(errors.NotEnoughBookies, errors.CopyLost), is_slow=True)
    # fmt: on

    @op.operation("GET /v1/autorecovery", replies=_DONE, scope=_READ)
    async def list_autorecovery(self, _request: web.Request, _given: Given) -> web.Response:
        """List the processes of autorecovery, with their state, settings and counters.

        A process that does not respond is listed with `error` instead of these fields.
        """
        return json_value({"autorecovery": await self._statuses()})

    @op.operation(
        "POST /v1/checks",
        body=op.NOTHING,
        replies=_BEGUN,
        errors=(errors.ServiceUnavailable,),
        scope=_ADMIN,
    )
    async def start_check(self, _request: web.Request, _given: Given) -> web.Response:
        """Start a comparison of all copies of all ledgers, which queues repairs."""
        # Only the auditor compares copies. Without an auditor, another process stores the request.
        found = sorted(await self._statuses(), key=lambda one: not one.get("auditor"))
        return await self.ask(_AUTORECOVERY, [one["url"] for one in found], "POST", "/v1/checks")

    async def read(self, request: web.Request) -> dict[str, Any]:
        """Read the body, which must be a JSON object."""
        return await body.read_object(request, self._room, BODY_BYTES_MAX)

    async def targets(self, to: Role, given: Given) -> tuple[ExpectedServer, Sequence[str]]:
        """Return the service that must respond, and the URLs of its processes. Raises:
        NoSuchBookie, MetadataUnavailable.
        """
        if to is Role.METADATA:
            return _METADATA, self._engine.metadata.urls
        if to is Role.AUTORECOVERY:
            return _AUTORECOVERY, [one["url"] for one in await self._processes()]
        directory, name = self._engine.directory, given[BOOKIE]
        bookies = (await directory.refresh()).bookies
        if name not in (member_name(one.id) for one in bookies):
            raise errors.NoSuchBookie(f"bookie {name} is unknown: see GET /v1/bookies", bookie=name)
        # Don't check liveness, because a bookie that is listed as lost may still respond.
        url = directory.address(name)
        return ExpectedServer(Role.BOOKIE, name), () if url is None else (url,)

    async def waited(self, work: Awaitable[web.Response]) -> web.Response:
        """Await work, which is cancelled if the client disconnects. Raises: ShuttingDown."""
        found = await self._room.wait(work)
        if found is None:
            detail = "this gateway is shutting down: use another gateway"
            raise errors.ShuttingDown(detail, outcome=errors.UNKNOWN)
        return found

    async def _processes(self) -> list[dict[str, Any]]:
        services = (await self._engine.metadata.services()).services
        return [{"id": one.id, "url": one.url} for one in services if one.kind == Role.AUTORECOVERY]

    async def _statuses(self) -> Sequence[dict[str, Any]]:
        """Request the status of each process of autorecovery. Failures contain `error`."""

        async def ask(found: dict[str, Any]) -> dict[str, Any]:
            try:
                answer = await self.ask(_AUTORECOVERY, (found["url"],), "GET", "/v1/status")
            except errors.QuorumLogError as error:
                return found | {"error": error.detail}
            assert isinstance(answer.body, bytes)
            try:
                status = orjson.loads(answer.body)
            except orjson.JSONDecodeError:
                status = None
            if not isinstance(status, dict):
                return found | {"error": "the process did not respond with a JSON object"}
            return found | status

        return await gather(*map(ask, await self._processes()))

    async def ask(
        self,
        server: ExpectedServer,
        urls: Sequence[str],
        method: str,
        path: str,
        asked: dict[str, Any] | None = None,
        timeout_s: float = _ANSWER_S,
    ) -> web.Response:
        """Forward a request to the first process of `urls` that accepts a connection, and return
        the response. Raises: ServiceUnavailable, and the process's error.
        """
        with _answering(server, method):
            async with (
                awake_timeout(timeout_s),
                await self._send(server, urls, method, path, asked) as answer,
            ):
                data = await _read(answer)
        return no_content() if answer.status == 204 else json_bytes(data, answer.status)

    async def follow(
        self, request: web.Request, urls: Sequence[str], path: str, asked: dict[str, Any] | None
    ) -> web.StreamResponse:
        """Forward a request to the metadata service, and pass on each line of the response as it
        arrives. The operation ends if the client disconnects or this process shuts down.
        """
        with _answering(_METADATA, "POST"):
            answer = await self._send(_METADATA, urls, "POST", path, asked, accept=NDJSON)
        try:
            response, lines = await opened(request, NDJSON), _lines(answer)
            try:
                while line := await self._room.wait(anext(lines, b"")):
                    await write(response, self._room, line)
            except errors.Overloaded as error:
                await response.write(_last_line(error))
            await write_end(response)
        finally:
            # Abort, because closing a TLS connection would wait until the service closes its side.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
            answer.close()
        return response

    async def _send(
        self,
        server: ExpectedServer,
        urls: Sequence[str],
        method: str,
        path: str,
        asked: dict[str, Any] | None,
        *,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        """Send a request to the first process that accepts a connection, and return the successful
        response with its body unread. Raises: ServiceUnavailable, and the process's error.
        """
        headers: dict[str, str] = {hdrs.ACCEPT: accept}
        why = f"no {server} is alive"
        if asked is not None:
            headers[hdrs.CONTENT_TYPE] = JSON
        if method != "GET" and (audited := audit.current()) is not None:
            headers[header.AUDITED] = audited.body.to_header()
        for url in urls:
            try:
                answer = await self._engine.peers.session.request(
                    method,
                    url + path,
                    data=None if asked is None else orjson.dumps(asked),
                    headers=headers,
                    timeout=_TIMEOUT,
                    read_bufsize=ANSWER_BYTES_MAX,
                    ssl=server,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                why = f"{server}: {error}"
                continue
            if answer.status >= 400:
                async with answer:
                    raise _problem(server, answer, await _read(answer))
            return answer
        raise errors.ServiceUnavailable(why)


@contextlib.contextmanager
def _answering(server: ExpectedServer, method: str) -> Iterator[None]:
    """Convert connection errors and timeouts to ServiceUnavailable."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        outcome = errors.NOT_DONE if method == "GET" else errors.UNKNOWN
        raise errors.ServiceUnavailable(
            f"{server} does not respond: {error!r}", outcome=outcome
        ) from error


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read a response of bounded size. Raises: ClientPayloadError."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"the response has more than {ANSWER_BYTES_MAX} bytes")
    return bytes(data)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the lines of a response, and an error as the last line if the connection breaks."""
    try:
        async for line in answer.content:
            yield line
    except (aiohttp.ClientError, OSError, ValueError) as error:
        yield _last_line(errors.ServiceUnavailable(f"the response was interrupted: {error!r}"))


def _last_line(error: errors.QuorumLogError) -> bytes:
    return orjson.dumps({"error": error.detail, "code": error.code}) + b"\n"


def _problem(
    server: ExpectedServer, answer: aiohttp.ClientResponse, data: bytes
) -> errors.QuorumLogError:
    """Convert another service's error to the client's error. If the service refuses the gateway, or
    has an internal error, the client gets ServiceUnavailable.
    """
    problem = from_answer(answer.status, data, answer.headers)
    not_the_clients = errors.Refused | errors.RouteNotFound | errors.MethodNotAllowed
    if type(problem) is errors.QuorumLogError or isinstance(problem, not_the_clients):
        return errors.ServiceUnavailable(
            f"{server} responded with {problem.code}: {problem.detail}", outcome=problem.outcome
        )
    return problem
