"""Whether the writer of an open ledger is there, gone, or silent (rule 21a).

Gone is proven: every address that its URL stands for refuses a connection, or another process answers
there and says its instance id. A name that nobody knows, a time-out, no descriptor to ask with, a
host that can't be reached and a proxy's answer prove nothing: the writer may be at work all the same.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from quorumlog.protocol.metadata import Writer

_ASK_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}

Refuses = Callable[[str], Awaitable[bool]]
"""Whether nobody listens at a URL, by the word of all of its addresses."""


class Writers:
    """Asks the processes that write. Invariant: whoever answers as itself is there."""

    def __init__(self, session: aiohttp.ClientSession, refuses: Refuses | None = None) -> None:
        """`session` is shared and not closed here."""
        self._session = session
        self._refuses = refuses or refuses_everywhere

    async def is_there(self, writer: Writer) -> bool | None:
        """Whether a writer still is that very process; None where nobody says so."""
        try:
            found = await self._said_at(writer.url)
        except aiohttp.ClientConnectorError as error:
            # aiohttp tells of the last address only.
            is_refused = is_refusal(error.os_error) and await self._refuses(writer.url)
            return False if is_refused else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        said = instance_in(found)
        return None if said is None else said == writer.id

    async def _said_at(self, url: str) -> Any:
        async with self._session.get(
            f"{url}/internal/instance",
            timeout=aiohttp.ClientTimeout(total=_ASK_S),
            allow_redirects=False,
        ) as response:
            return orjson.loads(await response.read()) if response.status == 200 else None


def instance_in(found: Any) -> str | None:
    """The instance id that an answer carries, if it is one of ours: a proxy's has none."""
    said = found.get("id") if isinstance(found, dict) else None
    return said if isinstance(said, str) and said else None


def is_refusal(error: OSError) -> bool:
    """Whether a host answered that nobody listens at the port."""
    return error.errno == errno.ECONNREFUSED


async def refuses_everywhere(url: str) -> bool:
    """Whether each address that a URL's name stands for refuses a connection."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_ASK_S):
            found = await loop.getaddrinfo(
                parts.hostname,
                parts.port or _PORTS.get(parts.scheme),
                type=socket.SOCK_STREAM,
                flags=socket.AI_ADDRCONFIG,
            )
            refused = [await _is_refused(family, address) for family, _, _, _, address in found]
    except (OSError, ValueError):  # a time-out is one too
        return False
    return bool(refused) and all(refused)


async def _is_refused(family: int, address: Any) -> bool:
    """Raises OSError where it can't be asked."""
    with socket.socket(family, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(asking, address)
        except OSError as error:
            return is_refusal(error)
    return False
