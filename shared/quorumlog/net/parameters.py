"""Parameters of requests, each declared once: its name, its bounds, how it is read and described.

A handler asks for the declaration (`given[LIMIT]`), the same declaration refuses a request, and the
OpenAPI document shows it, so the three can't differ. Each value has one spelling: 400 where a text
is no number at all, 422 where it is one that is not allowed (docs/guides/http.md). A query
parameter that an operation does not declare is refused, and so is a repeated one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Literal, TypeVar, overload

from aiohttp import web

from quorumlog.errors import BadRequest, InvalidRequest
from quorumlog.protocol.ids import ID_MAX

T = TypeVar("T")
S = TypeVar("S", bound=str)

ParameterPlace = Literal["path", "query", "header"]
Parse = Callable[[str, str], T]
"""Makes a parameter's value of its text; the second argument is the pointer that errors name."""

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_POINTER_CHARS_MAX: Final = 300
_DETAIL_CHARS_MAX: Final = 500
"""Longer places and details are cut: an error never repeats a client's megabytes (chosen by judgement)."""
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:)([0-5]\d|60)((?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))",
    re.ASCII | re.IGNORECASE,
)
_VERSION: Final = r'"([1-9][0-9]{0,18})"'
_SHOWN_MAX: Final = 100
PAIRS_MAX: Final = 8
"""Each pair is a join of its own in the database, whose planner takes twice as long for each one more (measured)."""


def invalid(pointer: str, detail: str) -> InvalidRequest:
    """A 422 for one place: a JSON pointer into the body, or /query/…, /header/…, /path/…."""
    pointer, detail = pointer[:_POINTER_CHARS_MAX], detail[:_DETAIL_CHARS_MAX]
    where = pointer or "the body"
    return InvalidRequest(f"{where}: {detail}", errors=[{"pointer": pointer, "detail": detail}])


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901), cut to a length that can be shown."""
    return name[:_SHOWN_MAX].replace("~", "~0").replace("/", "~1")


def integer(text: str, pointer: str, low: int = 0, high: int = ID_MAX) -> int:
    """A canonical decimal number between two bounds, both inclusive."""
    # The common case at once: few digits, ASCII, no leading zero.
    if len(text) < 19 and text.isascii() and text.isdecimal() and (text[0] != "0" or text == "0"):
        value = int(text)
        if low <= value <= high:
            return value
    if not _INTEGER.fullmatch(text) or text == "-0":
        shown = ascii(text[:_SHOWN_MAX])
        raise BadRequest(f"{pointer}: {shown} is not a decimal integer in its shortest form")
    if len(text) > 20 or not low <= (value := int(text)) <= high:
        raise invalid(pointer, f"must be an integer from {low} to {high}")
    return value


def time_of(text: str) -> datetime:
    """An RFC 3339 time, in UTC. A leap second, which only the last minute of a month (UTC) may have, is the second after
    it, as in POSIX. Raises: ValueError.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError("no RFC 3339 time")
    is_leap = found[2] == "60"
    try:
        at = datetime.fromisoformat(
            f"{found[1]}{'59' if is_leap else found[2]}{found[3]}".upper()
        ).astimezone(UTC)
        if is_leap:
            at = at.replace(microsecond=0) + timedelta(seconds=1)
    except OverflowError as error:
        raise ValueError("outside of the years 1 to 9999") from error
    if is_leap and (at.day, at.hour, at.minute) != (1, 0, 0):
        raise ValueError("no leap second")
    return at


def matching(text: str, pointer: str, pattern: str) -> str:
    """A text that a pattern describes whole."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise invalid(pointer, f"must match {pattern}")
    return text


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Generic[T]):
    """A parameter of the path, the query or the headers."""

    name: str
    place: ParameterPlace
    parse: Parse[T]
    schema: Mapping[str, Any]
    description: str
    default: T
    """The value where a request does not give one; a path always does."""
    example: Any = None
    style: str | None = None
    pointer: str = field(init=False)
    """Where a request has it, as errors name places."""

    def __post_init__(self) -> None:
        # Built once, not for each request.
        object.__setattr__(self, "pointer", f"/{self.place}/{self.name}")

    def taken(self, query: dict[str, str]) -> T | None:
        """The value that a query gives, or None; it is taken out of the query."""
        text = query.pop(self.name, None)
        return None if text is None else self.parse(text, self.pointer)


class Pairs(Parameter[tuple[tuple[str, str], ...]]):
    """Query parameters `name[key]=value`, PAIRS_MAX of them at most (OpenAPI's `deepObject`)."""

    def taken(self, query: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """The pairs of keys and values, in the order of the query."""
        start = f"{self.name}["
        names = [name for name in query if name.startswith(start) and name.endswith("]")]
        if len(names) > PAIRS_MAX:
            raise invalid(self.pointer, f"must be at most {PAIRS_MAX} pairs")
        pairs = tuple((name[len(start) : -1], query.pop(name)) for name in names)
        if any("][" in key for key, _ in pairs):
            raise invalid(self.pointer, f"must be written {self.name}[key]=value")
        if any("\0" in text for pair in pairs for text in pair):
            raise invalid(self.pointer, "must not contain NUL")
        return pairs


class Given:
    """The values that a request gives for the parameters of its operation."""

    __slots__ = ("_sent",)

    def __init__(self, sent: Mapping[Parameter[Any], Any]) -> None:
        self._sent = sent

    def __getitem__(self, parameter: Parameter[T]) -> T:
        """A parameter's value, or its default."""
        value: T = self._sent.get(parameter, parameter.default)
        return value

    def get(self, parameter: Parameter[T]) -> T | None:
        """A parameter's value where the request gives one, else None, whatever the default is."""
        return self._sent.get(parameter)


def read(
    parameters: Iterable[Parameter[Any]], request: web.Request, *, ignores_unknown: bool = False
) -> Given:
    """Read all parameters of a request, in the order of their declaration.

    Raises: BadRequest, InvalidRequest, also for query parameters that are not declared unless it `ignores_unknown`.
    """
    query = _query(request) if request.query_string else None
    sent: dict[Parameter[Any], Any] = {}
    value: Any
    headers = request.headers
    for parameter in parameters:
        place, name = parameter.place, parameter.name
        if place == "query":
            value = None if query is None else parameter.taken(query)
        elif place == "path":
            value = parameter.parse(request.match_info[name], parameter.pointer)
        elif name in headers:
            value = parameter.parse(_header(request, name), parameter.pointer)
        else:
            value = None
        if value is not None:
            sent[parameter] = value
    if query and not ignores_unknown:
        name = next(iter(query))
        raise invalid(f"/query/{name[:_SHOWN_MAX]}", "is not a parameter of this route")
    return Given(sent)


def _query(request: web.Request) -> dict[str, str]:
    """The query's parameters by name. Raises: BadRequest for one that is repeated or not UTF-8."""
    found: dict[str, str] = {}
    for name, value in request.query.items():
        try:
            (name + value).encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the query is not UTF-8") from error
        if name in found:
            raise BadRequest(f"the query parameter {name[:_SHOWN_MAX]} is repeated")
        found[name] = value
    return found


def _header(request: web.Request, name: str) -> str:
    """A given header's value. Raises: BadRequest for one that is repeated or not UTF-8."""
    values = request.headers.getall(name)
    if len(values) > 1:
        raise BadRequest(f"the header {name} is repeated")
    try:
        values[0].encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the header {name} is not UTF-8") from error
    return values[0]


def int64(low: int, high: int = ID_MAX) -> dict[str, Any]:
    """The schema of an integer between two bounds."""
    return {"type": "integer", "format": "int64", "minimum": low, "maximum": high}


def path_id(name: str, description: str) -> Parameter[int]:
    """A ledger's or an entry's id in the path."""
    return Parameter(name, "path", integer, int64(0), description, 0, example=1)


def path_text(
    name: str, pattern: str, description: str, example: str | None = None
) -> Parameter[str]:
    """A text of the path that a pattern describes whole."""
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return Parameter(name, "path", _matching(pattern), schema, description, "", example=example)


@overload
def query_integer(name: str, low: int, high: int, description: str) -> Parameter[int | None]: ...
@overload
def query_integer(
    name: str, low: int, high: int, description: str, default: int
) -> Parameter[int]: ...
def query_integer(
    name: str, low: int, high: int, description: str, default: int | None = None
) -> Parameter[Any]:
    """An integer in the query."""
    schema = _with_default(int64(low, high), default)
    return Parameter(name, "query", _between(low, high), schema, description, default)


def query_text(name: str, pattern: str, description: str) -> Parameter[str | None]:
    """A text in the query that a pattern describes whole."""
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return Parameter(name, "query", _matching(pattern), schema, description, None)


@overload
def query_choice(name: str, choices: Sequence[S], description: str) -> Parameter[S | None]: ...
@overload
def query_choice(name: str, choices: Sequence[S], description: str, default: S) -> Parameter[S]: ...
def query_choice(
    name: str, choices: Sequence[S], description: str, default: S | None = None
) -> Parameter[Any]:
    """One of a few words in the query."""
    by_text = {str(choice): choice for choice in choices}

    def parse(text: str, pointer: str) -> S:
        if text not in by_text:
            raise invalid(pointer, f"must be one of {', '.join(by_text)}")
        return by_text[text]

    schema = _with_default({"enum": list(by_text)}, default)
    return Parameter(name, "query", parse, schema, description, default)


def query_pairs(name: str, description: str) -> Pairs:
    """A few of `name[key]=value`."""
    schema = {
        "type": "object",
        "maxProperties": PAIRS_MAX,
        "additionalProperties": {"type": "string", "pattern": "^[^\\x00]*$"},
    }
    return Pairs(name, "query", lambda _text, _at: (), schema, description, (), style="deepObject")


def header_integer(name: str, description: str) -> Parameter[int | None]:
    """An integer in a header."""
    return Parameter(name, "header", integer, int64(0), description, None)


def header_text(name: str, description: str, *, chars_max: int) -> Parameter[str | None]:
    """A header of any characters."""

    def parse(text: str, pointer: str) -> str:
        if len(text) > chars_max:
            raise invalid(pointer, f"must have at most {chars_max} characters")
        return text

    schema = {"type": "string", "maxLength": chars_max}
    return Parameter(name, "header", parse, schema, description, None)


def header_version(description: str) -> Parameter[int | None]:
    """`If-Match` with one version, as the `ETag` of a row says it."""
    schema = {"type": "string", "pattern": f"^{_VERSION}$"}
    return Parameter("If-Match", "header", _version, schema, description, None)


def _version(text: str, pointer: str) -> int:
    if not (found := re.fullmatch(_VERSION, text)):
        raise invalid(pointer, 'must be one version in quotes, like "3"')
    return int(found.group(1))


def _between(low: int, high: int) -> Parse[int]:
    return lambda text, pointer: integer(text, pointer, low, high)


def _matching(pattern: str) -> Parse[str]:
    return lambda text, pointer: matching(text, pointer, pattern)


def _with_default(schema: dict[str, Any], default: Any) -> dict[str, Any]:
    return schema if default is None else schema | {"default": default}
