"""JSON bodies of the services inside the cluster: strict models in, models out.

The gateway's edge has its own: what comes from clients is read with limits, and appends without
pydantic.
"""

from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import BadRequest, InvalidRequest, QuorumLogError
from quorumlog.wire import strict

M = TypeVar("M", bound=BaseModel)

_FAULTS_MAX = 100
_FAULTS_SHOWN = 10


def answer(body: BaseModel, status: int = 200, **headers: str) -> web.Response:
    """A body as JSON. Header names are given with underscores."""
    return web.Response(
        body=body.model_dump_json().encode(),
        status=status,
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def parsed(data: bytes, model: type[M]) -> M:
    """A JSON body as a model; no body is `{}`. Raises: BadRequest, InvalidRequest."""
    body = data or b"{}"
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
        for fault in faults[:_FAULTS_MAX]
    ]
    shown = "; ".join(f"{fault['pointer']}: {fault['detail']}" for fault in listed[:_FAULTS_SHOWN])
    return InvalidRequest(shown, errors=listed)
