"""Determines whether the writer of an open ledger is alive, gone or silent (rule 21a).

A writer is proven gone if every address of its URL refuses a connection, or if a process with
another instance id answers at the URL. An unknown host name, a timeout, exhausted descriptors, an
unreachable host or a proxy's answer prove nothing: the writer may still work.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake_timeout
from quorumlog.protocol.metadata import Writer

_ASK_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}

Refuses = Callable[[str], Awaitable[bool]]
"""Returns whether every address of a URL refuses a connection."""


class WriterPresence(Enum):
    """The result of probing a ledger's writer (rule 21a)."""

    ALIVE = "alive"
    GONE = "gone"
    SILENT = "silent"
    """The probe proves nothing: the writer may be alive or gone."""


class Writers:
    """Probes the writers of ledgers. A live writer's response has the writer's instance id."""

    def __init__(self, session: aiohttp.ClientSession, refuses: Refuses | None = None) -> None:
        """`session`: the caller's HTTP session; the caller closes it."""
        self._session = session
        self._refuses = refuses or refuses_everywhere

    async def presence_of(self, writer: Writer) -> WriterPresence:
        """Requests the instance id at the writer's URL, and compares it with the writer's."""
        try:
            found = await self._fetch_instance(writer.url_inside)
        except aiohttp.ClientConnectorError as error:
            # aiohttp reports only the error of the last address.
            is_refused = is_refusal(error.os_error) and await self._refuses(writer.url_inside)
            return WriterPresence.GONE if is_refused else WriterPresence.SILENT
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return WriterPresence.SILENT
        instance = instance_in(found)
        if instance is None:
            return WriterPresence.SILENT
        return WriterPresence.ALIVE if instance == writer.id else WriterPresence.GONE

    async def _fetch_instance(self, url: str) -> Any:
        # The timeout counts only time in which this process was awake, because a paused process
        # can't read the writer's response.
        async with (
            awake_timeout(_ASK_S),
            self._session.get(
                f"{url}/internal/instance",
                timeout=aiohttp.ClientTimeout(total=None),
                ssl=ExpectedServer(Role.GATEWAY),
            ) as response,
        ):
            return orjson.loads(await response.read()) if response.status == 200 else None


def instance_in(found: Any) -> str | None:
    """The instance id in a gateway's response; None if another program responded (a proxy)."""
    said = found.get("id") if isinstance(found, dict) else None
    return said if isinstance(said, str) and said else None


def is_refusal(error: OSError) -> bool:
    """Whether the host refused the connection, because nothing listens on the port."""
    return error.errno == errno.ECONNREFUSED


async def refuses_everywhere(url: str) -> bool:
    """Whether each address of a URL's host refuses a connection."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        async with awake_timeout(_ASK_S):
            found = await loop.getaddrinfo(
                parts.hostname,
                parts.port or _PORTS.get(parts.scheme),
                type=socket.SOCK_STREAM,
                flags=socket.AI_ADDRCONFIG,
            )
            refused = [await _is_refused(family, address) for family, _, _, _, address in found]
    except (OSError, ValueError):  # TimeoutError is an OSError
        return False
    return bool(refused) and all(refused)


async def _is_refused(family: int, address: Any) -> bool:
    """Whether an address refuses a connection. Raises: OSError if no connection can be tried."""
    with socket.socket(family, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(asking, address)
        except OSError as error:
            return is_refusal(error)
    return False
