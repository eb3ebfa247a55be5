"""HTTP for the handlers: strict bodies and queries in, JSON and problem documents out."""

import re
from collections.abc import Collection
from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import BadRequest, InvalidRequest, QuorumLogError, UnsupportedMediaType
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire import strict
from quorumlog.wire.bodies import Body

B = TypeVar("B", bound=BaseModel)

_LIMIT_MAX: Final = 10_000
_LIMIT_DEFAULT: Final = 100


def answer(body: Body, status: int = 200, **headers: str) -> web.Response:
    """A JSON response. Header names are given with underscores."""
    return web.Response(
        body=body.model_dump_json().encode(),
        status=status,
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


async def parsed(request: web.Request, model: type[B]) -> B:
    """The request's JSON body. Raises: BadRequest, InvalidRequest, UnsupportedMediaType."""
    if request.content_type not in {"application/json", "application/octet-stream"}:
        raise UnsupportedMediaType("send application/json (curl: -H 'Content-Type: …')")
    body = await request.read() or b"{}"
    # Pydantic would keep the last of two equal keys.
    strict.loads(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _of_validation(error) from error


def _of_validation(error: ValidationError) -> QuorumLogError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    if any(fault["type"] == "json_invalid" for fault in faults):
        return BadRequest(faults[0]["msg"])
    listed = [
        {"pointer": "".join(f"/{part}" for part in fault["loc"]), "detail": fault["msg"]}
        for fault in faults[:100]
    ]
    detail = "; ".join(f"{fault['pointer']}: {fault['detail']}" for fault in listed[:10])
    return InvalidRequest(detail, errors=listed)


def ledger_id_of(request: web.Request) -> int:
    """The id in the path, canonical decimal within 63 bits. Raises: InvalidRequest."""
    return integer(request.match_info["ledger_id"], "ledger_id", most=ID_MAX)


def integer(text: str, name: str, *, least: int = 0, most: int = ID_MAX) -> int:
    """A canonical decimal number. Raises: InvalidRequest."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", text) or not least <= int(text) <= most:
        raise InvalidRequest(
            f"{name} is not an integer from {least} to {most}",
            errors=[{"pointer": f"/{name}", "detail": f"an integer from {least} to {most}"}],
        )
    return int(text)


def query_of(
    request: web.Request, known: Collection[str], *, prefix: str | None = None
) -> dict[str, str]:
    """The query's parameters, each once; `prefix` lets names like `metadata[k]` through.

    Raises: InvalidRequest for others.
    """
    given: dict[str, str] = {}
    for name, value in request.query.items():
        is_known = name in known or (
            prefix is not None and name.startswith(f"{prefix}[") and name.endswith("]")
        )
        if not is_known or name in given:
            detail = "given twice" if is_known else "unknown parameter"
            raise InvalidRequest(
                f"{name}: {detail}", errors=[{"pointer": f"/{name}", "detail": detail}]
            )
        if "\0" in name or "\0" in value:
            raise InvalidRequest("a parameter must not contain NUL")
        given[name] = value
    return given


def page_of(query: dict[str, str]) -> tuple[int | None, int]:
    """`after` and `limit` of a list."""
    after = query.get("after")
    return None if after is None else integer(after, "after"), limit_of(query)


def limit_of(query: dict[str, str]) -> int:
    """`limit` of a list, or its default."""
    limit = query.get("limit", str(_LIMIT_DEFAULT))
    return integer(limit, "limit", least=1, most=_LIMIT_MAX)


def header_version(request: web.Request) -> int | None:
    """The version in `If-Match`, or None. Raises: InvalidRequest."""
    given = request.headers.get("If-Match")
    if given is None:
        return None
    if not (found := re.fullmatch(r'"([1-9][0-9]{0,18})"', given)):
        raise InvalidRequest('If-Match is not one version in quotes, like "3"')
    return int(found.group(1))


def matching(text: str, name: str, pattern: str) -> str:
    """The text, if a pattern matches all of it. Raises: InvalidRequest."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise InvalidRequest(
            f"{name} does not match {pattern}",
            errors=[{"pointer": f"/{name}", "detail": f"must match {pattern}"}],
        )
    return text
