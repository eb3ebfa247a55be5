"""The table of routes: what a handler takes and gives, and the OpenAPI document that follows."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from pydantic.json_schema import models_json_schema

from quorumlog.wire.bodies import Body

_SCHEMAS: Final = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. Its summary is the first line of the handler's docstring."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    takes: type[Body] | None = None
    gives: type[Body] | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    repeat_status: int | None = None
    """Of the same answer to a repeat, where that is another one."""

    @property
    def summary(self) -> str:
        """What the operation does, in one line."""
        return (self.handler.__doc__ or "").strip().split("\n", 1)[0].rstrip(".")


def openapi(title: str, routes: Sequence[Route]) -> Mapping[str, Any]:
    """The OpenAPI 3.1 document of a table."""
    models = {model for route in routes for model in (route.takes, route.gives) if model}
    _, schemas = models_json_schema(
        [(model, "serialization") for model in sorted(models, key=lambda m: m.__name__)],
        ref_template=_SCHEMAS,
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(route: Route) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "parameters": parameters,
        "responses": {
            **{
                str(status): {"description": "done", **_content(route.gives)}
                for status in (route.status, route.repeat_status)
                if status is not None
            },
            "default": {
                "description": "a problem document",
                "content": {"application/problem+json": {"schema": {"type": "object"}}},
            },
        },
    }
    if route.takes is not None:
        operation["requestBody"] = {"required": True, **_content(route.takes)}
    return operation


def _content(model: type[Body] | None) -> dict[str, Any]:
    if model is None:
        return {}
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    return {"content": {"application/json": {"schema": schema}}}
