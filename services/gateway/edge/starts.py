"""Parse the start of a client's read of a log: an offset, `earliest`, `latest`, `-N`, or a time."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from quorumlog.errors import BadRequest
from quorumlog.net.parameters import integer, invalid, time_of
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from services.gateway.logs.values import CREATED_AT, Last, Since, Start

NAMED: Final[Mapping[str, Start]] = {"earliest": "earliest", "latest": "latest"}

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MICROSECOND: Final = 253_402_300_799_999_999
"""Maximum of `datetime`, the end of the year 9999, in microseconds since 1970."""
_TIME: Final = re.compile(r"[0-9]{4}-", re.ASCII)
_CHARS_MAX: Final = 40
_FORMS: Final = "an offset, earliest, latest, -N or an RFC 3339 time"


_TOKEN_DIGITS: Final = 14
"""Number of hexadecimal digits in a creation token: microseconds since 1970, up to year 4253."""
EVENT_ID: Final = rf"(-1|0|[1-9][0-9]{{0,18}})(\.[0-9a-f]{{{_TOKEN_DIGITS}}})?"
"""Regular expression of a log event's id: the record's offset and a token of the log's creation."""
_TOKEN: Final = re.compile(rf"[0-9a-f]{{{_TOKEN_DIGITS}}}", re.ASCII)
_CREATED_AT: Final = re.compile(CREATED_AT, re.ASCII)


def token_of(created_at: str) -> str:
    """Encode a log's `created_at` as a short token of fixed length, for offsets and event ids."""
    return f"{microseconds_of(created_at, '/created_at'):0{_TOKEN_DIGITS}x}"


def created_of(token: str) -> str:
    """Decode a creation token to the log's `created_at`."""
    at = _EPOCH + timedelta(microseconds=min(int(token, 16), _LAST_MICROSECOND))
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


def created_at_of(text: str, pointer: str) -> str:
    """Parse a log's `created_at`, or a creation token from an event id. Raises: InvalidRequest."""
    if _TOKEN.fullmatch(text):
        return created_of(text)
    if not _CREATED_AT.fullmatch(text):
        raise invalid(pointer, "must be a log's `created_at` from an earlier response")
    return text


def event_id_of(text: str, pointer: str) -> tuple[int, str | None]:
    """Parse an event id: the record's offset, and the log's `created_at` if the id has a token.

    Raises: BadRequest if the id is malformed, InvalidRequest if the offset is out of range.
    """
    number, _, token = text.partition(".")
    if number != text and not _TOKEN.fullmatch(token):
        raise BadRequest(f"{pointer}: {text[:_CHARS_MAX]!a} is not the id of a received event")
    offset = integer(number, pointer, NO_ENTRY, ID_MAX - 1)
    return offset, created_of(token) if token else None


def start_of(text: str, pointer: str) -> Start:
    """Parse the query parameter with a read's start. Raises: BadRequest, InvalidRequest."""
    named = NAMED.get(text)
    if named is not None:
        return named
    if _TIME.match(text):
        # Round up to milliseconds, because a record of the same millisecond may be older.
        return Since(-(-microseconds_of(text, pointer) // 1000))
    if text.startswith("-"):
        return Last(-integer(text, pointer, -ID_MAX, -1))
    return integer(text, pointer)


def start_of_json(value: object, pointer: str) -> Start:
    """Parse a read's start from JSON: an integer, a name or a time. Raises: InvalidRequest."""
    if isinstance(value, str) and (value in NAMED or _TIME.match(value)):
        return start_of(value, pointer)
    if type(value) is not int or not -ID_MAX <= value <= ID_MAX:
        raise invalid(pointer, f"must be {_FORMS}")
    return Last(-value) if value < 0 else value


def id_of_json(value: object, pointer: str) -> Start:
    """Parse the first entry id of a ledger's read from JSON. Raises: InvalidRequest."""
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise invalid(pointer, f"must be an integer from 0 to {ID_MAX}")
    return value


def microseconds_of(value: object, pointer: str) -> int:
    """Convert an RFC 3339 time to microseconds since 1970. Raises: InvalidRequest."""
    if not isinstance(value, str) or len(value) > _CHARS_MAX:
        raise invalid(pointer, "must be an RFC 3339 time")
    if " " in value[len("2026-01-02T") :]:
        raise invalid(
            pointer,
            "contains a space: write the + of a time zone as %2B in a query, or send the time in UTC, with Z",
        )
    try:
        age = time_of(value) - _EPOCH
    except ValueError as error:
        raise invalid(
            pointer, "must be an RFC 3339 time with a time zone, like 2026-01-02T03:04:05Z"
        ) from error
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds
