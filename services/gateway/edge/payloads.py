"""Parse the payloads of append bodies, and encode payloads for readers as base64, text or JSON.

This module is the edge's hot path. It avoids pydantic, iterates over orjson's values once, and
counts quotes once. Payloads that aren't valid text or JSON must not stop readers, so readers get
these payloads as `data_base64`.
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
from quorumlog.protocol.batch import BATCH_BYTES_MAX
from quorumlog.wire import strict
from quorumlog.wire.strict import DEPTH_MAX, check_marks
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX

FORMS: Final = ("data", "text", "json")
_LAST_CANONICAL: Final = (frozenset("AEIMQUYcgkosw048"), frozenset("AQgw"))
"""Letters allowed before `=` and `==` in canonical base64, because their unused bits are 0."""
_CANONICAL_ENDS: Final = re.compile("(?:[^=]{4}|[^=]{2}[AEIMQUYcgkosw048]=|[^=][AQgw]==)*")
"""Matches the concatenated last four letters of several base64 texts, if all are canonical."""

_SIZE: Final = struct.Struct(">I")
_HEADER_BYTES_MAX: Final = 65_535
_HEADERS_MAX: Final = 1_000

_BATCH_BYTES: Final = len(b'{"entries":[]}') - 1
_ENTRY_BYTES: Final = len(b'{"data":""},')
"""Minimum bytes of an entry in JSON, apart from the text of `data`. Includes the comma."""


class Item(NamedTuple):
    """The singular and plural words for the items of a batch in requests and errors."""

    one: str
    many: str


ENTRIES: Final = Item("entry", "entries")
RECORDS: Final = Item("record", "records")


def from_json(
    data: bytes, entry_bytes_max: int, *, count: int | None = None
) -> tuple[list[bytes], bool]:
    """Parse the payloads of a JSON body. Also returns whether the body is a batch. `count` is the
    number of the body's `strict.marks`, if known.
    """
    return strict.kept(data, lambda body: _payloads(data, body, entry_bytes_max), count=count)


def batch_of(body: Any, item: Item = ENTRIES) -> list[Any] | None:
    """Return the items of a JSON batch, or None if the body is a single item."""
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
    """Parse a batch whose entries are all valid `{"data":…}`. This needs no Python call per entry,
    which halves the cost. Returns None for other batches, whose entries must be parsed one by one,
    with precise errors. Raises: BadRequest for a body with duplicate keys.
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
    # A body of minimal length can't have duplicate keys, so no check is needed.
    if len(data) != _BATCH_BYTES + len(entries) * _ENTRY_BYTES + sum(map(len, texts)):
        strict.check_strings(data, 1 + 2 * len(entries))
    return payloads


def from_line(line: bytes, number: int, entry_bytes_max: int) -> bytes:
    """Parse a line of NDJSON to a payload. Errors point to /lines/<number>."""
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
    """Parse one entry. Returns the payload, and the number of strings in the entry's JSON."""
    if type(entry) is not dict:
        raise invalid(pointer, "must be an object with `data`, `text` or `json`")
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
    """Convert the JSON value of a member in `FORMS` to the payload's bytes."""
    if form == "data":
        return base64_of(value, pointer)
    if form == "json":
        return orjson.dumps(value)
    if type(value) is not str:
        raise invalid(pointer, "must be a string")
    return value.encode()


def base64_of(value: object, pointer: str) -> bytes:
    """Decode canonical base64 (RFC 4648, 4). Raises: InvalidRequest."""
    if type(value) is not str:
        raise invalid(pointer, "must be a string in base64")
    padding = 0 if not value.endswith("=") else 2 if value.endswith("==") else 1
    try:
        payload: bytes = pybase64.b64decode(value, validate=True)
    except ValueError as error:
        raise invalid(pointer, f"is not base64: {error}") from error
    if len(value) % 4 or len(payload) != len(value) // 4 * 3 - padding:
        raise invalid(pointer, "is not base64")
    if padding and value[-padding - 1] not in _LAST_CANONICAL[padding - 1]:
        raise invalid(pointer, "is not canonical base64: the unused bits at the end must be 0")
    return payload


def _unknown(entry: dict[str, Any], known: tuple[str, ...], pointer: str) -> InvalidRequest:
    """Create the error for an object that doesn't have exactly one of the `known` members."""
    for name in entry:
        if name not in known:
            return invalid(f"{pointer}/{escaped(name)}", "is not a field of this request")
    return invalid(pointer, f"must have exactly one of {', '.join(known)}")


def headers_of(value: object, pointer: str) -> tuple[tuple[str, str], ...]:
    """Parse the headers of one record. Raises: InvalidRequest."""
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
            raise invalid(where, f"must have at most {_HEADER_BYTES_MAX} bytes")
    return tuple(value.items())


def too_large(size: int, bytes_max: int, pointer: str, item: Item = ENTRIES) -> TooLarge:
    """Create the error for an item that is too large."""
    where = f" at {pointer}" if pointer else ""
    return TooLarge(f"the {item.one}{where} has {size} bytes, but the limit is {bytes_max}")


def check_size(size: int) -> None:
    """Raise TooLarge if records of `size` bytes do not fit into one batch."""
    if size > BATCH_BYTES_MAX:
        raise TooLarge(f"the record batch has {size} bytes, but the limit is {BATCH_BYTES_MAX}")


def check_count(count: int, item: Item = ENTRIES) -> None:
    """Raise InvalidRequest for an empty batch, and TooLarge for a batch with too many items."""
    if count == 0:
        raise invalid(f"/{item.many}", f"must have at least one {item.one}")
    if count > BATCH_ENTRIES_MAX:
        raise TooLarge(f"the batch has more than {BATCH_ENTRIES_MAX} {item.many}")


def from_frames(data: bytes, entry_bytes_max: int, item: Item = ENTRIES) -> list[bytes]:
    """Parse the payloads of a body of frames: (u32 length, payload), repeated."""
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
                f"the frames are truncated: the length at {stop} has {end - stop} of 4 bytes"
            ) from None
        start = stop + 4
        stop = start + size
        if size > entry_bytes_max:
            raise too_large(size, entry_bytes_max, f"/{item.many}/{index}", item)
        if stop > end:
            raise BadRequest(
                f"the frames are truncated: only {end - start} of {size} bytes at {start} arrived"
            )
        add(data[start:stop])
    else:
        raise TooLarge(f"the batch has more than {BATCH_ENTRIES_MAX} {item.many}")
    check_count(len(payloads), item)
    return payloads


def _of_one_size(data: bytes, entry_bytes_max: int) -> list[bytes] | None:
    """Parse frames of equal length with one call, which is three times as fast as a loop. Returns
    None for other frames, which must be parsed one by one, with precise errors.
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
"""Number of lists to wrap around a value, so that orjson refuses values nested deeper than
DEPTH_MAX. orjson's own limit is 254 (checked by a test). A check in Python would be slower."""
_ON_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


def encoded(payload: bytes | memoryview, encoding: str) -> bytes:
    """Encode a payload as a JSON member: `"data":"…"`, `"text":"…"` or `"json":…`, or as
    `"data_base64":"…"` if the payload isn't valid in this encoding.
    """
    if encoding == "base64":
        return b'"data":"%b"' % pybase64.b64encode(payload)
    if encoding == "text":
        text = _text(payload)
        if text is not None:
            return b'"text":' + text
    elif _is_json(data := bytes(payload)):
        # Send the text as stored, so that no number changes, but on one line, for NDJSON and events.
        # Valid JSON has line ends only between tokens.
        has_lines = b"\n" in data or b"\r" in data
        return b'"json":' + (data.translate(_ON_ONE_LINE) if has_lines else data)
    return b'"data_base64":"%b"' % pybase64.b64encode(payload)


def encoded_null(encoding: str) -> bytes:
    """Encode a tombstone's value as a JSON member. `"json":null` would be the JSON value null."""
    return {"base64": b'"data":null', "text": b'"text":null'}.get(encoding, b'"data_base64":null')


def encoded_key(key: bytes | None, encoding: str) -> bytes:
    """Encode a key as JSON members, in base64 if `encoding` is `base64` or the key isn't UTF-8."""
    if key is None:
        return b'"key":null'
    if encoding == "base64":
        return b'"key":"%b"' % pybase64.b64encode(key)
    text = _text(key)
    if text is None:
        return b'"key":null,"key_base64":"%b"' % pybase64.b64encode(key)
    return b'"key":' + text


def _text(data: bytes | memoryview) -> bytes | None:
    """Encode UTF-8 bytes as a JSON string. Returns None for other bytes."""
    try:
        return orjson.dumps(str(data, "utf-8"))
    except UnicodeDecodeError:
        return None


def _is_json(data: bytes) -> bool:
    """Whether a payload is JSON that parsers also accept inside a page. The payload may have at
    most as many values and levels of nesting as a request body.
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
