"""Operators' requests, which a gateway forwards to the process that serves them: a bookie, a process
of autorecovery, or the metadata service.

The other service validates the body, and its error becomes the client's. The gateway only checks
access, and names the client for the audit log.
"""

import contextlib
from asyncio import gather
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import hdrs, web

from quorumlog import errors, header
from quorumlog.net import audit
from quorumlog.net.identity import Role
from quorumlog.net.operations import JSON, Content, Reply
from quorumlog.net.parameters import Given, path_text, query_text
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake_timeout
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.values import BOOKIE_NAME
from quorumlog.wire.problems import from_answer
from quorumlog.wire.repair_bodies import REPAIR_PLACE
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Named, Scope, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import NDJSON, accepted, json_bytes, json_value, no_content
from services.gateway.edge.http.sending import opened, write, write_end
from services.gateway.engine import Engine

BODY_BYTES_MAX: Final = 64 << 10
ANSWER_BYTES_MAX: Final = 4 << 20
"""Maximum answer of another service, and maximum length of a line of progress."""
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 10.0
_CHECK_S: Final = 600.0
"""A check of a large ledger reads all of its entries on all bookies (chosen by judgement)."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
_METADATA: Final = ExpectedServer(Role.METADATA)
_AUTORECOVERY: Final = ExpectedServer(Role.AUTORECOVERY)

BOOKIE: Final = path_text(
    "bookie", BOOKIE_NAME, "The bookie's name, without an incarnation.", "bookie-1"
)
AFTER: Final = query_text("after", REPAIR_PLACE, "Only items after this one: `ledger_id:member`.")

_READ: Final = on(Named.CLUSTER, Scope.READ)
_ADMIN: Final = on(Named.EVERYTHING, Scope.ADMIN)
_LEDGER: Final = on(Named.LEDGER, Scope.MANAGE)
_AWAY: Final = (errors.ServiceUnavailable,)
_OF_BOOKIE: Final = (*_AWAY, errors.NoSuchBookie)
_OF_LEDGER: Final = (*_AWAY, errors.NoSuchLedger, errors.ShuttingDown)
_STARTED: Final = op.gives("It has begun.", {"type": "object"}, {"begun": {}}, status=202)
_LINES: Final = {
    NDJSON: Content(
        {"type": "string", "description": "Lines of progress; the last has the result."}
    )
}


def _gives(description: str) -> dict[Any, Reply]:
    return op.gives(description, {"type": "object"}, {})


def _takes(
    example: dict[str, Any], required: Iterable[str], **fields: Any
) -> Mapping[str, Content]:
    """Declare a JSON body with these fields, which the other service validates."""
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return op.takes(schema | {"required": list(required)}, {"one": example})


_TRUTH: Final = {"type": "boolean"}
_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _optional(kind: str, low: int, high: int | None = None) -> dict[str, Any]:
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return {"type": [kind, "null"], **bounds}


class OperatorRoutes(op.Handlers, tag="Operators"):
    """HTTP handlers that forward operators' requests to the services behind the gateways."""

    def __init__(self, engine: Engine, room: Room) -> None:
        """`engine` has the session and knows the services; `room` limits bodies and waits."""
        self._engine, self._room = engine, room

    # Bookies.

    @op.operation(
        "GET /v1/bookies/{bookie}",
        (BOOKIE,),
        replies=_gives("The bookie."),
        errors=_OF_BOOKIE,
        scope=_READ,
    )
    async def get_bookie(self, _request: web.Request, given: Given) -> web.Response:
        """Get a bookie's own status: its disk, scrub, damage and counters."""
        return await self._ask_bookie(given[BOOKIE], "GET", "/v1/info")

    @op.operation(
        "PUT /v1/bookies/{bookie}/state",
        (BOOKIE,),
        body=_takes(
            {"state": "read-only"},
            ("state",),
            state={"enum": ["writable", "read-only", "draining"]},
        ),
        replies=_gives("The bookie."),
        errors=_OF_BOOKIE,
        scope=_ADMIN,
        needs_body=True,
        is_audited=True,
    )
    async def put_bookie_state(self, request: web.Request, given: Given) -> web.Response:
        """Set whether a bookie accepts entries.

        `draining` also moves its entries to other bookies. The state survives restarts.
        """
        return await self._ask_bookie(given[BOOKIE], "PUT", "/v1/state", await self._body(request))

    @op.operation(
        "PUT /v1/bookies/{bookie}/maintenance",
        (BOOKIE,),
        body=_takes({"paused": True}, ("paused",), paused=_TRUTH),
        replies=_gives("The bookie."),
        errors=_OF_BOOKIE,
        scope=_ADMIN,
        needs_body=True,
        is_audited=True,
    )
    async def put_bookie_maintenance(self, request: web.Request, given: Given) -> web.Response:
        """Pause a bookie's scrubbing and compaction, or resume them.

        A restart of the bookie resumes them too.
        """
        asked = await self._body(request)
        return await self._ask_bookie(given[BOOKIE], "PUT", "/v1/maintenance", asked)

    @op.operation(
        "GET /v1/bookies/{bookie}/damage",
        (BOOKIE,),
        replies=_gives("The damage."),
        errors=_OF_BOOKIE,
        scope=_READ,
    )
    async def get_bookie_damage(self, _request: web.Request, given: Given) -> web.Response:
        """List a bookie's damaged entries, and where they are in its files."""
        return await self._ask_bookie(given[BOOKIE], "GET", "/v1/damage")

    @op.operation(
        "GET /v1/bookies/{bookie}/drain",
        (BOOKIE,),
        replies=_gives("The progress."),
        errors=_OF_BOOKIE,
        scope=_READ,
    )
    async def get_bookie_drain(self, _request: web.Request, given: Given) -> web.Response:
        """Get the progress of a bookie's drain: which ledgers still name the bookie, and why."""
        return await self._ask_autorecovery("GET", f"/v1/drains/{given[BOOKIE]}")

    @op.operation(
        "DELETE /v1/bookies/{bookie}",
        (BOOKIE,),
        replies={204: Reply("The bookie is removed.")},
        errors=(*_OF_BOOKIE, errors.VersionConflict),
        scope=_ADMIN,
        is_audited=True,
    )
    async def decommission_bookie(self, _request: web.Request, given: Given) -> web.Response:
        """Remove a dead bookie from the list.

        The error is 412 while the bookie is alive, or any ledger or repair names it.
        """
        return await self._ask_autorecovery("DELETE", f"/v1/bookies/{given[BOOKIE]}")

    # Repairs and checks.

    @op.operation(
        "GET /v1/repairs",
        (AFTER,),
        replies=_gives("A page of the queue."),
        errors=_AWAY,
        scope=_READ,
    )
    async def list_repairs(self, _request: web.Request, given: Given) -> web.Response:
        """List the queue of repairs, with the reasons of failed tries.

        `next` is the `after` of the next page, or null at the end.
        """
        query = "" if given[AFTER] is None else f"?after={given[AFTER]}"
        return await self._ask_autorecovery("GET", f"/v1/repairs{query}")

    @op.operation("GET /v1/autorecovery", replies=_gives("The processes."), scope=_READ)
    async def list_autorecovery(self, _request: web.Request, _given: Given) -> web.Response:
        """List the processes of autorecovery, with their state, settings and counters.

        A process that does not answer has `error` instead.
        """
        return json_value({"autorecovery": await self._statuses()})

    @op.operation(
        "PATCH /v1/autorecovery",
        body=_takes(
            {"paused": False, "bytes_per_s": 50_000_000},
            (),
            paused=_TRUTH,
            bytes_per_s=_optional("integer", 1),
            concurrency=_optional("integer", 1, 64),
            lost_bookie_delay_s=_optional("number", 0, 86_400),
        ),
        replies=_gives("The state of a process."),
        errors=_AWAY,
        scope=_ADMIN,
        needs_body=True,
        is_audited=True,
    )
    async def patch_autorecovery(self, request: web.Request, _given: Given) -> web.Response:
        """Pause, resume or limit repairs in all processes of autorecovery.

        Changes the given settings, which survive restarts; null restores a default.
        """
        return await self._ask_autorecovery("PATCH", "/v1/settings", await self._body(request))

    @op.operation("POST /v1/audits", body=op.NOTHING, replies=_STARTED, errors=_AWAY, scope=_ADMIN)
    async def start_audit(self, _request: web.Request, _given: Given) -> web.Response:
        """Start an audit of all ledgers, and retry repairs that wait after a failure."""
        return await self._ask_autorecovery("POST", "/v1/audits")

    @op.operation("POST /v1/checks", body=op.NOTHING, replies=_STARTED, errors=_AWAY, scope=_ADMIN)
    async def start_check(self, _request: web.Request, _given: Given) -> web.Response:
        """Start a comparison of all copies of all ledgers, which queues repairs."""
        # Only the auditor compares copies; while there is none, another process remembers it.
        found = sorted(await self._statuses(), key=lambda one: not one.get("auditor"))
        urls = [one["url"] for one in found]
        return await self._ask(_AUTORECOVERY, urls, "POST", "/v1/checks")

    @op.operation(
        "GET /v1/ledgers/{ledger_id}/check",
        (op.LEDGER_ID,),
        replies=_gives("The report."),
        errors=_OF_LEDGER,
        scope=_LEDGER,
    )
    async def check_ledger(self, _request: web.Request, given: Given) -> web.Response:
        """Compare the copies of a ledger's entries on all of its bookies."""
        return await self._check("GET", given)

    @op.operation(
        "POST /v1/ledgers/{ledger_id}/check",
        (op.LEDGER_ID,),
        body=op.NOTHING,
        replies=_gives("The report."),
        errors=_OF_LEDGER,
        scope=_LEDGER,
    )
    async def mend_ledger(self, _request: web.Request, given: Given) -> web.Response:
        """Compare the copies of a ledger's entries, and queue repairs of what bookies lack."""
        return await self._check("POST", given)

    # The metadata's database.

    @op.operation("GET /v1/rebuild", replies=_gives("The state."), errors=_AWAY, scope=_READ)
    async def get_rebuild(self, _request: web.Request, _given: Given) -> web.Response:
        """Get whether the metadata's database is empty, or was rebuilt."""
        return await self._ask_metadata("GET", "/v1/rebuild")

    @op.operation(
        "POST /v1/rebuild",
        body=_takes(
            {"dry_run": True},
            (),
            dry_run=_TRUTH,
            take_over=_TRUTH,
            bookies=_TEXTS,
            without=_TEXTS,
            after=_optional("integer", 0),
        ),
        replies={200: Reply("Progress, and at last the report or an error.", _LINES)},
        errors=(*_AWAY, errors.NotAcceptable),
        scope=_ADMIN,
        is_audited=True,
    )
    async def rebuild_metadata(self, request: web.Request, _given: Given) -> web.StreamResponse:
        """Rebuild the metadata that bookies' copies prove.

        If the client disconnects, the rebuild ends, and the metadata that it wrote stays.
        """
        accepted(request, (NDJSON,))
        return await self._follow(request, "/v1/rebuild")

    @op.operation("GET /v1/witnesses", replies=_gives("The witnesses."), errors=_AWAY, scope=_READ)
    async def get_witnesses(self, _request: web.Request, _given: Given) -> web.Response:
        """List the acknowledged changes that the database must contain, and those that it lacks."""
        return await self._ask_metadata("GET", "/v1/witnesses")

    @op.operation(
        "POST /v1/witnesses/accept",
        body=_takes({"witnesses": []}, (), witnesses=_TEXTS, lost=_TEXTS, ledgers=_IDS),
        replies={
            200: Reply("The witnesses.", {JSON: Content({"type": "object"}), **_LINES}),
        },
        errors=(*_AWAY, errors.NotEnoughBookies, errors.CopyLost),
        scope=_ADMIN,
        is_audited=True,
    )
    async def accept_witnesses(self, request: web.Request, _given: Given) -> web.StreamResponse:
        """Accept the loss of changes that the database lacks because it went back.

        Read the runbook first. A client that accepts `application/x-ndjson` gets lines of progress.
        """
        if accepted(request, (JSON, NDJSON)) == NDJSON:
            return await self._follow(request, "/v1/witnesses/accept")
        asked = await self._body(request)
        return await self._waited(
            self._ask_metadata("POST", "/v1/witnesses/accept", asked, timeout_s=_CHECK_S)
        )

    # Forwarding.

    async def _body(self, request: web.Request) -> dict[str, Any]:
        return await body.read_object(request, self._room, BODY_BYTES_MAX)

    async def _ask_bookie(
        self, name: str, method: str, path: str, asked: dict[str, Any] | None = None
    ) -> web.Response:
        directory = self._engine.directory
        bookies = (await directory.refresh()).bookies
        if name not in (member_name(one.id) for one in bookies):
            raise errors.NoSuchBookie(f"no bookie {name} is registered", bookie=name)
        # Also a bookie that is listed as lost may answer.
        url = directory.address(name)
        urls = () if url is None else (url,)
        return await self._ask(ExpectedServer(Role.BOOKIE, name), urls, method, path, asked)

    async def _ask_autorecovery(
        self, method: str, path: str, asked: dict[str, Any] | None = None, **options: Any
    ) -> web.Response:
        urls = [one["url"] for one in await self._processes()]
        return await self._ask(_AUTORECOVERY, urls, method, path, asked, **options)

    async def _ask_metadata(
        self, method: str, path: str, asked: dict[str, Any] | None = None, **options: Any
    ) -> web.Response:
        urls = self._engine.metadata.urls
        return await self._ask(_METADATA, urls, method, path, asked, **options)

    async def _check(self, method: str, given: Given) -> web.Response:
        path = f"/v1/checks/{given[op.LEDGER_ID]}"
        return await self._waited(self._ask_autorecovery(method, path, timeout_s=_CHECK_S))

    async def _waited(self, work: Awaitable[web.Response]) -> web.Response:
        """Await long work, which ends if the client disconnects. Raises: ShuttingDown."""
        found = await self._room.wait(work)
        if found is None:
            raise errors.ShuttingDown("this gateway is shutting down", outcome=errors.UNKNOWN)
        return found

    async def _processes(self) -> list[dict[str, Any]]:
        services = (await self._engine.metadata.services()).services
        return [{"id": one.id, "url": one.url} for one in services if one.kind == Role.AUTORECOVERY]

    async def _statuses(self) -> Sequence[dict[str, Any]]:
        """The processes of autorecovery with their status, or with the `error`."""

        async def ask(found: dict[str, Any]) -> dict[str, Any]:
            try:
                answer = await self._ask(_AUTORECOVERY, (found["url"],), "GET", "/v1/status")
            except errors.QuorumLogError as error:
                return found | {"error": error.detail}
            assert isinstance(answer.body, bytes)
            status: dict[str, Any] = orjson.loads(answer.body)
            return found | status

        return await gather(*map(ask, await self._processes()))

    async def _ask(
        self,
        server: ExpectedServer,
        urls: Sequence[str],
        method: str,
        path: str,
        asked: dict[str, Any] | None = None,
        *,
        timeout_s: float = _ANSWER_S,
    ) -> web.Response:
        """Forward a request to the first process of `urls` that accepts a connection, and return
        its answer. Raises: ServiceUnavailable, and the process's error.
        """
        with _answering(server, method):
            async with (
                awake_timeout(timeout_s),
                await self._send(server, urls, method, path, asked) as answer,
            ):
                data = await _read(answer)
        return no_content() if answer.status == 204 else json_bytes(data, answer.status)

    async def _follow(self, request: web.Request, path: str) -> web.StreamResponse:
        """Forward a request to the metadata service, and pass on each line of its answer as it
        arrives. The work ends if the client disconnects or this process shuts down.
        """
        asked, urls = await self._body(request), self._engine.metadata.urls
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
            # TLS would wait for the service's close.
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
        """Send a request to the first process that accepts a connection; return its successful
        answer, whose body is not read. Raises: ServiceUnavailable, and the process's error.
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
    """Turn a broken connection or silence into ServiceUnavailable."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        outcome = errors.NOT_DONE if method == "GET" else errors.UNKNOWN
        raise errors.ServiceUnavailable(
            f"{server} does not answer: {error!r}", outcome=outcome
        ) from error


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read an answer of bounded size. Raises: ClientPayloadError."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
    return bytes(data)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer, and an error as the last line if the connection breaks."""
    try:
        async for line in answer.content:
            yield line
    except (aiohttp.ClientError, OSError, ValueError) as error:
        yield _last_line(errors.ServiceUnavailable(f"the answer broke off: {error!r}"))


def _last_line(error: errors.QuorumLogError) -> bytes:
    return orjson.dumps({"error": error.detail, "code": error.code}) + b"\n"


def _problem(
    server: ExpectedServer, answer: aiohttp.ClientResponse, data: bytes
) -> errors.QuorumLogError:
    """The client's error for another service's error. A service that refuses the gateway, or that
    failed, is unavailable to the client.
    """
    problem = from_answer(answer.status, data, answer.headers)
    not_the_clients = errors.Refused | errors.RouteNotFound | errors.MethodNotAllowed
    if type(problem) is errors.QuorumLogError or isinstance(problem, not_the_clients):
        return errors.ServiceUnavailable(
            f"{server} answers {problem.code}: {problem.detail}", outcome=problem.outcome
        )
    return problem
