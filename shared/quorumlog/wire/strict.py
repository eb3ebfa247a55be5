"""Strict JSON: one meaning for each text, whoever parses it.

orjson refuses NaN, broken UTF-8 and lone surrogates, but it keeps the last of two equal keys, and it
turns an integer beyond 64 bits into a float. Two readers could then see two different requests, so
this module refuses both. Instead of parsing twice it counts quotes: a dropped key is a string that the
text has and the value lacks.
"""

import re
from typing import Any, Final

import orjson

from quorumlog.errors import BadRequest

DEPTH_MAX: Final = 64
"""Nesting of a request's JSON (taste; orjson itself stops at 1024)."""

_EXACT_BELOW: Final = 2.0**63
_LONG_INTEGER: Final = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{19,}(?![0-9.eE])")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


def loads(data: bytes | bytearray) -> Any:
    """The value of a JSON text. Raises BadRequest where it is broken or ambiguous."""
    value = parse(data)
    check(data, value)
    return value


def parse(data: bytes | bytearray) -> Any:
    """The value of a JSON text whose keys may be repeated: `check` refuses those."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def check(data: bytes | bytearray, value: Any) -> None:
    """Raise BadRequest where `value` lost something of `data`."""
    check_strings(data, count_strings(data, value))


def check_strings(data: bytes | bytearray, count: int) -> None:
    """Raise BadRequest unless the text has exactly as many strings as its value: `count`."""
    if b"\\" in data:
        # Backslashes occur in strings only, and pair up from the left.
        data = data.replace(b"\\\\", b"")
        quotes = data.count(b'"') - data.count(b'\\"')
    else:
        quotes = data.count(b'"')
    if quotes != 2 * count:
        raise BadRequest("the body is not strict JSON: an object has two equal keys")


def count_strings(data: bytes | bytearray, value: Any) -> int:
    """How many strings a value of `data` has, keys included. Raises BadRequest where the value is
    nested too deeply, or has an integer that lost digits.
    """
    count, depth, level = 0, 0, [value]
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise BadRequest(f"the body's JSON is nested deeper than {DEPTH_MAX}")
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                count += 1
            elif kind is dict:
                count += len(item)
                below.extend(item.values())
            elif kind is list:
                below.extend(item)
            elif kind is float and not -_EXACT_BELOW < item < _EXACT_BELOW:
                _refuse_long_integers(data)
        level = below
    return count


def _refuse_long_integers(data: bytes | bytearray) -> None:
    for match in _LONG_INTEGER.finditer(_STRING.sub(b'""', bytes(data))):
        if not -(2**63) <= int(match[0][:40]) < 2**64:
            raise BadRequest("the body has an integer beyond 64 bits, which would lose digits")
