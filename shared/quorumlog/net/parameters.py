"""Parameters of requests. One declaration contains a parameter's name, bounds, parser and description.

A handler reads a value by the declaration (`given[LIMIT]`). The same declaration rejects invalid values and appears
in the OpenAPI document, so the three can't differ. Each value has one spelling. A text that is not a number gets a 400;
a number that is not allowed gets a 422 (docs/reference/http.md). Undeclared and repeated query parameters are rejected.
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
"""A function that parses a parameter's text; its second argument is the pointer for errors."""

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_POINTER_CHARS_MAX: Final = 300
_DETAIL_CHARS_MAX: Final = 500
"""Maximum length of a pointer and of a detail, so that no error repeats a client's megabytes
(chosen by judgement)."""
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:)([0-5]\d|60)((?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))",
    re.ASCII | re.IGNORECASE,
)
_VERSION: Final = r'"([1-9][0-9]{0,18})"'
_SHOWN_MAX: Final = 100
PAIRS_MAX: Final = 8
"""Maximum number of pairs: each is a join, which doubles the planner's time (measured)."""


def invalid(pointer: str, detail: str) -> InvalidRequest:
    """The error 422 for a JSON pointer into the body, or for /query/…, /header/… or /path/…."""
    pointer, detail = pointer[:_POINTER_CHARS_MAX], detail[:_DETAIL_CHARS_MAX]
    where = pointer or "the body"
    return InvalidRequest(f"{where}: {detail}", errors=[{"pointer": pointer, "detail": detail}])


def escaped(name: str) -> str:
    """A name as part of a JSON pointer (RFC 6901), cut to a length suitable for errors."""
    return name[:_SHOWN_MAX].replace("~", "~0").replace("/", "~1")


def integer(text: str, pointer: str, low: int = 0, high: int = ID_MAX) -> int:
    """Parse a decimal integer in its shortest form, from `low` to `high` inclusive."""
    # Fast path for the common case of few ASCII digits without a leading zero.
    if len(text) < 19 and text.isascii() and text.isdecimal() and (text[0] != "0" or text == "0"):
        value = int(text)
        if low <= value <= high:
            return value
    if not _INTEGER.fullmatch(text) or text == "-0":
        shown = ascii(text[:_SHOWN_MAX])
        raise BadRequest(f"{pointer}: must be a plain decimal integer (got {shown})")
    if len(text) > 20 or not low <= (value := int(text)) <= high:
        raise invalid(pointer, f"must be an integer from {low} to {high}")
    return value


def time_of(text: str) -> datetime:
    """Parse an RFC 3339 time, and return it in UTC. A leap second, allowed only in the last minute
    of a month (UTC), becomes the second after it, as in POSIX. Raises: ValueError.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError("must be an RFC 3339 time, such as 2026-01-02T03:04:05Z")
    is_leap = found[2] == "60"
    try:
        at = datetime.fromisoformat(
            f"{found[1]}{'59' if is_leap else found[2]}{found[3]}".upper()
        ).astimezone(UTC)
        if is_leap:
            at = at.replace(microsecond=0) + timedelta(seconds=1)
    except OverflowError as error:
        raise ValueError("must be in the years 1 to 9999") from error
    if is_leap and (at.day, at.hour, at.minute) != (1, 0, 0):
        raise ValueError("may have the second 60 only in a month's last minute (UTC)")
    return at


def matching(text: str, pointer: str, pattern: str) -> str:
    """Return `text` if the whole of it matches `pattern`. Raises: InvalidRequest."""
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
    """The value if a request lacks the parameter; path parameters are never missing."""
    example: Any = None
    style: str | None = None
    pointer: str = field(init=False)
    """The pointer in errors, such as `/query/limit`."""

    def __post_init__(self) -> None:
        # Build the pointer once, not for each request.
        object.__setattr__(self, "pointer", f"/{self.place}/{self.name}")

    def taken(self, query: dict[str, str]) -> T | None:
        """Remove the parameter from `query`; return its parsed value, or None if it was missing."""
        text = query.pop(self.name, None)
        return None if text is None else self.parse(text, self.pointer)


class Pairs(Parameter[tuple[tuple[str, str], ...]]):
    """At most PAIRS_MAX query parameters `name[key]=value` (OpenAPI's `deepObject`)."""

    def taken(self, query: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """Remove the pairs of keys and values from `query`, and return them in the same order."""
        start = f"{self.name}["
        names = [name for name in query if name.startswith(start) and name.endswith("]")]
        if len(names) > PAIRS_MAX:
            raise invalid(self.pointer, f"must have at most {PAIRS_MAX} pairs (got {len(names)})")
        pairs = tuple((name[len(start) : -1], query.pop(name)) for name in names)
        if any("][" in key for key, _ in pairs):
            raise invalid(self.pointer, f"must have the form {self.name}[key]=value")
        if any("\0" in text for pair in pairs for text in pair):
            raise invalid(self.pointer, "must not contain NUL")
        return pairs


class Given:
    """The values of an operation's parameters in one request."""

    __slots__ = ("_sent",)

    def __init__(self, sent: Mapping[Parameter[Any], Any]) -> None:
        self._sent = sent

    def __getitem__(self, parameter: Parameter[T]) -> T:
        """A parameter's value, or its default."""
        value: T = self._sent.get(parameter, parameter.default)
        return value

    def get(self, parameter: Parameter[T]) -> T | None:
        """A parameter's value, or None if the request lacks it, even if there is a default."""
        return self._sent.get(parameter)


def read(
    parameters: Iterable[Parameter[Any]], request: web.Request, *, ignores_unknown: bool = False
) -> Given:
    """Read all parameters of a request, in the order of their declaration.

    Raises: BadRequest, InvalidRequest (also for undeclared query parameters, unless
    `ignores_unknown`).
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
        raise invalid(f"/query/{name[:_SHOWN_MAX]}", "is not a parameter of this route: remove it")
    return Given(sent)


def _query(request: web.Request) -> dict[str, str]:
    """The query's parameters by name. Raises: BadRequest if a parameter is repeated or not UTF-8."""
    found: dict[str, str] = {}
    for name, value in request.query.items():
        try:
            (name + value).encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the query must be UTF-8") from error
        if name in found:
            raise BadRequest(f"the query parameter {name[:_SHOWN_MAX]} is repeated: send it once")
        found[name] = value
    return found


def _header(request: web.Request, name: str) -> str:
    """The value of a header that is present. Raises: BadRequest if the header is repeated or not UTF-8."""
    values = request.headers.getall(name)
    if len(values) > 1:
        raise BadRequest(f"the header {name} is repeated: send it once")
    try:
        values[0].encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the header {name} must be UTF-8") from error
    return values[0]


def int64(low: int, high: int = ID_MAX) -> dict[str, Any]:
    """The schema of an integer between two bounds."""
    return {"type": "integer", "format": "int64", "minimum": low, "maximum": high}


def path_id(name: str, description: str) -> Parameter[int]:
    """A path parameter that is the id of a ledger or an entry."""
    return Parameter(name, "path", integer, int64(0), description, 0, example=1)


def path_text(
    name: str, pattern: str, description: str, example: str | None = None
) -> Parameter[str]:
    """A path parameter whose whole text must match `pattern`."""
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
    """A query parameter that is an integer from `low` to `high`."""
    schema = _with_default(int64(low, high), default)
    return Parameter(name, "query", _between(low, high), schema, description, default)


def query_text(name: str, pattern: str, description: str) -> Parameter[str | None]:
    """A query parameter whose whole text must match `pattern`."""
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return Parameter(name, "query", _matching(pattern), schema, description, None)


@overload
def query_choice(name: str, choices: Sequence[S], description: str) -> Parameter[S | None]: ...
@overload
def query_choice(name: str, choices: Sequence[S], description: str, default: S) -> Parameter[S]: ...
def query_choice(
    name: str, choices: Sequence[S], description: str, default: S | None = None
) -> Parameter[Any]:
    """A query parameter whose value is one of `choices`."""
    by_text = {str(choice): choice for choice in choices}

    def parse(text: str, pointer: str) -> S:
        if text not in by_text:
            raise invalid(pointer, f"must be one of {', '.join(by_text)}")
        return by_text[text]

    schema = _with_default({"enum": list(by_text)}, default)
    return Parameter(name, "query", parse, schema, description, default)


def query_pairs(name: str, description: str) -> Pairs:
    """Query parameters of the form `name[key]=value`."""
    schema = {
        "type": "object",
        "maxProperties": PAIRS_MAX,
        "additionalProperties": {"type": "string", "pattern": "^[^\\x00]*$"},
    }
    return Pairs(name, "query", lambda _text, _at: (), schema, description, (), style="deepObject")


def header_integer(name: str, description: str) -> Parameter[int | None]:
    """A header parameter that is an integer."""
    return Parameter(name, "header", integer, int64(0), description, None)


def header_text(name: str, description: str, *, chars_max: int) -> Parameter[str | None]:
    """A header parameter of at most `chars_max` characters of any kind."""

    def parse(text: str, pointer: str) -> str:
        if len(text) > chars_max:
            raise invalid(pointer, f"must have at most {chars_max} characters")
        return text

    schema = {"type": "string", "maxLength": chars_max}
    return Parameter(name, "header", parse, schema, description, None)


def header_version(description: str) -> Parameter[int | None]:
    """The header `If-Match` with one version, in the form of metadata's `ETag`."""
    schema = {"type": "string", "pattern": f"^{_VERSION}$"}
    return Parameter("If-Match", "header", _version, schema, description, None)


def header_star(description: str) -> Parameter[bool]:
    """The header `If-None-Match`, whose only allowed value is `*`."""
    schema = {"enum": ["*"]}
    return Parameter("If-None-Match", "header", _star, schema, description, default=False)


def _star(text: str, pointer: str) -> bool:
    if text != "*":
        raise invalid(pointer, "must be *")
    return True


def _version(text: str, pointer: str) -> int:
    if not (found := re.fullmatch(_VERSION, text)):
        raise invalid(pointer, 'must be one version in quotes, such as "3"')
    return int(found.group(1))


def _between(low: int, high: int) -> Parse[int]:
    return lambda text, pointer: integer(text, pointer, low, high)


def _matching(pattern: str) -> Parse[str]:
    return lambda text, pointer: matching(text, pointer, pattern)


def _with_default(schema: dict[str, Any], default: Any) -> dict[str, Any]:
    return schema if default is None else schema | {"default": default}
