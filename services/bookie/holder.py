"""Whether another process lives under a bookie's name: a start probes the registered process at its
URL before it takes the name (rule 15a).

A process is proven gone as in rule 21a: its address refuses the connection, or somebody else
answers there. Silence proves nothing: a process that is paused or partitioned from here may serve
others.
"""

import errno
from enum import StrEnum
from typing import Final

import aiohttp
from pydantic import ValidationError

from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.wire.bodies import received
from services.bookie.bodies import ProcessBody

PROBE_TIMEOUT_S: Final = 2.0
"""For one probe (taste)."""

SILENT_PROBES_MAX: Final = 3
"""So many unanswered probes count as silence: a single answer may get lost."""


class Presence(StrEnum):
    """What a probe of a URL showed."""

    GONE = "gone"
    SILENT = "silent"
    ALIVE = "there"


async def probe(
    url: str, name: str, process: str, credentials: Credentials = ANONYMOUS
) -> Presence:
    """Whether a process other than `process` answers at a URL as the bookie `name`."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    expected = ExpectedServer(
        Role.BOOKIE
    )  # by whichever name: another one there proves that it is gone
    try:
        async with (
            service_session(credentials) as session,
            session.get(f"{url}/v1/process", timeout=timeout, ssl=expected) as answer,
        ):
            reply = received(ProcessBody, await answer.read())
    except aiohttp.ClientConnectorError as error:
        return Presence.GONE if error.os_error.errno == errno.ECONNREFUSED else Presence.SILENT
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, ValidationError):
        # Malformed answers too: they may come from a proxy before a live bookie.
        return Presence.SILENT
    is_other = reply.bookie == name and reply.process != process
    return Presence.ALIVE if is_other else Presence.GONE
