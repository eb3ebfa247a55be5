"""Strict JSON: one meaning for each text, whoever parses it.

orjson refuses NaN, broken UTF-8 and lone surrogates, but it keeps the last of two equal keys, and it
turns an integer beyond 64 bits into a float. Two readers could then see two different requests, so
this module refuses both. It finds equal keys by counting quotes: a dropped key is a string that the
text has and the value lacks.

A float keeps neither all digits of a decimal nor its form: 1.10 would become 1.1. A value that is stored is therefore
parsed once more where it has a float (`exact`), and its decimals keep their text.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import orjson

from quorumlog.errors import BadRequest, InvalidRequest, TooLarge

T = TypeVar("T")

DEPTH_MAX: Final = 64
"""Nesting of a request's JSON (taste; orjson itself stops at 1024)."""

MARKS_MAX: Final = 1 << 19
"""Commas, colons and opening brackets of one JSON text. A value has one of these at least, and takes 80 bytes of memory
for each at most; parsing so many takes 50 ms (measured)."""
_MARKS: Final = b",:[{"
_TOKENS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([,:\[{])', re.DOTALL)
_INTEGER_CHARS: Final = 40
"""Enough of an integer's digits to see that it is beyond 64 bits."""


class HasDecimals(Exception):
    """A value has a float, which may not be what the text says."""


def loads(data: bytes | bytearray, marks_max: int = MARKS_MAX) -> Any:
    """The value of a JSON text. Raises BadRequest where it is broken or ambiguous, TooLarge."""
    value = parse(data, marks_max)
    check(data, value)
    return value


def marks(data: bytes | bytearray) -> int:
    """The commas, colons and opening brackets of a text, those in strings included."""
    return len(data) - len(data.translate(None, _MARKS))


def check_marks(data: bytes | bytearray, marks_max: int = MARKS_MAX) -> None:
    """Raise TooLarge where a text has more values than may be made of it, before one is made."""
    if len(data) <= marks_max or marks(data) <= marks_max:
        return
    # Those in strings mark no values. Nearly each string has a mark behind it.
    count = 0
    for number, found in enumerate(_TOKENS.finditer(data)):
        count += found.lastindex is not None
        if count > marks_max or number > 2 * marks_max + 1:
            raise TooLarge(f"the JSON has more than {marks_max} commas, colons and brackets")


def parse(data: bytes | bytearray, marks_max: int = MARKS_MAX) -> Any:
    """The value of a JSON text whose keys may be repeated: `check` refuses those. Raises: BadRequest, TooLarge."""
    check_marks(data, marks_max)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def kept(data: bytes | bytearray, use: Callable[[Any], T]) -> T:
    """What `use` makes of a text's value to store it. `use` checks the count of strings, and is called again with the
    `exact` value where it raises HasDecimals. Raises: BadRequest, InvalidRequest.
    """
    value = parse(data)
    try:
        try:
            return use(value)
        except HasDecimals:
            value = exact(data)
            return use(value)
    except InvalidRequest:
        # An ambiguous body has no meaning that could be wrong: the ambiguity is reported first.
        check(data, value)
        raise


def exact(data: bytes | bytearray) -> Any:
    """The value of a text that `parse` takes, with decimals as `orjson.Fragment`s: written again, they have the text
    that came. Raises BadRequest for an integer beyond 64 bits. Takes about four times as long as `parse`.
    """
    return json.loads(data.decode(), parse_float=orjson.Fragment, parse_int=_integer)


def check(data: bytes | bytearray, value: Any) -> None:
    """Raise BadRequest where `value` lost something of `data` other than a decimal's form."""
    try:
        count = count_strings(value)
    except HasDecimals:
        count = count_strings(exact(data))
    check_strings(data, count)


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


def count_strings(value: Any) -> int:
    """How many strings a value has, keys included. Raises BadRequest where the value is nested too deeply, HasDecimals
    where it has a float.
    """
    count, depth, level, has_decimals = 0, 0, [value], False
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
            elif kind is float:
                has_decimals = True
        level = below
    if has_decimals:
        raise HasDecimals
    return count


def _integer(text: str) -> int:
    value = int(text[:_INTEGER_CHARS])
    if not -(2**63) <= value < 2**64:
        raise BadRequest("the body has an integer beyond 64 bits, which would lose digits")
    return value
