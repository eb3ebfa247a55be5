"""Where a read of a log begins, as clients write it: an offset, `earliest`, `latest`, `-N`, or a time."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from quorumlog.net.parameters import integer, invalid
from quorumlog.protocol.ids import ID_MAX
from services.gateway.logs.values import Last, Since, Start

NAMED: Final[Mapping[str, Start]] = {"earliest": "earliest", "latest": "latest"}

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME: Final = re.compile(r"[0-9]{4}-", re.ASCII)
_CHARS_MAX: Final = 40
_FORMS: Final = "an offset, earliest, latest, -N or an RFC 3339 time"


def start_of(text: str, pointer: str) -> Start:
    """The start that a query names. Raises: BadRequest for what is no start, InvalidRequest."""
    named = NAMED.get(text)
    if named is not None:
        return named
    if _TIME.match(text):
        # Rounded up: a record of the millisecond in which the time lies may be older than the time.
        return Since(-(-microseconds_of(text, pointer) // 1000))
    if text.startswith("-"):
        return Last(-integer(text, pointer, -ID_MAX, -1))
    return integer(text, pointer)


def start_of_json(value: object, pointer: str) -> Start:
    """The start that a JSON value names: a number, or the text of a query. Raises: InvalidRequest."""
    if isinstance(value, str) and (value in NAMED or _TIME.match(value)):
        return start_of(value, pointer)
    if type(value) is not int or not -ID_MAX <= value <= ID_MAX:
        raise invalid(pointer, f"must be {_FORMS}")
    return Last(-value) if value < 0 else value


def id_of_json(value: object, pointer: str) -> Start:
    """The first entry of a ledger that a JSON value names. Raises: InvalidRequest."""
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise invalid(pointer, f"must be an integer from 0 to {ID_MAX}")
    return value


def microseconds_of(value: object, pointer: str) -> int:
    """An RFC 3339 time in microseconds since 1970. Raises: InvalidRequest."""
    if not isinstance(value, str) or len(value) > _CHARS_MAX or "T" not in value.upper():
        raise invalid(pointer, "must be an RFC 3339 time")
    if " " in value:
        raise invalid(
            pointer,
            "has a space: write the + of a time zone as %2B in a query, or give the time in UTC, with Z",
        )
    try:
        at = datetime.fromisoformat(value.upper())
    except ValueError as error:
        raise invalid(pointer, "must be an RFC 3339 time") from error
    if at.tzinfo is None:
        raise invalid(pointer, "must say its offset from UTC, like Z")
    age = at - _EPOCH
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds
