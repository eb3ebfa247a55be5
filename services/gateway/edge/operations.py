"""How an operation is described: enough for the OpenAPI document, and no more.

Each resource's module pairs its operations with its handlers; routes and description come from
the same list, so neither can be without the other.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiohttp import web

from quorumlog.errors import (
    BadRequest,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    MetadataUnavailable,
    NotAcceptable,
    Overloaded,
    QuorumLogError,
    RequestTimeout,
    TooLarge,
    UnsupportedMediaType,
)
from quorumlog.protocol.ids import ID_MAX

Schema = type | dict[str, Any]
"""A pydantic type, or a JSON schema as it is."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Errors = tuple[type[QuorumLogError], ...]

ALWAYS: Final[Errors] = (
    BadRequest,
    InvalidRequest,
    Forbidden,
    RequestTimeout,
    HeadersTooLarge,
    Overloaded,
)
"""What any request may be answered with."""

ANSWERING: Final[Errors] = (NotAcceptable,)
WITH_BODY: Final[Errors] = (TooLarge, UnsupportedMediaType)
WITH_METADATA: Final[Errors] = (MetadataUnavailable,)

BYTES: Final[dict[str, Any]] = {"type": "string", "format": "binary"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the path, the query or the headers."""

    name: str
    place: Literal["path", "query", "header"]
    schema: dict[str, Any]
    description: str
    example: Any = None
    style: str | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """A body of one media type."""

    schema: Schema
    examples: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its media types and its headers."""

    description: str
    content: Mapping[str, Content] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Mapping[str, Content] = field(default_factory=dict)
    """Where there is one, no body at all equals `{}`."""
    answers: Mapping[int, Answer] = field(default_factory=dict)
    errors: Errors = ()
    needs_body: bool = False


Route = tuple[Operation, Handler]


def int64(low: int, high: int = ID_MAX) -> dict[str, Any]:
    """The schema of an integer between two bounds."""
    return {"type": "integer", "format": "int64", "minimum": low, "maximum": high}


def path_id(name: str, description: str) -> Parameter:
    """An id in the path."""
    return Parameter(name, "path", int64(0), description, example=1)


def query_integer(
    name: str, low: int, high: int, description: str, default: int | None = None
) -> Parameter:
    """An integer in the query."""
    schema = int64(low, high)
    if default is not None:
        schema["default"] = default
    return Parameter(name, "query", schema, description)


LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
PASSWORD: Final = Parameter(
    "Ledger-Password",
    "header",
    {"type": "string", "maxLength": 1024},
    "The ledger's password, where it has one.",
)
"""Header values can't hold every character: a password that must travel should be printable."""
