"""HTTP for the handlers: strict bodies in, JSON out, and the parameters that several take."""

import re
from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import BadRequest, InvalidRequest, QuorumLogError, UnsupportedMediaType
from quorumlog.net.parameters import Parameter, invalid, path_id, path_text, query_integer
from quorumlog.wire import strict
from quorumlog.wire.bodies import BOOKIE_NAME, Body

B = TypeVar("B", bound=BaseModel)

_VERSION: Final = r'"([1-9][0-9]{0,18})"'


def answer(body: Body, status: int = 200, **headers: str) -> web.Response:
    """A body as JSON. Header names are given with underscores."""
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


def _version(text: str, pointer: str) -> int:
    if not (found := re.fullmatch(_VERSION, text)):
        raise invalid(pointer, 'must be one version in quotes, like "3"')
    return int(found.group(1))


LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
BOOKIE: Final = path_text("name", BOOKIE_NAME, "The bookie, without an incarnation.", "bookie-1")
LIMIT: Final = query_integer("limit", 1, 10_000, "Rows of a page.", 100)
IF_MATCH: Final[Parameter[int | None]] = Parameter(
    "If-Match",
    "header",
    _version,
    {"type": "string", "pattern": f"^{_VERSION}$"},
    "The version of the row in the body, in quotes.",
    None,
)
