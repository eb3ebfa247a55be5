"""The log of a stream: the stream's path, escaped, behind a prefix that no user's log may have."""

import re
from typing import Final
from urllib.parse import unquote

from quorumlog.errors import BadRequest
from quorumlog.wire.bodies import LOG_NAME
from services.gateway.logs.values import STREAM_PREFIX

PREFIX: Final = "/v1/stream/"
_ESCAPED: Final = re.compile(rb"[^A-Za-z0-9.-]")


def log_of(path: str) -> str:
    """The name of a stream's log: each byte of the path's UTF-8 but letters, digits, `.` and `-` is `_` and two
    hexadecimal digits. Raises: BadRequest for a path that is too long for a name.
    """
    try:
        data = path.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the stream's path is not UTF-8") from error
    name = STREAM_PREFIX + _ESCAPED.sub(lambda found: b"_%02X" % found[0][0], data).decode()
    if not re.fullmatch(LOG_NAME, name):
        raise BadRequest(
            f"the stream's path is too long: its log's name would have {len(name)} characters, of 200"
        )
    return name


def log_of_url(text: str, pointer: str) -> str:
    """The name of the log of a stream whose URL's path is given. Raises: BadRequest."""
    try:
        path = unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{pointer}: is not UTF-8") from error
    if not path.startswith(PREFIX):
        raise BadRequest(f"{pointer}: must be a path that begins with {PREFIX}")
    return log_of(path.removeprefix(PREFIX))
