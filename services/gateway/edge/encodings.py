"""Payloads and keys in the JSON form that a reader asks for: base64, text or JSON.

One record must not stop the readers of many: a payload that is no text, or no JSON, is given as base64 in a
member of its own, and the records around it in the requested form.
"""

from typing import Final

import orjson
import pybase64

from quorumlog.errors import TooLarge
from quorumlog.wire.strict import DEPTH_MAX, check_marks

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
