"""Reads bodies between services with a deadline and in bounded memory, into strict models.

The gateway's edge has its own code and limits for clients' bodies, and parses appends without pydantic.
"""

import asyncio
from typing import Final, TypeVar

from aiohttp import web
from pydantic import ValidationError

from quorumlog.errors import BadRequest, InvalidRequest, Overloaded, RequestTimeout, TooLarge
from quorumlog.net.parameters import escaped, invalid
from quorumlog.wire import strict
from quorumlog.wire.bodies import codec, json_of

BODY_S: Final = 10.0
"""Deadline for a body to arrive (docs/protocol.md, Times)."""

BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size of all incomplete bodies, counting only the bytes that have arrived."""


class Receiving:
    """Counts the arrived bytes of incomplete bodies."""

    def __init__(self) -> None:
        self.bytes = 0


RECEIVING: Final = web.AppKey("receiving", Receiving)


async def read(request: web.Request) -> bytes:
    """Read a request's body. Raises: BadRequest, Overloaded, RequestTimeout, TooLarge."""
    receiving, bytes_max = request.app[RECEIVING], request.client_max_size
    if (request.content_length or 0) > bytes_max:
        raise TooLarge(f"the body has {request.content_length} bytes; the limit is {bytes_max}")
    chunks: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(BODY_S):
            while chunk := await request.content.readany():
                total += len(chunk)
                receiving.bytes += len(chunk)
                if total > bytes_max:
                    raise TooLarge(f"the body is larger than the limit of {bytes_max} bytes")
                if receiving.bytes > BODIES_BYTES_MAX:
                    raise Overloaded("too many bodies are being received: retry later")
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest("the body has an invalid transfer encoding, or ended early") from error
    finally:
        receiving.bytes -= total
    return b"".join(chunks)


T = TypeVar("T")

_FAULTS_MAX: Final = 100


def answer(body: object, status: int = 200, **headers: str) -> web.Response:
    """A response with `body` as JSON. Names of `headers` have underscores instead of hyphens."""
    return web.Response(
        body=json_of(body),
        status=status,
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def parsed(data: bytes, model: type[T]) -> T:
    """Parse a JSON body; an empty body counts as `{}`. Raises: BadRequest, InvalidRequest."""
    body = data or b"{}"
    # Reject repeated keys, because pydantic would use the last value.
    strict.loads(body)
    try:
        value: T = codec(model).validate_json(body)
    except ValidationError as error:
        raise invalid_of(error) from error
    return value


def invalid_of(error: ValidationError) -> InvalidRequest:
    """A 422 that lists the first faults that pydantic found."""
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
