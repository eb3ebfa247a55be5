"""The OpenAPI 3.1 description, made of the route table, the pydantic models and the error tree."""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quorumlog.errors import QuorumLogError, ShuttingDown
from quorumlog.wire import problems
from services.gateway.edge.models import Problem
from services.gateway.edge.operations import Answer, Content, Errors, Operation, Parameter, Schema

_REF: Final = "#/components/schemas/{model}"
_DESCRIPTION: Final = (
    "Replicated, append-only ledgers over HTTP: the BookKeeper protocol. Errors are problem "
    "documents (RFC 9457) with a `code`, and say whether the request may be sent again "
    "(`retryable`) and what became of it (`outcome`). Each GET has a HEAD, each path OPTIONS."
)
_REQUEST_ID: Final = {
    "description": "The client's, if it is at most 64 of `[A-Za-z0-9._-]`, else a new one.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
}


def describe(operations: Iterable[Operation], *, version: str) -> dict[str, Any]:
    """The document."""
    operations = list(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quorumlog gateway",
            "version": version,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(op.tag for op in operations)],
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "headers": {"X-Request-Id": _REQUEST_ID},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
    }
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
        **{str(status): _answer(answer) for status, answer in operation.answers.items()},
        **_problems(_errors(operation)),
    }
    return shown


def _parameter(parameter: Parameter) -> dict[str, Any]:
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


def _answer(answer: Answer) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": answer.description, "headers": _headers(answer.headers)}
    if answer.content:
        shown["content"] = _content(answer.content)
    return shown


def _headers(described: Mapping[str, str]) -> dict[str, Any]:
    headers: dict[str, Any] = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
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
    """A schema in place, with references to models."""
    if isinstance(schema, type):
        return {"$ref": _REF.format(model=schema.__name__)}
    return {
        key: [_schema(one) for one in value] if key in ("anyOf", "oneOf") else value
        for key, value in schema.items()
    }


def _errors(operation: Operation) -> Errors:
    """What an operation is answered with. Of a gateway that is about to end nobody changes anything."""
    return operation.errors if operation.method == "GET" else (*operation.errors, ShuttingDown)


def _problems(errors: Iterable[type[QuorumLogError]]) -> dict[str, Any]:
    """One response for each status, with an example for each of its codes."""
    by_status: dict[int, list[type[QuorumLogError]]] = {}
    for cls in sorted(set(errors), key=lambda cls: (cls.status, cls.code)):
        by_status.setdefault(cls.status, []).append(cls)
    responses: dict[str, Any] = {}
    for status, classes in by_status.items():
        described = {
            header: f"With `{cls.code}`."
            for cls in classes
            for header in (*cls().headers, *cls.member_headers.values())
        }
        examples = {
            cls.code: {"value": problems.to_document(cls(), "b1946ac9-1f")} for cls in classes
        }
        responses[str(status)] = {
            "description": f"{HTTPStatus(status).phrase}: "
            + " · ".join(f"`{cls.code}`" for cls in classes),
            "headers": _headers(described),
            "content": {
                problems.CONTENT_TYPE: {
                    "schema": {"$ref": _REF.format(model="Problem")},
                    "examples": examples,
                }
            },
        }
    return responses


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """The schemas of all models that the operations name."""
    found: dict[str, type[BaseModel]] = {"Problem": Problem}

    def collect(schema: Schema) -> None:
        if isinstance(schema, type):
            assert issubclass(schema, BaseModel)
            found[schema.__name__] = schema
            return
        for key in ("anyOf", "oneOf"):
            for one in schema.get(key, ()):
                collect(one)

    for operation in operations:
        for content in operation.body.values():
            collect(content.schema)
        for answer in operation.answers.values():
            for content in answer.content.values():
                collect(content.schema)
    _, schema = models_json_schema(
        [(model, "validation") for model in found.values()], by_alias=True, ref_template=_REF
    )
    defs: dict[str, Any] = schema["$defs"]
    return defs
