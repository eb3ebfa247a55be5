"""Converts bodies of requests to records, and records to bodies of responses."""

import json
import re
from collections.abc import Sequence
from typing import Final

from quorumlog.errors import BadRequest, TooLarge
from quorumlog.protocol.batch import RECORDS_MAX, Record
from quorumlog.wire import strict
from services.gateway.logs.values import LogBatches

RECORD_BYTES: Final = 1 << 20
"""A body of bytes is split into records of this size, chosen by judgement."""
_SPACE: Final = re.compile(r"[ \t\r\n]*+")


def records_of(data: bytes, count: int | None = None, *, is_json: bool) -> tuple[Record, ...]:
    """Return the records of a body: its JSON messages, or chunks of its bytes; none if the body is
    empty. `count`: the body's `strict.marks`, if known.

    Raises: BadRequest, TooLarge.
    """
    if is_json and data:
        values: Sequence[bytes] = _messages(data, count)
    else:
        values = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
    return tuple(map(Record, values))


def body_of(page: LogBatches, *, is_json: bool) -> bytes:
    """The records' values as the body of a response."""
    if is_json:
        return b"[%b]" % b",".join(page.values)
    return b"".join(found.columns.joined_values for found in page.batches)


def _messages(data: bytes, count: int | None) -> list[bytes]:
    """Return the JSON messages of a body unchanged: the elements of an array, or the only value."""
    strict.check_marks(data, count=count)
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
        raise BadRequest("the body must be valid JSON in UTF-8") from error


def _elements(text: str, at: int) -> list[bytes]:
    found: list[bytes] = []
    at = _skip(text, at)
    if text[at] != "]":
        while True:
            end = _value(text, at)
            found.append(text[at:end].encode())
            if len(found) > RECORDS_MAX:
                raise TooLarge(f"the array must have at most {RECORDS_MAX} messages: split it")
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
    raise ValueError(name)  # NaN and Infinity are not JSON


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_int=len, parse_float=len)
"""Finds where a JSON value ends. Numbers are not converted, because the values are not used."""


def _value(text: str, at: int) -> int:
    """The end of the JSON value that begins at `at`."""
    return _DECODER.raw_decode(text, at)[1]
