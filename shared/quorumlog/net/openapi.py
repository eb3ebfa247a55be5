"""Builds a service's OpenAPI 3.1 document from operations, pydantic models and errors."""

import html
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from pydantic import TypeAdapter

from quorumlog import header
from quorumlog.errors import QuorumLogError
from quorumlog.net.operations import Content, Operation, Problem, Reply, Schema
from quorumlog.net.parameters import Parameter
from quorumlog.wire import problems
from quorumlog.wire.bodies import codec

_REF: Final = "#/components/schemas/{model}"
_REQUEST_ID: Final = {
    "description": "The client's, if it has at most 64 of `[A-Za-z0-9._-]`; otherwise a new one.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
}

_BEARER: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "An access token of this cluster, or a JWT of the issuer that its gateways trust.",
}


def describe(
    operations: Iterable[Operation],
    *,
    title: str,
    version: str,
    description: str = "",
    has_tokens: bool = False,
    tags: Sequence[str] = (),
) -> dict[str, Any]:
    """The OpenAPI document. `has_tokens`: whether bearer tokens may be required. `tags`: the
    resources in the order of the document; other tags follow.
    """
    operations = list(operations)
    used = dict.fromkeys(operation.tag for operation in operations if operation.tag)
    ordered = [*(tag for tag in tags if tag in used), *(tag for tag in used if tag not in tags)]
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version,
            **({"description": description} if description else {}),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        **({"tags": [{"name": tag} for tag in ordered]} if ordered else {}),
        **({"security": [{}, {"token": []}]} if has_tokens else {}),
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "headers": {header.REQUEST_ID: _REQUEST_ID},
            **({"securitySchemes": {"token": _BEARER}} if has_tokens else {}),
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    shown: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if operation.tag:
        shown["tags"] = [operation.tag]
    if operation.description:
        shown["description"] = operation.description
    if operation.parameters:
        shown["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body:
        shown["requestBody"] = {
            "required": operation.needs_body,
            "content": _content(operation.body),
        }
    shown["responses"] = {
        **{str(status): _reply(reply) for status, reply in operation.replies.items()},
        **_problems(operation.errors),
    }
    return shown


def _parameter(parameter: Parameter[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.description,
        "schema": parameter.schema,
    }
    if parameter.example is not None:
        shown["example"] = parameter.example
    if parameter.style is not None:
        shown |= {"style": parameter.style, "explode": True}
    return shown


def _reply(reply: Reply) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": reply.description, "headers": _headers(reply.headers)}
    if reply.content:
        shown["content"] = _content(reply.content)
    return shown


def _headers(described: Mapping[str, str]) -> dict[str, Any]:
    headers: dict[str, Any] = {
        header.REQUEST_ID: {"$ref": f"#/components/headers/{header.REQUEST_ID}"}
    }
    for name, description in described.items():
        headers[name] = {"description": description, "schema": {"type": "string"}}
    return headers


def _content(content: Mapping[str, Content]) -> dict[str, Any]:
    return {
        media: {"schema": _schema(one.schema)}
        | (
            {"examples": {name: {"value": value} for name, value in one.examples.items()}}
            if one.examples
            else {}
        )
        for media, one in content.items()
    }


def _schema(schema: Schema) -> dict[str, Any]:
    """A schema with references in place of models."""
    if isinstance(schema, type):
        return {"$ref": _REF.format(model=schema.__name__)}
    return {
        key: [_schema(one) for one in value] if key in ("anyOf", "oneOf") else value
        for key, value in schema.items()
    }


def _problems(errors: Iterable[type[QuorumLogError]]) -> dict[str, Any]:
    """One response for each status, with an example for each error code."""
    by_status: dict[int, list[type[QuorumLogError]]] = {}
    for cls in sorted(set(errors), key=lambda cls: (cls.status, cls.code)):
        by_status.setdefault(cls.status, []).append(cls)
    responses: dict[str, Any] = {}
    for status, classes in by_status.items():
        described = {
            name: f"With `{cls.code}`."
            for cls in classes
            for name in (*cls().headers, *cls.member_headers.values())
        }
        examples = {cls.code: problems.to_document(cls(), "b1946ac9-1f") for cls in classes}
        text = f"{HTTPStatus(status).phrase}: " + " · ".join(f"`{cls.code}`" for cls in classes)
        content = {problems.CONTENT_TYPE: Content(Problem, examples)}
        responses[str(status)] = _reply(Reply(text, content, described))
    return responses


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """The schemas of all models that the operations use."""
    found: dict[str, type] = {"Problem": Problem}

    def collect(schema: Schema) -> None:
        if isinstance(schema, type):
            found[schema.__name__] = schema
            return
        for key in ("anyOf", "oneOf"):
            for one in schema.get(key, ()):
                collect(one)

    for operation in operations:
        for content in (operation.body, *(reply.content for reply in operation.replies.values())):
            for one in content.values():
                collect(one.schema)
    _, schema = TypeAdapter.json_schemas(
        [(name, "validation", codec(model)) for name, model in found.items()], ref_template=_REF
    )
    defs: dict[str, Any] = schema["$defs"]
    return defs


_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1rem .3rem;border-radius:.2rem}"
    "summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}"
    "td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}"
    ":root{color-scheme:light dark}"
)


def openapi_page(openapi: Mapping[str, Any]) -> str:
    """An OpenAPI document as one HTML page, which loads no other resources."""
    info = openapi["info"]
    title, description = html.escape(info["title"]), html.escape(info.get("description", ""))
    sections = (
        _section(method, path, operation)
        for path, item in openapi["paths"].items()
        for method, operation in item.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{description}"
        f'</p><p>As data: <a href="/openapi.json"><code>/openapi.json</code></a></p>'
        + "".join(sections)
        + "</html>"
    )


def _section(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parameters = [
        (each["name"], each["in"], each["description"]) for each in operation.get("parameters", ())
    ]
    answers = [(status, answer["description"]) for status, answer in operation["responses"].items()]
    bodies = ", ".join(operation.get("requestBody", {}).get("content", {}))
    parts = [f"<p>{html.escape(operation.get('description', ''))}</p>"]
    if parameters:
        parts.append(_rows(parameters))
    if bodies:
        parts.append(f"<p>Body: <code>{html.escape(bodies)}</code></p>")
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(operation['summary'])}</summary>{''.join(parts)}{_rows(answers)}</details>"
    )


def _rows(rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, whose first column is formatted as code."""
    cells = (
        f"<tr><td><code>{html.escape(first)}</code>"
        + "".join(f"<td>{html.escape(text)}" for text in others)
        for first, *others in rows
    )
    return f"<table>{''.join(cells)}</table>"
