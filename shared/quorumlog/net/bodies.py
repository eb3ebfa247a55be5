"""Read the bodies of requests to the services inside the cluster, with a deadline and in bounded memory.

The gateway's edge has limits of its own for the bodies of clients.
"""

import asyncio
from typing import Final

from aiohttp import web

from quorumlog.errors import BadRequest, Overloaded, RequestTimeout, TooLarge

BODY_S: Final = 10.0
"""Time for a body to arrive (docs/protocol.md, Times)."""

BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of all bodies that are being received, counted as their bytes arrive."""


class Receiving:
    """The bytes received of bodies that are incomplete."""

    def __init__(self) -> None:
        self.bytes = 0


RECEIVING: Final = web.AppKey("receiving", Receiving)


async def read(request: web.Request) -> bytes:
    """The body. Raises: BadRequest, Overloaded, RequestTimeout, TooLarge."""
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
                    raise TooLarge(f"the body has more than {bytes_max} bytes")
                if receiving.bytes > BODIES_BYTES_MAX:
                    raise Overloaded("too many large bodies at a time")
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(f"the body was not complete within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest("the body's transfer encoding is broken, or it was cut short") from error
    finally:
        receiving.bytes -= total
    return b"".join(chunks)
