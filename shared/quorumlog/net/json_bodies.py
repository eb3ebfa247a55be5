"""JSON bodies of the services inside the cluster: strict models in, models out.

The gateway's edge reads the bodies of clients itself: with limits, and appends without pydantic.
"""

from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import InvalidRequest
from quorumlog.net.parameters import escaped, invalid
from quorumlog.wire import strict

M = TypeVar("M", bound=BaseModel)

_FAULTS_MAX: Final = 100


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
        raise invalid_of(error) from error


def invalid_of(error: ValidationError) -> InvalidRequest:
    """A 422 that lists what pydantic found."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    found = [
        invalid(
            "".join(f"/{escaped(str(part))}" for part in fault["loc"]),
            fault["msg"].removeprefix("Value error, "),
        )
        for fault in faults[:_FAULTS_MAX]
    ]
    errors = [each for one in found for each in one.members["errors"]]
    return InvalidRequest(found[0].detail, errors=errors)
