"""Payloads and keys as the JSON that a reader asks for: base64, text or JSON.

One record must not stop those who read many: what is no text, or no JSON, is given as base64 in a field of
its own, and the records around it in the form that was asked for.
"""

from typing import Final

import orjson
import pybase64

from quorumlog.wire.strict import DEPTH_MAX

_AROUND: Final = 254 - DEPTH_MAX
"""Lists around a value with which orjson refuses to write what nests deeper than DEPTH_MAX: its own limit
is 254 (a test holds it to that). Quicker than any walk in Python."""
_ON_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


def encoded(payload: bytes | memoryview, encoding: str) -> bytes:
    """A payload as the JSON member that carries it: `"data":"…"`, `"text":"…"` or `"json":…`, and
    `"data_base64":"…"` where it is not readable in this encoding.
    """
    if encoding == "base64":
        return b'"data":"%b"' % pybase64.b64encode(payload)
    if encoding == "text":
        text = _text(payload)
        if text is not None:
            return b'"text":' + text
    elif _is_json(data := bytes(payload)):
        # As it was stored, so that no number changes; but on one line, for forms that are made of lines:
        # JSON has line ends between its tokens only.
        has_lines = b"\n" in data or b"\r" in data
        return b'"json":' + (data.translate(_ON_ONE_LINE) if has_lines else data)
    return b'"data_base64":"%b"' % pybase64.b64encode(payload)


def encoded_key(key: bytes | None, encoding: str) -> bytes:
    """A key as its JSON members: base64 for `base64`, else text, and `key_base64` where it is none."""
    if key is None:
        return b'"key":null'
    if encoding == "base64":
        return b'"key":"%b"' % pybase64.b64encode(key)
    text = _text(key)
    if text is None:
        return b'"key":null,"key_base64":"%b"' % pybase64.b64encode(key)
    return b'"key":' + text


def _text(data: bytes | memoryview) -> bytes | None:
    """Bytes as a JSON string; None where they are not UTF-8."""
    try:
        return orjson.dumps(str(data, "utf-8"))
    except UnicodeDecodeError:
        return None


def _is_json(data: bytes) -> bool:
    """Whether a payload is JSON that parsers accept within a page too: it nests no deeper than that of a
    request may.
    """
    try:
        value = orjson.loads(data)
        if len(data) > 2 * DEPTH_MAX and data.count(b"[") + data.count(b"{") > DEPTH_MAX:
            for _ in range(_AROUND):
                value = [value]
            orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return False
    return True
