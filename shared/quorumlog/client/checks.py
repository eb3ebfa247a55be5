"""Checks of arguments. A call with an invalid argument raises before anything is queued or sent."""

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import orjson

from quorumlog.errors import ClientClosed

T = TypeVar("T")


def check_process(pid: int) -> None:
    """Raise ClientClosed unless process `pid`, which opened the client, is the current process. A
    forked child has copies of the client's locks and connections, but no thread that uses them.
    """
    if os.getpid() != pid:
        raise ClientClosed(
            "the client was opened before this process was forked: open a new client"
        )


def text(name: str, value: object) -> str:
    """Return `value` if it is a str that UTF-8 can encode. All checks raise TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid Unicode text: {value!r}") from None
    return value


def token(value: object) -> str:
    """Return `value` if it is a valid access token. No error message contains the token."""
    if not isinstance(value, str):
        raise TypeError(f"token must be a str, not {type(value).__name__}")
    if not value.isascii() or not value.isprintable() or " " in value or not value:
        raise ValueError("token must be non-empty ASCII without spaces or line breaks")
    return value


def octets(name: str, value: object) -> bytes:
    """Return `value` if it is bytes. Other types could change while they wait to be sent."""
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
    return value


def whole(name: str, value: object) -> int:
    """Return `value` if it is an int and not a bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    return value


def offset(name: str, value: object) -> int:
    """Return `value` if it is an int from 0 to 2**63 - 1, as entry ids, offsets and counts are."""
    if not 0 <= whole(name, value) < 1 << 63:
        raise ValueError(f"{name} must be between 0 and 2**63 - 1, not {whole(name, value):.4g}")
    return whole(name, value)


def maybe_offset(name: str, value: object) -> int | None:
    """Like `offset`, but None is allowed too."""
    return None if value is None else offset(name, value)


def maybe_text(name: str, value: object) -> str | None:
    """Like `text`, but None is allowed too."""
    return None if value is None else text(name, value)


def conditions(headers: object) -> dict[str, str]:
    """Return conditions on headers (a mapping of str to str, or None) as query parameters."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of str to str, not {type(headers).__name__}")
    return {f"header[{text('a name', n)}]": text("a value", v) for n, v in headers.items()}


def seconds(name: str, value: object) -> float:
    """Return `value` if it is a number of seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be above 0, not {value}")
    return value


def texts(name: str, values: object) -> Mapping[str, str]:
    """Return `values` if it is a mapping of str to str."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a mapping of str to str, not {type(values).__name__}")
    for key, value in values.items():
        text(f"a name in {name}", key)
        text(f"{name}[{key!r}]", value)
    return values


def several(name: str, values: Sequence[T]) -> Sequence[T]:
    """Return `values` if it is a sequence, but not a single str or bytes object."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list, not {type(values).__name__}")
    return values


def names(name: str, values: Sequence[str]) -> Sequence[str]:
    """Return `values` as a list if it is a sequence of str."""
    return [text(f"each of {name}", value) for value in several(name, values)]


def json_of(fields: Mapping[str, object]) -> bytes:
    """Encode the body of a request as JSON, without the fields that are None."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return orjson.dumps(given)
    except TypeError:
        for name, value in given.items():
            try:
                orjson.dumps(value)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
        raise


def header_value(name: str, value: object) -> str:
    """Return `value` if it is a str that an HTTP header may contain."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text(name, value)):
        raise ValueError(f"{name} is sent in a header: remove control characters")
    return text(name, value)


def gateway_url(value: object) -> str:
    """Return the URL of a gateway without a slash at the end, if it is valid."""
    given = text("the URL of a gateway", value).strip()
    if not _is_gateway_url(given):
        raise ValueError(f"{given!r} is not a gateway URL: use http://host:port")
    return given.rstrip("/")


def _is_gateway_url(given: str) -> bool:
    try:
        parts = urlsplit(given)
        has_port = parts.port != 0
    except ValueError:
        return False
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_http and has_port and not parts.query and not parts.fragment
