"""Whether another process lives under a bookie's name: the one that is registered is asked at its
URL before anybody takes its place (rule 15a).

Gone is proven as rule 21a has it: by a refused connection to that very address, or by an answer of
somebody else. Silence is none: a process that is paused or cut off from here may serve others.
"""

import errno
from enum import StrEnum
from typing import Final

import aiohttp
from pydantic import ValidationError

from services.bookie.bodies import ProcessBody

LOOK_S: Final = 2.0
"""For one answer (taste)."""

SILENCES: Final = 3
"""So many looks without an answer are silence: a single one may be lost on its way."""


class Seen(StrEnum):
    """What a look at a URL showed."""

    GONE = "gone"
    SILENT = "silent"
    THERE = "there"


async def look(url: str, name: str, process: str) -> Seen:
    """Whether another process than `process` answers at a URL as the bookie `name`."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_S)) as session,
            session.get(f"{url}/v1/process") as answer,
        ):
            said = ProcessBody.model_validate_json(await answer.read())
    except aiohttp.ClientConnectorError as error:
        return Seen.GONE if error.os_error.errno == errno.ECONNREFUSED else Seen.SILENT
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, ValidationError):
        # Also what is no answer of a bookie: a proxy may speak for one that is there.
        return Seen.SILENT
    is_other = said.bookie == name and said.process != process
    return Seen.THERE if is_other else Seen.GONE
