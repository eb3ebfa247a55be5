"""Annotations that bound the fields of values which processes exchange and store.

A value's JSON has one member for each field. Pydantic calls `__get_pydantic_core_schema__` of
annotations and classes, which return plain dicts. So this module need not import pydantic.
"""

import base64
import binascii
from typing import Annotated, Any, ClassVar

from quorumlog.protocol.ids import ID_MAX, NO_ENTRY

BOOKIE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Pattern of a bookie's name, which is part of members, URLs and file names."""

MEMBER = rf"{BOOKIE_NAME}@(0|[1-9][0-9]{{0,17}})"
MEMBER_OR_NAME = rf"{BOOKIE_NAME}(@(0|[1-9][0-9]{{0,17}}))?"

LOG_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""Pattern of a log's name (docs/reference/http.md, Bounds)."""

ATTEMPT = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


class Bounds:
    """Bounds of numbers, texts and lists, with pydantic's names: `ge`, `le`, `pattern`, …"""

    def __init__(self, **bounds: object) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The pydantic schema of the annotated type with these bounds."""
        return handler(source) | self._bounds


class AsBase64:
    """Marks bytes that JSON represents as canonical base64."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The pydantic schema of bytes whose JSON is text."""
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": _bytes_of},
            "schema": handler(source),
            "serialization": {
                "type": "function-plain",
                "function": _base64_of,
                "when_used": "json",
            },
        }

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, str]:
        """The JSON schema of a base64 text."""
        return {"type": "string", "contentEncoding": "base64"}


class AsObject:
    """Marks sorted pairs of texts that JSON represents as an object."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: Any) -> Any:
        """The pydantic schema of pairs that are parsed from an object, and sorted."""
        pairs = {"type": "no-info", "function": lambda texts: tuple(sorted(texts.items()))}
        return {
            "type": "function-after",
            "function": pairs,
            "schema": handler.generate_schema(dict[Text, Text]),
            "serialization": {"type": "function-plain", "function": dict},
        }


LedgerId = Annotated[int, Bounds(ge=0, le=ID_MAX)]
EntryId = Annotated[int, Bounds(ge=0, le=ID_MAX)]
Number = Annotated[int, Bounds(ge=0, le=ID_MAX)]
"""An offset or another non-negative number."""
IdOrNone = Annotated[int, Bounds(ge=NO_ENTRY, le=ID_MAX)]
"""The id of an entry or a ledger, or -1 if there is none."""
Version = Annotated[int, Bounds(ge=1, le=ID_MAX)]
Text = Annotated[str, Bounds(pattern="^[^\\x00]*$", max_length=65_536)]
"""Text without NUL, the one character that Postgres can't store."""
Key = Annotated[bytes, AsBase64()]
Member = Annotated[str, Bounds(pattern=rf"^{MEMBER}$", max_length=128)]
BookieName = Annotated[str, Bounds(pattern=rf"^{BOOKIE_NAME}$")]
LogName = Annotated[str, Bounds(pattern=rf"^{LOG_NAME}$")]
Attempt = Annotated[str, Bounds(pattern=rf"^{ATTEMPT}$")]
"""A random token that names one change; each retry of the change sends it again (rule 6)."""
AttemptOrNone = Annotated[str, Bounds(pattern=rf"^({ATTEMPT})?$")]
"""An attempt token; empty if the store keeps no tokens."""
Pairs = Annotated[tuple[tuple[str, str], ...], AsObject()]
"""Pairs of texts, sorted by their first texts, which are distinct."""


class Value:
    """Base of values parsed on their own: unknown members and a failed `check` are errors."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}

    def check(self) -> None:
        """Assert the value's invariants."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """The pydantic schema of the fields, followed by a call of `check`."""
        checked = {"type": "no-info", "function": _checked}
        return {"type": "function-after", "function": checked, "schema": handler(source)}


def _checked(value: Value) -> Value:
    value.check()
    return value


def _bytes_of(value: object) -> object:
    """Decode canonical base64; other types are left to pydantic, which rejects them."""
    if not isinstance(value, str):
        return value
    try:
        decoded = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("must be base64") from error
    if base64.b64encode(decoded).decode() != value:
        raise ValueError("must be canonical base64")
    return decoded


def _base64_of(value: bytes) -> str:
    return base64.b64encode(value).decode()
