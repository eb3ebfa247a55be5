"""Strict JSON against a slow reader that looks at everything."""

import base64
import json
import math
import time
from collections.abc import Callable
from typing import Any, Final

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorumlog.errors import BadRequest, InvalidRequest, TooLarge
from quorumlog.wire import strict
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.log_payloads import record_of_line, records_from_json
from services.gateway.edge.payloads import ENTRIES, base64_of, from_frames, from_json, from_line


class Ambiguous(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Ambiguous
    return found


def _constant(text: str) -> Any:
    raise Ambiguous(text)


def _integer(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise Ambiguous(text)
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Ambiguous(text)
    return value


def slow(data: bytes) -> Any:
    """What a text means, or ValueError."""
    value = json.loads(
        data.decode(),
        object_pairs_hook=_pairs,
        parse_constant=_constant,
        parse_int=_integer,
        parse_float=_float,
    )
    orjson.dumps(value)  # refuses lone surrogates
    return value


# Few and awkward keys, so that equal ones meet; each way to write them.
_keys = st.sampled_from(["", "a", "b", '"', "\\", 'a"', "ü", "\n"])
_strings = st.one_of(_keys, st.text(max_size=5))


@st.composite
def _written(draw: st.DrawFn, text: str) -> str:
    written = json.dumps(text, ensure_ascii=draw(st.booleans()))
    if text and draw(st.booleans()):
        written = (
            f'"\\u{ord(text[0]):04x}{json.dumps(text[1:])[1:]}' if ord(text[0]) < 65536 else written
        )
    return written


@st.composite
def _texts(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(
        st.sampled_from(["scalar", "string", "list", "object"] if depth else ["scalar", "string"])
    )
    if kind == "string":
        return draw(_written(draw(_strings)))
    if kind == "list":
        return "[" + ",".join(draw(st.lists(_texts(depth - 1), max_size=3))) + "]"
    if kind == "object":
        members = [
            f"{draw(_written(draw(_keys)))}:{draw(_texts(depth - 1))}"
            for _ in range(draw(st.integers(0, 3)))
        ]
        return "{" + ",".join(members) + "}"
    return draw(
        st.sampled_from(
            ["0", "-1", "1.5", "1e3", "true", "null", "9223372036854775808", "18446744073709551615",
             "18446744073709551616", "-9223372036854775809", "1e300", "1E+25", "NaN", "01", "1e999"]
        )
    )  # fmt: skip


@given(_texts())
def test_strict_json_means_what_a_slow_reader_says_or_is_refused(text: str) -> None:
    data = text.encode()
    try:
        expected = slow(data)
    except ValueError:
        with pytest.raises(BadRequest):
            strict.loads(data)
    else:
        assert strict.loads(data) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_bad_request(data: bytes) -> None:
    try:
        value = strict.loads(data)
    except BadRequest:
        return
    assert value == slow(data)


@given(st.binary(max_size=40))
def test_base64_of_any_bytes_is_read_back(payload: bytes) -> None:
    assert base64_of(base64.b64encode(payload).decode(), "") == payload


@settings(max_examples=1000)
@given(st.text(alphabet="AQgwBZ+/=-_ \n\0ü", max_size=12))
def test_only_canonical_base64_is_taken(text: str) -> None:
    try:
        payload = base64_of(text, "/data")
    except InvalidRequest:
        with pytest.raises((ValueError, AssertionError)):
            assert base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    else:
        assert base64.b64encode(payload).decode() == text


@given(st.lists(st.binary(max_size=20), max_size=5), st.binary(max_size=3))
def test_frames_are_read_back_or_refused(payloads: list[bytes], rest: bytes) -> None:
    data = b"".join(len(p).to_bytes(4, "big") + p for p in payloads)

    if payloads:
        assert from_frames(data, 100) == payloads
    if rest:
        with pytest.raises(BadRequest):
            from_frames(data + rest, 100)


@given(st.integers(0, 9), st.integers(2, 50), st.data())
def test_frames_of_one_size_are_cut_as_others(size: int, count: int, data: st.DataObject) -> None:
    payloads = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(count)]
    frames = [len(p).to_bytes(4, "big") + p for p in payloads]
    assert from_frames(b"".join(frames), 100) == payloads
    assert from_frames(b"".join(frames), size) == payloads
    if size:
        with pytest.raises(TooLarge):
            from_frames(b"".join(frames), size - 1)

    # Two of other sizes, and the whole has the same length.
    place = data.draw(st.integers(0, count - 2))
    payloads[place : place + 2] = [bytes(size + 1), b""] if size == 1 else [b"", bytes(2 * size)]
    frames = [len(p).to_bytes(4, "big") + p for p in payloads]
    assert from_frames(b"".join(frames), 100) == payloads


def test_a_batch_of_one_size_has_a_limit_of_entries() -> None:
    frames = (b"\0\0\0\1p") * BATCH_ENTRIES_MAX
    assert len(from_frames(frames, 1)) == BATCH_ENTRIES_MAX
    with pytest.raises(TooLarge):
        from_frames(frames + frames[:5], 1)


@given(
    st.lists(
        st.one_of(st.text(), st.binary(), st.integers(-(2**63), 2**64 - 1), st.lists(st.text())),
        min_size=1,
    )
)
def test_batches_are_read_back(values: list[Any]) -> None:
    entries: list[dict[str, Any]] = []
    expected = []
    for value in values:
        if isinstance(value, str):
            entries.append({"text": value})
            expected.append(value.encode())
        elif isinstance(value, bytes):
            entries.append({"data": base64.b64encode(value).decode()})
            expected.append(value)
        else:
            entries.append({"json": value})
            expected.append(
                json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
                    errors="surrogatepass"
                )
            )
    data = json.dumps({"entries": entries}).encode()

    assert from_json(data, 1 << 20) == (expected, True)


HUGE: Final = [b"1e300"] * 100_000
"""Floats beyond every integer: for each of them the text was once searched for integers that lost digits."""


@pytest.mark.parametrize(
    "read",
    [
        strict.loads,
        lambda data: from_json(data, 1 << 20),
        lambda data: records_from_json(data, ENTRIES),
    ],
    ids=["value", "ledger", "log"],
)
@pytest.mark.parametrize(
    "data",
    [
        b'{"json":[%b]}' % b",".join(HUGE),
        b'{"entries":[%b]}' % b",".join(b'{"json":%b}' % each for each in HUGE[:10_000]),
        b'{"entries":[%b]}' % b",".join(b'{"json":-1e19}' for _ in HUGE[:10_000]),
    ],
    ids=["in one value", "one in each entry", "negative"],
)
def test_the_work_for_a_body_of_large_numbers_grows_with_its_length(
    read: Callable[[bytes], Any], data: bytes
) -> None:
    begun = time.process_time()
    read(data)
    # A tenth of a second, where a search for each number took more than twenty.
    assert time.process_time() - begun < 5


DECIMALS: Final = (
    "1.10", "12345678901234567.89", "9007199254740993.5", "1E2", "1e-400", "-0.0", "1.0e+3",
    "0.1000000000000000055511151231257827", '[1.50,{"a":2.0}]',
)  # fmt: skip


@pytest.mark.parametrize("text", DECIMALS)
def test_a_decimal_is_stored_as_it_was_written(text: str) -> None:
    value = text.encode()
    one, batch = b'{"json":%b}' % value, b'{"entries":[{"text":"a"},{"json":%b}]}' % value

    assert from_json(one, 1000) == ([value], False)
    assert from_json(batch, 1000) == ([b"a", value], True)
    assert from_line(one, 1, 1000) == value
    assert records_from_json(one)[0].value == value
    assert [each.value for each in records_from_json(batch, ENTRIES)] == [b"a", value]
    assert record_of_line(one, 1, 1000).value == value


@pytest.mark.parametrize(
    ("body", "what"),
    [(b'{"json":[1.5,18446744073709551616]}', "64 bits"), (b'{"json":-9223372036854775809}', "64 bits"),
     (b'{"entries":[{"json":1.5},{"json":[%b]}]}' % (b"9" * 300), "64 bits"),
     (b'{"json":{"a":1.5,"a":1.5}}', "each key of an object once"), (b'{"json":1.5,"json":1.5}', "each key of an object once"),
     (b'{"a":1.5,"a":2}', "each key of an object once")],
)  # fmt: skip
def test_lost_digits_and_equal_keys_are_refused_beside_a_decimal(body: bytes, what: str) -> None:
    for read in (
        strict.loads,
        lambda data: records_from_json(data, ENTRIES),
        lambda data: from_json(data, 1 << 20),
    ):
        with pytest.raises(BadRequest, match=what):
            read(body)
