"""Bodies of requests as records, and records as bodies of answers."""

import json
import re
from collections.abc import Sequence
from typing import Final

from quorumlog.errors import BadRequest, TooLarge
from quorumlog.protocol.batch import RECORDS_MAX, Record
from quorumlog.wire import strict
from services.gateway.logs.values import LogBatches

RECORD_BYTES: Final = 1 << 20
"""A body of bytes is cut into records of this size (taste)."""
_SPACE: Final = re.compile(r"[ \t\r\n]*+")


def records_of(data: bytes, *, is_json: bool) -> tuple[Record, ...]:
    """The records of a body: its messages, or pieces of its bytes; none of an empty body or JSON array.

    Raises: BadRequest, TooLarge.
    """
    if is_json and data:
        values: Sequence[bytes] = _messages(data)
    else:
        values = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
    return tuple(map(Record, values))


def body_of(page: LogBatches, *, is_json: bool) -> bytes:
    """The records' values as the body of an answer."""
    if is_json:
        return b"[%b]" % b",".join(page.values)
    return b"".join(found.columns.joined_values for found in page.batches)


def _messages(data: bytes) -> list[bytes]:
    """The JSON messages of a body, byte by byte as they came: those of an array, else the one value."""
    strict.check_marks(data)
    try:
        text = data.decode()
        start = _skip(text, 0)
        if text[start : start + 1] == "[":
            return _elements(text, start + 1)
        end = _value(text, start)
        if _skip(text, end) != len(text):
            raise ValueError
        return [text[start:end].encode()]
    except (ValueError, IndexError, StopIteration, RecursionError) as error:
        raise BadRequest("the body is not JSON in UTF-8") from error


def _elements(text: str, at: int) -> list[bytes]:
    found: list[bytes] = []
    at = _skip(text, at)
    if text[at] != "]":
        while True:
            end = _value(text, at)
            found.append(text[at:end].encode())
            if len(found) > RECORDS_MAX:
                raise TooLarge(f"an array of more than {RECORDS_MAX} messages")
            at = _skip(text, end)
            if text[at] == "]":
                break
            if text[at] != ",":
                raise ValueError
            at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise ValueError
    return found


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_int=len, parse_float=len)
"""It finds where a value ends: what the value is does not matter."""


def _value(text: str, at: int) -> int:
    """Where the value that begins at `at` ends."""
    return _DECODER.raw_decode(text, at)[1]
