"""Strict JSON: one meaning for each text, whoever parses it.

orjson refuses NaN, broken UTF-8 and lone surrogates, but of two equal keys it keeps the last one,
and an integer beyond 64 bits becomes a float. Both would make two readers see two requests, so
both are refused here, at the price of counting quotes rather than of a second parser: a key that
was dropped is a string that the text has and the value has not.
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
    """The value of a JSON text, of whose keys it is not known yet whether they are unique."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def check(data: bytes | bytearray, value: Any) -> None:
    """Raise BadRequest where the value of `data` is not all that `data` says."""
    check_strings(data, count_strings(data, value))


def check_strings(data: bytes | bytearray, count: int) -> None:
    """Raise BadRequest unless the text has exactly as many strings as its value: `count`."""
    if b"\\" in data:
        # Backslashes stand in strings only, and pair up from the left.
        data = data.replace(b"\\\\", b"")
        quotes = data.count(b'"') - data.count(b'\\"')
    else:
        quotes = data.count(b'"')
    if quotes != 2 * count:
        raise BadRequest("the body is not strict JSON: an object has two equal keys")


def count_strings(data: bytes | bytearray, value: Any) -> int:
    """How many strings a value of `data` has, keys included. Raises BadRequest where it is nested
    too deep, or holds an integer that lost digits.
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
