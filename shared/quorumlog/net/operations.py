"""Operations, which declare a service's routes: callers, parameters, bodies and responses.

A route pairs an operation with its handler. The handler gets the parsed values of the operation's
parameters. The OpenAPI document is built from the same list of routes, so no route lacks a
description.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from quorumlog.errors import NOT_DONE, Forbidden, Outcome, QuorumLogError
from quorumlog.net import parameters
from quorumlog.net.identity import Role, caller_of
from quorumlog.net.parameters import Given, Parameter
from quorumlog.wire import problems

Schema = type | dict[str, Any]
"""A pydantic model, a value class of the protocol, or a JSON schema."""

ExpectHandler = Callable[[web.Request], Awaitable[None]]
Handler = Callable[[web.Request, Given], Awaitable[web.StreamResponse]]
Errors = tuple[type[QuorumLogError], ...]

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Content:
    """The schema and examples of a body in one media type."""

    schema: Schema
    examples: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The description of a response, with its media types and headers."""

    description: str
    content: Mapping[str, Content] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """The declaration of one method of one path."""

    key: str
    """The method and the path, such as `GET /v1/info`."""
    method: str = field(init=False)
    path: str = field(init=False)
    name: str
    tag: str | None
    summary: str
    description: str = ""
    parameters: tuple[Parameter[Any], ...] = ()
    body: Mapping[str, Content] = field(default_factory=dict)
    """The request's body, by media type; a missing body counts as `{}` if a body is declared."""
    replies: Mapping[int | Literal["default"], Reply] = field(default_factory=dict)
    errors: Errors = ()
    needs_body: bool = False
    roles: frozenset[Role] = frozenset()
    """The roles that may call the operation on an internal listener."""
    is_audited: bool = False
    """Whether the audit log records requests to this operation."""
    is_audited_for_clients: bool = False
    """Whether a request is recorded under the audited request of the client that caused it."""
    ignores_unknown: bool = False
    """Whether undeclared query parameters are ignored and the path's last parameter may contain
    slashes, as an open protocol requires."""

    def __post_init__(self) -> None:
        method, _, path = self.key.partition(" ")
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "path", path)
        declared = [one.name for one in self.parameters if one.place == "path"]
        assert sorted(declared) == sorted(re.findall(r"{(\w+)}", self.path)), self.path


@dataclass(frozen=True, slots=True)
class Route:
    """An operation and its handler."""

    operation: Operation
    handler: Handler

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Check the caller's role, read the parameters and call the handler. A caller without a
        role is allowed, because it has the cluster's secret or the listener needs no credentials.

        Raises: Forbidden, BadRequest, InvalidRequest.
        """
        operation, caller = self.operation, caller_of(request)
        if caller.role is not None and caller.role not in operation.roles:
            allowed = ", ".join(sorted(operation.roles)) or "no role"
            raise Forbidden(
                f"the {caller.role} {caller.name} is not allowed to call this operation: only {allowed} is"
            )
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
    """Add routes to an application; with `has_heads`, each GET route also gets a HEAD route."""
    for route in routes:
        operation = route.operation
        methods = (
            ("GET", "HEAD") if has_heads and operation.method == "GET" else (operation.method,)
        )
        for method in methods:
            path = operation.path
            if operation.ignores_unknown:
                # Paths below `__ds` belong to other operations, which reject other methods (405).
                path = f"{path.removesuffix('}')}:(?!__ds/).+}}"
            app.router.add_route(method, path, route.handle, expect_handler=expect_handler)


class FieldError(BaseModel):
    """An invalid value at a JSON pointer into the body, or at /query/…, /header/… or /path/…."""

    model_config = ConfigDict(extra="forbid")

    pointer: str
    detail: str


class Problem(BaseModel):
    """A problem document (RFC 9457), with members that help a caller decide how to proceed."""

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


_H = TypeVar("_H", bound=Handler)


class Routes(list[Route]):
    """Routes that only this cluster's processes and operators may call, in declaration order."""

    def add(
        self,
        key: str,
        *given: Parameter[Any],
        roles: frozenset[Role],
        takes: type | None = None,
        gives: Schema | None = None,
        status: int = 200,
        media: str = JSON,
        refuses_with: type | None = None,
        is_audited: bool = False,
        is_audited_for_clients: bool = False,
    ) -> Callable[[_H], _H]:
        """Decorate the handler of a route. The operation gets the handler's name, and the first
        line of the handler's docstring as its summary. The operation may return any error. `refuses_with`: the
        body of a refusal, if it is not a problem. Raises: ValueError if no role may call the route.
        """
        if not roles:
            raise ValueError(f"{key}: `roles` must name at least one role that may call the route")
        done = Reply("Done.", {} if gives is None else {media: Content(gives)})
        refusal = {} if refuses_with is None else {JSON: Content(refuses_with)}
        problem = Reply("A problem.", {problems.CONTENT_TYPE: Content(Problem), **refusal})

        def added(handler: _H) -> _H:
            operation = Operation(
                key,
                handler.__name__,
                None,
                (handler.__doc__ or "").strip().split("\n", 1)[0].rstrip("."),
                parameters=given,
                body={} if takes is None else {JSON: Content(takes)},
                replies={status: done, "default": problem},
                needs_body=takes is not None,
                roles=roles,
                is_audited=is_audited,
                is_audited_for_clients=is_audited_for_clients,
            )
            self.append(Route(operation, handler))
            return handler

        return added
