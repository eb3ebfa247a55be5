"""The bodies of an append as payloads, and payloads in the JSON form that a reader asks for: base64, text or JSON.

The edge's hot path. No pydantic here: one pass over orjson's values, and one count of quotes for the whole body. One record
must not stop the readers of many: a payload that is no text, or no JSON, is given as base64 in a member of its own.
"""

import re
import struct
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NamedTuple

import orjson
import pybase64

from quorumlog.errors import BadRequest, InvalidRequest, TooLarge
from quorumlog.net.parameters import escaped, invalid
from quorumlog.wire import strict
from quorumlog.wire.strict import DEPTH_MAX, check_marks
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX

FORMS: Final = ("data", "text", "json")
_LAST_CANONICAL: Final = (frozenset("AEIMQUYcgkosw048"), frozenset("AQgw"))
"""The letters before one and before two `=` in canonical base64: other letters have bits that are lost."""
_CANONICAL_ENDS: Final = re.compile("(?:[^=]{4}|[^=]{2}[AEIMQUYcgkosw048]=|[^=][AQgw]==)*")
"""The last four letters of each of several texts."""

_SIZE: Final = struct.Struct(">I")
_HEADER_BYTES_MAX: Final = 65_535
_HEADERS_MAX: Final = 1_000

_BATCH_BYTES: Final = len(b'{"entries":[]}') - 1
_ENTRY_BYTES: Final = len(b'{"data":""},')
"""Of JSON as short as it can be, without the text of `data`; the last entry has no comma."""


class Item(NamedTuple):
    """What a batch consists of, as requests and errors name one and several of them."""

    one: str
    many: str


ENTRIES: Final = Item("entry", "entries")
RECORDS: Final = Item("record", "records")


def from_json(data: bytes, entry_bytes_max: int) -> tuple[list[bytes], bool]:
    """The payloads of a JSON body, and whether it was a batch."""
    return strict.kept(data, lambda body: _payloads(data, body, entry_bytes_max))


def batch_of(body: Any, item: Item = ENTRIES) -> list[Any] | None:
    """The items of a JSON body; None if the body is one item by itself."""
    if type(body) is not dict:
        raise invalid("", "must be a JSON object")
    if item.many not in body:
        return None
    items = body[item.many]
    if len(body) > 1:
        raise _unknown(body, (item.many,), "")
    if type(items) is not list:
        raise invalid(f"/{item.many}", "must be a list")
    check_count(len(items), item)
    return items


def _payloads(data: bytes, body: Any, entry_bytes_max: int) -> tuple[list[bytes], bool]:
    entries = batch_of(body)
    if entries is None:
        return [_one_payload(data, body, "", entry_bytes_max)], False
    alike = _alike(data, entries, entry_bytes_max)
    if alike is not None:
        return alike, True
    payloads, total = [], 1
    for index, entry in enumerate(entries):
        payload, strings = _payload(entry, f"/entries/{index}", entry_bytes_max)
        payloads.append(payload)
        total += strings
    strict.check_strings(data, total)
    return payloads, True


def _alike(data: bytes, entries: list[Any], entry_bytes_max: int) -> list[bytes] | None:
    """The payloads of a batch whose entries are all `{"data":…}` and valid, without a Python call per
    entry, which halves the cost of such a batch. None for any other batch, whose entries are parsed one by
    one: then errors say what is wrong, and where. Raises: BadRequest for a body with two equal keys.
    """
    try:
        texts = [entry["data"] for entry in entries]
        if set(map(type, entries)) != {dict} or set(map(len, entries)) != {1}:
            return None
        if set(map(type, texts)) != {str}:
            return None
        payloads = list(map(pybase64.b64decode, texts, repeat(None), repeat(True)))
    except (KeyError, TypeError, IndexError, ValueError):
        return None
    if any(size % 4 for size in set(map(len, texts))):
        return None
    if not _CANONICAL_ENDS.fullmatch("".join([text[-4:] for text in texts])):
        return None
    if max(map(len, payloads)) > entry_bytes_max:
        return None
    # The shortest text of these entries has no room for another key, and need not be searched for one.
    if len(data) != _BATCH_BYTES + len(entries) * _ENTRY_BYTES + sum(map(len, texts)):
        strict.check_strings(data, 1 + 2 * len(entries))
    return payloads


def from_line(line: bytes, number: int, entry_bytes_max: int) -> bytes:
    """The payload of one line of NDJSON; its errors point to /lines/<number>."""
    pointer = f"/lines/{number}"
    try:
        return strict.kept(line, lambda entry: _one_payload(line, entry, pointer, entry_bytes_max))
    except BadRequest as error:
        raise BadRequest(f"{pointer}: {error.detail}") from error


def _one_payload(data: bytes, entry: Any, pointer: str, entry_bytes_max: int) -> bytes:
    payload, strings = _payload(entry, pointer, entry_bytes_max)
    strict.check_strings(data, strings)
    return payload


def _payload(entry: Any, pointer: str, entry_bytes_max: int) -> tuple[bytes, int]:
    """The payload of one entry, and how many strings its JSON has."""
    if type(entry) is not dict:
        raise invalid(pointer, "must be an object with data, text or json")
    if len(entry) != 1:
        raise _unknown(entry, FORMS, pointer)
    ((form, value),) = entry.items()
    if form not in FORMS:
        raise _unknown(entry, FORMS, pointer)
    payload = value_of(form, value, f"{pointer}/{form}")
    strings = 1 + strict.count_strings(value) if form == "json" else 2
    if len(payload) > entry_bytes_max:
        raise too_large(len(payload), entry_bytes_max, pointer)
    return payload, strings


def value_of(form: str, value: object, pointer: str) -> bytes:
    """The bytes that one of the FORMS stands for."""
    if form == "data":
        return base64_of(value, pointer)
    if form == "json":
        return orjson.dumps(value)
    if type(value) is not str:
        raise invalid(pointer, "must be a string")
    return value.encode()


def base64_of(value: object, pointer: str) -> bytes:
    """The bytes of canonical base64 (RFC 4648, 4)."""
    if type(value) is not str:
        raise invalid(pointer, "must be a string of base64")
    padding = 0 if not value.endswith("=") else 2 if value.endswith("==") else 1
    try:
        payload: bytes = pybase64.b64decode(value, validate=True)
    except ValueError as error:
        raise invalid(pointer, f"is not base64: {error}") from error
    if len(value) % 4 or len(payload) != len(value) // 4 * 3 - padding:
        raise invalid(pointer, "is not base64")
    if padding and value[-padding - 1] not in _LAST_CANONICAL[padding - 1]:
        raise invalid(pointer, "is not canonical base64: its last letter has bits to spare")
    return payload


def _unknown(entry: dict[str, Any], known: tuple[str, ...], pointer: str) -> InvalidRequest:
    """The error for an object that is not exactly one of the known forms."""
    for name in entry:
        if name not in known:
            return invalid(f"{pointer}/{escaped(name)}", "is not a field of this request")
    return invalid(pointer, f"must have exactly one of {', '.join(known)}")


def headers_of(value: object, pointer: str) -> tuple[tuple[str, str], ...]:
    """The headers of one record."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid(pointer, "must be an object of strings")
    if len(value) > _HEADERS_MAX:
        raise invalid(pointer, f"must have at most {_HEADERS_MAX} members")
    for name, text in value.items():
        where = f"{pointer}/{escaped(name)}"
        if not isinstance(text, str):
            raise invalid(where, "must be a string")
        if max(len(name.encode()), len(text.encode())) > _HEADER_BYTES_MAX:
            raise invalid(where, f"has more than {_HEADER_BYTES_MAX} bytes")
    return tuple(value.items())


def too_large(size: int, bytes_max: int, pointer: str, item: Item = ENTRIES) -> TooLarge:
    """The error for one item that is too large."""
    where = f" at {pointer}" if pointer else ""
    return TooLarge(f"the {item.one}{where} has {size} bytes; the limit is {bytes_max}")


def check_count(count: int, item: Item = ENTRIES) -> None:
    """Raise InvalidRequest for an empty batch, and TooLarge for one of too many items."""
    if count == 0:
        raise invalid(f"/{item.many}", f"must have at least one {item.one}")
    if count > BATCH_ENTRIES_MAX:
        raise TooLarge(f"a batch of more than {BATCH_ENTRIES_MAX} {item.many}")


def from_frames(data: bytes, entry_bytes_max: int, item: Item = ENTRIES) -> list[bytes]:
    """The payloads of a body of (u32 length, payload), repeated."""
    alike = _of_one_size(data, entry_bytes_max)
    if alike is not None:
        return alike
    payloads: list[bytes] = []
    size_at, add = _SIZE.unpack_from, payloads.append
    stop, end = 0, len(data)
    for index in range(BATCH_ENTRIES_MAX + 1):
        if stop == end:
            break
        try:
            (size,) = size_at(data, stop)
        except struct.error:
            raise BadRequest(
                f"the frames are cut short: {end - stop} bytes at {stop} are too few for a length"
            ) from None
        start = stop + 4
        stop = start + size
        if size > entry_bytes_max:
            raise too_large(size, entry_bytes_max, f"/{item.many}/{index}", item)
        if stop > end:
            raise BadRequest(
                f"the frames are cut short: {size} bytes at {start}, {end - start} are there"
            )
        add(data[start:stop])
    else:
        raise TooLarge(f"a batch of more than {BATCH_ENTRIES_MAX} {item.many}")
    check_count(len(payloads), item)
    return payloads


def _of_one_size(data: bytes, entry_bytes_max: int) -> list[bytes] | None:
    """The payloads of frames that have one length, cut by one call, which takes a third of the time. None for any
    other frames, which are cut one by one: then errors say what is wrong, and where.
    """
    if len(data) < 2 * _SIZE.size:
        return None
    (size,) = _SIZE.unpack_from(data)
    step = _SIZE.size + size
    count, rest = divmod(len(data), step)
    if rest or size > entry_bytes_max or not 1 < count <= BATCH_ENTRIES_MAX:
        return None
    if any(data[at::step] != data[at : at + 1] * count for at in range(_SIZE.size)):
        return None
    return list(_cutter(size, count).unpack(data))


@lru_cache(maxsize=16)
def _cutter(size: int, count: int) -> struct.Struct:
    return struct.Struct(f"{_SIZE.size}x{size}s" * count)


_AROUND: Final = 254 - DEPTH_MAX
"""So many lists around a value make orjson refuse a value that nests deeper than DEPTH_MAX: orjson's own limit is
254 (a test holds it to that). Quicker than any walk in Python."""
_ON_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


def encoded(payload: bytes | memoryview, encoding: str) -> bytes:
    """A payload as a JSON member: `"data":"…"`, `"text":"…"` or `"json":…`; `"data_base64":"…"` if the payload
    is not readable in this encoding.
    """
    if encoding == "base64":
        return b'"data":"%b"' % pybase64.b64encode(payload)
    if encoding == "text":
        text = _text(payload)
        if text is not None:
            return b'"text":' + text
    elif _is_json(data := bytes(payload)):
        # As stored, so that no number changes, but on one line, since some forms are made of lines. JSON has
        # line ends between its tokens only.
        has_lines = b"\n" in data or b"\r" in data
        return b'"json":' + (data.translate(_ON_ONE_LINE) if has_lines else data)
    return b'"data_base64":"%b"' % pybase64.b64encode(payload)


def encoded_key(key: bytes | None, encoding: str) -> bytes:
    """A key as JSON members: base64 for `base64`, else text, or `key_base64` if the key is no text."""
    if key is None:
        return b'"key":null'
    if encoding == "base64":
        return b'"key":"%b"' % pybase64.b64encode(key)
    text = _text(key)
    if text is None:
        return b'"key":null,"key_base64":"%b"' % pybase64.b64encode(key)
    return b'"key":' + text


def _text(data: bytes | memoryview) -> bytes | None:
    """Bytes as a JSON string; None unless they are UTF-8."""
    try:
        return orjson.dumps(str(data, "utf-8"))
    except UnicodeDecodeError:
        return None


def _is_json(data: bytes) -> bool:
    """Whether a payload is JSON that parsers accept within a page too: it has no more values, and nests no deeper, than a
    request may.
    """
    try:
        check_marks(data)
        value = orjson.loads(data)
        if len(data) > 2 * DEPTH_MAX and data.count(b"[") + data.count(b"{") > DEPTH_MAX:
            for _ in range(_AROUND):
                value = [value]
            orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, TooLarge):
        return False
    return True
