"""A parser of strict JSON, in which a text has the same meaning for every parser.

orjson rejects NaN, invalid UTF-8 and lone surrogates, but keeps the last of two equal keys, and
turns an integer beyond 64 bits into a float. Two parsers could then read different requests, so
this module rejects both. orjson drops one of two equal keys, so the text has more quotes than
the value's strings need. The module compares the two counts.

A float preserves neither all digits of a decimal nor its form: 1.10 would become 1.1. Therefore a
value with a float is parsed again (`exact`) before it is stored, so that decimals keep their text.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import orjson

from quorumlog.errors import BadRequest, InvalidRequest, TooLarge

T = TypeVar("T")

DEPTH_MAX: Final = 64
"""Maximum nesting of a request's JSON (chosen by judgement; orjson's own limit is 1024)."""

MARKS_MAX: Final = 1 << 19
"""Maximum number of commas, colons and opening brackets in a JSON text. Each value has at least one
such mark, and takes at most 80 bytes of memory per mark. Parsing that many takes 50 ms (measured).
"""
_MARKS: Final = b",:[{"
_BYTES_A_MARK: Final = 256
"""A text with at least this number of bytes per mark is searched for marks, not counted."""
_SAMPLE_BYTES: Final = 4096
"""Size of the sample by which the density of marks in a text is estimated."""
_TOKENS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([,:\[{])', re.DOTALL)
_INTEGER_CHARS: Final = 40
"""Number of digits that suffice to detect an integer beyond 64 bits."""


class HasDecimals(Exception):
    """A value has a float, which may differ from the decimal in the text."""


def loads(data: bytes | bytearray, marks_max: int = MARKS_MAX, *, count: int | None = None) -> Any:
    """Parse a JSON text. `count`: the number of `marks`, if known, since counting takes as long as
    parsing few values. Raises: BadRequest if the text is broken or ambiguous, TooLarge.
    """
    value = parse(data, marks_max, count=count)
    check(data, value)
    return value


def marks(data: bytes | bytearray) -> int:
    """The number of commas, colons and opening brackets in a text, including those in strings."""
    # Texts of long strings have few marks, and searching takes half the time of counting.
    if _counted(data[:_SAMPLE_BYTES]) * _BYTES_A_MARK > _SAMPLE_BYTES:
        return _counted(data)
    count, most = 0, len(data) // _BYTES_A_MARK
    for mark in _MARKS:
        at = data.find(mark)
        while at >= 0:
            count += 1
            if count > most:
                return _counted(data)
            at = data.find(mark, at + 1)
    return count


def _counted(data: bytes | bytearray) -> int:
    return len(data) - len(data.translate(None, _MARKS))


def check_marks(
    data: bytes | bytearray, marks_max: int = MARKS_MAX, *, count: int | None = None
) -> None:
    """Raise TooLarge if a text has too many values, before it is parsed. `count`: as in `loads`."""
    if len(data) <= marks_max or (marks(data) if count is None else count) <= marks_max:
        return
    # Marks inside strings do not belong to values. Nearly every string is followed by a mark.
    outside = 0
    for number, found in enumerate(_TOKENS.finditer(data)):
        outside += found.lastindex is not None
        if outside > marks_max or number > 2 * marks_max + 1:
            raise TooLarge(f"the JSON has more than {marks_max} commas, colons and brackets")


def parse(data: bytes | bytearray, marks_max: int = MARKS_MAX, *, count: int | None = None) -> Any:
    """Parse a JSON text, but leave repeated keys to `check`. `count`: as in `loads`. Raises:
    BadRequest, TooLarge.
    """
    check_marks(data, marks_max, count=count)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body must be JSON: {error}") from error


def kept(data: bytes | bytearray, use: Callable[[Any], T], *, count: int | None = None) -> T:
    """Parse a text, and return the result of `use` for the parsed value, which the caller stores.
    `use` must call `check_strings`. If `use` raises HasDecimals, it is called again with the
    `exact` value. `count`: as in `loads`.

    Raises: BadRequest, InvalidRequest.
    """
    value = parse(data, count=count)
    try:
        try:
            return use(value)
        except HasDecimals:
            value = exact(data)
            return use(value)
    except InvalidRequest:
        # Report an ambiguity first, because an ambiguous body has no meaning that could be invalid.
        check(data, value)
        raise


def exact(data: bytes | bytearray) -> Any:
    """Parse a text that `parse` accepts, with decimals as `orjson.Fragment`s, which orjson writes
    with their original text. This takes about four times as long as `parse`. Raises: BadRequest for
    an integer beyond 64 bits.
    """
    return json.loads(data.decode(), parse_float=orjson.Fragment, parse_int=_integer)


def check(data: bytes | bytearray, value: Any) -> None:
    """Raise BadRequest unless `value` contains all of `data`, apart from the form of decimals."""
    try:
        count = count_strings(value)
    except HasDecimals:
        count = count_strings(exact(data))
    check_strings(data, count)


def check_strings(data: bytes | bytearray, count: int) -> None:
    """Raise BadRequest unless the text has exactly `count` strings, as its value has."""
    if b"\\" in data:
        # Backslashes occur only in strings, and pair up from the left.
        data = data.replace(b"\\\\", b"")
        quotes = data.count(b'"') - data.count(b'\\"')
    else:
        quotes = data.count(b'"')
    if quotes != 2 * count:
        raise BadRequest("the body is not strict JSON: send each key of an object once")


def count_strings(value: Any) -> int:
    """The number of strings in a value, keys included. Raises: BadRequest if the value is nested
    too deeply, HasDecimals if it has a float.
    """
    count, depth, level, has_decimals = 0, 0, [value], False
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise BadRequest(f"the body's JSON must not be nested deeper than {DEPTH_MAX}")
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
            elif kind is float:
                has_decimals = True
        level = below
    if has_decimals:
        raise HasDecimals
    return count


def _integer(text: str) -> int:
    value = int(text[:_INTEGER_CHARS])
    if not -(2**63) <= value < 2**64:
        raise BadRequest("the body has an integer beyond 64 bits: send it as a string")
    return value
