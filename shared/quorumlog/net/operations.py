"""Operations: what a service's routes take and give, declared apart from what they do.

A route pairs an operation with its handler. The handler is called with what the operation's
parameters were read as, and the OpenAPI document is made of the same list of routes, so neither can
be without the other.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from quorumlog.errors import NOT_DONE, Outcome, QuorumLogError
from quorumlog.net import parameters
from quorumlog.net.parameters import Given, Parameter
from quorumlog.wire import problems

Schema = type[BaseModel] | dict[str, Any]
"""A pydantic model, or a JSON schema as it is."""

ExpectHandler = Callable[[web.Request], Awaitable[None]]
Handler = Callable[[web.Request, Given], Awaitable[web.StreamResponse]]
Errors = tuple[type[QuorumLogError], ...]

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Content:
    """A body of one media type."""

    schema: Schema
    examples: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """A described reply: its media types and its headers."""

    description: str
    content: Mapping[str, Content] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    name: str
    tag: str | None
    summary: str
    description: str = ""
    parameters: tuple[Parameter[Any], ...] = ()
    body: Mapping[str, Content] = field(default_factory=dict)
    """Where there is one, no body at all equals `{}`."""
    replies: Mapping[int | Literal["default"], Reply] = field(default_factory=dict)
    errors: Errors = ()
    needs_body: bool = False
    is_audited: bool = False
    """Requests to it are noted in the audit log."""
    ignores_unknown: bool = False
    """Query parameters that it does not declare are left to others, and its path's last one takes slashes: an open
    protocol has them so."""

    def __post_init__(self) -> None:
        declared = [one.name for one in self.parameters if one.place == "path"]
        assert sorted(declared) == sorted(re.findall(r"{(\w+)}", self.path)), self.path


@dataclass(frozen=True, slots=True)
class Route:
    """An operation and the handler that does it."""

    operation: Operation
    handler: Handler
    check: Callable[[web.Request], None] | None = None
    """Refuses a caller that may not use the route."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Check the caller, read the parameters and call the handler. Raises: Forbidden, BadRequest,
        InvalidRequest.
        """
        if self.check is not None:
            self.check(request)
        operation = self.operation
        given = parameters.read(
            operation.parameters, request, ignores_unknown=operation.ignores_unknown
        )
        return await self.handler(request, given)


def add_routes(
    app: web.Application,
    routes: Iterable[Route],
    *,
    has_heads: bool = False,
    expect_handler: ExpectHandler | None = None,
) -> None:
    """Have an application serve routes; with `has_heads` each GET has a HEAD."""
    for route in routes:
        operation = route.operation
        methods = (
            ("GET", "HEAD") if has_heads and operation.method == "GET" else (operation.method,)
        )
        for method in methods:
            path = operation.path
            if operation.ignores_unknown:
                path = f"{path.removesuffix('}')}:.+}}"
            app.router.add_route(method, path, route.handle, expect_handler=expect_handler)


class FieldError(BaseModel):
    """What is wrong in one place: a JSON pointer into the body, or /query/…, /header/…, /path/…."""

    model_config = ConfigDict(extra="forbid")

    pointer: str
    detail: str


class Problem(BaseModel):
    """RFC 9457, with what a caller needs to decide what to do next."""

    type: str = Field(description="/problems/<code>, which explains it.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str = Field(description="The request's id.")
    code: str
    retryable: bool = Field(description="May the same request be sent again?")
    outcome: Outcome = Field(description=f"`{NOT_DONE}`: certainly nothing happened.")
    errors: list[FieldError] | None = None
    ledger_id: int | None = None
    entry_id: int | None = None
    bookie: str | None = None
    log: str | None = None


def route(
    method: str,
    path: str,
    handler: Handler,
    *given: Parameter[Any],
    takes: type[BaseModel] | None = None,
    gives: Schema | None = None,
    status: int = 200,
    repeat_status: int | None = None,
    media: str = JSON,
    refuses_with: type[BaseModel] | None = None,
) -> Route:
    """A route that only this cluster's processes and its operators use: the operation's name is the
    handler's, its summary the first line of the handler's docstring, and any error may be its answer.

    `repeat_status` is that of a repeat, where it is another one; `refuses_with` is what a refusal may
    say besides a problem.
    """
    done = Reply("Done.", {} if gives is None else {media: Content(gives)})
    refusal = {} if refuses_with is None else {JSON: Content(refuses_with)}
    statuses = (status,) if repeat_status is None else (status, repeat_status)
    operation = Operation(
        method,
        path,
        handler.__name__,
        None,
        (handler.__doc__ or "").strip().split("\n", 1)[0].rstrip("."),
        parameters=given,
        body={} if takes is None else {JSON: Content(takes)},
        replies={
            **dict.fromkeys(statuses, done),
            "default": Reply("A problem.", {problems.CONTENT_TYPE: Content(Problem), **refusal}),
        },
        needs_body=takes is not None,
    )
    return Route(operation, handler)
