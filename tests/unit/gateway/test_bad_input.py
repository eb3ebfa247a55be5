"""Whatever a client sends, it is answered with the right 4xx, and nothing has changed."""

import base64
import struct
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from quorumlog.protocol.ids import ID_MAX
from services.gateway.edge.http.limits import Limits
from tests.unit.gateway.conftest import Gateway, running

JSON = {"Content-Type": "application/json"}
OCTETS = {"Content-Type": "application/octet-stream"}
FRAMES = {"Content-Type": "application/vnd.quorumlog.frames"}
ENTRIES = "/v1/ledgers/1/entries"
PASSWORD_MAX = 1024

Case = tuple[str, str, bytes | None, Mapping[str, str], int]


def _json(method: str, path: str, body: Any, status: int) -> Case:
    return method, path, orjson.dumps(body), JSON, status


def _create(body: Any, status: int = 422) -> Case:
    return _json("POST", "/v1/ledgers", body, status)


def _append(body: Any, status: int = 422) -> Case:
    return _json("POST", ENTRIES, body, status)


def _data(text: str) -> Case:
    return _append({"data": text})


def _text(body: str | bytes, status: int = 400, path: str = ENTRIES) -> Case:
    return "POST", path, body.encode() if isinstance(body, str) else body, JSON, status


def _get(path: str, status: int) -> Case:
    return "GET", path, None, {}, status


def _typed(body: bytes, headers: Mapping[str, str], status: int) -> Case:
    return "POST", ENTRIES, body, headers, status


def _field(name: str, *bads: Any) -> list[Case]:
    return [_create({name: bad}) for bad in bads]


SIZES: tuple[Any, ...] = (0, -1, 256, 2**31, 2**63, 1.0, 3.5, "3", True, [], {}, "")
CREATE = [
    *_field("ensemble_size", *SIZES),
    *_field("write_quorum", *SIZES),
    *_field("ack_quorum", *SIZES),
    _create({"ensemble_size": 2, "write_quorum": 3}),
    _create({"write_quorum": 2, "ack_quorum": 3}),
    _create({"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 4}),
    *_field("digest", "crc32", "CRC32C", "", None, 1, [], "md5", "hmac-sha256"),
    *_field("password", "", 1, [], True, "x" * (PASSWORD_MAX + 1)),
    *_field("ledger_id", -1, ID_MAX + 1, 1.0, "1", True, []),
    *_field("allow_degraded", 0, 1, "true", None, []),
    *_field("metadata", None, [], "x", {"a": 1}, {"a": None}, {"a": {}}),
    *_field("metadata", {str(n): "" for n in range(65)}, {"k": "v" * (16 * 1024)}),
    *_field("metadata", {"k": "ü" * (8 * 1024)}, {"k" * (16 * 1024 + 1): ""}),
    *_field("metadata", {"k\0": "v"}, {"k": "v\0"}),
    *_field("ensemblesize", 3),
    _create({"ensemble_size": 3, "extra": 1}),
    *map(_create, (None, [], "x", 1, True, 1.5)),
]

BROKEN_JSON = [
    *(_text(text, path=path)
      for path in ("/v1/ledgers", ENTRIES, "/v1/ledgers/1/recover", "/v1/ledgers/1/close")
      for text in (
          "{", "}", '{"a"}', "{'a':1}", '{"a":1,}', "[1,]", '{"a":01}', '{"a":+1}', '{"a":.5}',
          '{"a":NaN}', '{"a":Infinity}', '{"a":-Infinity}', '{"a":1} x', '{"a":1}{"b":2}',
          "nul", '"unfinished', '{"a":"\\x"}', '{"a":"\\ud800"}', '{"a":"\t"}', "// c\n{}",
          b'{"a":"\xff"}', b"\xef\xbb\xbf{}", b"\0", " ", "{" * 5000, "[" * 5000,
          '{"a":' * 70 + "1" + "}" * 70,
          '{"text":"a","text":"b"}', '{"text":"a","te\\u0078t":"b"}',
          '{"a":{"b":1,"b":1}}', '{"a":"\\"","a":"\\\\"}',
      )),
    _text('{"entries":[{"text":"a"},{"text":"b","text":"c"}]}'),
    _text('{"entries":[{"text":"a"}],"entries":[{"text":"b"}]}'),
    _text('{"json":{"a":1,"a":2}}'),
    _text('{"json":[[{"a":[{"b":1,"b":2}]}]]}'),
    _text('{"json":' + "[" * 65 + "]" * 65 + "}"),
    _text('{"json":123456789012345678901234567890}'),
    _text('{"json":[-9999999999999999999]}'),
]  # fmt: skip

APPEND = [
    *map(_append, (
        None, [], "x", 1, True, {}, {"entries": []}, {"entries": {}}, {"entries": None},
        {"entries": "x"}, {"entries": [1]}, {"entries": [None]}, {"entries": [{}]},
        {"entries": [[]]}, {"entries": [{"text": "a"}], "text": "b"},
        {"entries": [{"text": "a"}, {"text": 1}]}, {"entries": [{"text": "a", "data": ""}]},
        {"entries": [{"entries": [{"text": "a"}]}]},
        {"text": None}, {"text": 1}, {"text": 1.0}, {"text": True}, {"text": []}, {"text": {}},
        {"data": None}, {"data": 1}, {"data": []}, {"text": "a", "data": ""}, {"payload": "x"},
        {"text": "a", "extra": 1}, {"": "x"}, {"data": "YQ==", "json": 1},
    )),
    *map(_data, (
        "=", "a", "ab", "abc", "abcde", "YQ", "YQ=", "YQ===", "Y=Q=", "YQ==YQ==", " YQ==", "YQ== ",
        "YQ\n==", "Y Q==", "Y_8=", "Y-8=", "YR==", "YWJ=", "ÿÿÿÿ", "\u0661\u0661\u0661\u0661",
        "====", "\0\0\0\0",
    )),
]  # fmt: skip

MEDIA = [
    _typed(b"x=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    _typed(b"x", {}, 415),
    _typed(b"x", {"Content-Type": "text/plain"}, 415),
    _typed(b"x", {"Content-Type": "application/xml"}, 415),
    _typed(b"x", {"Content-Type": "nonsense"}, 415),
    _typed(b"x", {"Content-Type": ";;;"}, 415),
    _typed(b"x", {"Content-Type": "multipart/form-data; boundary=x"}, 415),
    _typed(b'{"text":"a"}', JSON | {"Content-Encoding": "gzip"}, 400),
    _typed(b'{"text":"a"}', JSON | {"Content-Encoding": "gzip, zstd"}, 415),
    _typed(b'{"text":"a"}', JSON | {"Content-Encoding": "deflate"}, 415),
    _typed(b"x", OCTETS | {"Content-Encoding": "br"}, 415),
    _typed(b'{"text":"a"}', JSON | {"Accept": "text/html"}, 406),
    _typed(b'{"text":"a"}', JSON | {"Accept": "application/json;q=0"}, 406),
    ("POST", "/v1/ledgers", b"x=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("POST", "/v1/ledgers", b"x", OCTETS, 415),
    ("POST", "/v1/ledgers/1/close", b"x", OCTETS, 415),
    ("GET", ENTRIES, None, {"Accept": "application/xml"}, 406),
    ("GET", ENTRIES + "/0", None, {"Accept": "image/*"}, 406),
    ("GET", "/v1/ledgers", None, {"Accept": "text/*;q=1, application/json;q=0, */*;q=0"}, 406),
]

FRAME_BODIES = [
    _typed(b"", FRAMES, 422),
    _typed(b"\0", FRAMES, 400),
    _typed(b"\0\0\0", FRAMES, 400),
    _typed(struct.pack(">I", 1), FRAMES, 400),
    _typed(struct.pack(">I", 2) + b"a", FRAMES, 400),
    _typed(struct.pack(">I", 1) + b"ab", FRAMES, 400),
    _typed(b"\xff\xff\xff\xff", FRAMES, 413),
    _typed(struct.pack(">I", (1 << 20) + 1) + bytes((1 << 20) + 1), FRAMES, 413),
    _typed(bytes(4 * 10_001), FRAMES, 413),
]

LARGE = [
    _typed(bytes((1 << 20) + 1), OCTETS, 413),
    _append({"text": "x" * ((1 << 20) + 1)}, 413),
    _append({"data": base64.b64encode(bytes((1 << 20) + 1)).decode()}, 413),
    _append({"json": "x" * (1 << 20)}, 413),
    _append({"entries": [{"text": ""}] * 10_001}, 413),
    _append({"entries": [{"text": "x"}, {"text": "x" * ((1 << 20) + 1)}]}, 413),
]

NOT_DECIMAL = (
    "abc", "01", "1.0", "1e3", "0x1", "%2B1", "1_0", "%201", "1%20", "-0", "%D9%A1", "%EF%BC%91",
    "%C2%B2", "1%00", "..%2f..%2fetc%2fpasswd", "%FF", "%25", "null", "-", "--1", "1,0", "1;x",
)  # fmt: skip
OUT_OF_RANGE = ("-1", "9223372036854775808", "9" * 19, "9" * 100, "-" + "9" * 30)

IDS = [
    *(_get(path.format(bad), status)
      for path in ("/v1/ledgers/{}", "/v1/ledgers/{}/entries", "/v1/ledgers/1/entries/{}",
                   "/v1/ledgers/{}/last-add-confirmed")
      for bads, status in ((NOT_DECIMAL, 400), (OUT_OF_RANGE, 422))
      for bad in bads),
    *((method, path.format("abc"), None, {}, 400)
      for method, path in (("POST", "/v1/ledgers/{}/close"), ("POST", "/v1/ledgers/{}/recover"),
                           ("POST", "/v1/ledgers/{}/entries"), ("DELETE", "/v1/ledgers/{}"))),
]  # fmt: skip

QUERIES = [
    *(_get(f"{path}{name}={bad}", status)
      for path, name in ((ENTRIES + "?", "from"), (ENTRIES + "?", "to"), (ENTRIES + "?", "limit"),
                         (ENTRIES + "?", "max_bytes"), (ENTRIES + "?", "wait_ms"),
                         ("/v1/ledgers?", "limit"), ("/v1/ledgers?", "after"),
                         ("/v1/ledgers/1/last-add-confirmed?", "after"),
                         ("/v1/ledgers/1/last-add-confirmed?", "wait_ms"))
      for bad, status in (("", 400), ("abc", 400), ("1.5", 400), ("%D9%A1", 400), ("01", 400),
                          ("1e2", 400), ("%2B1", 400), ("9" * 30, 422), ("-2", 422))),
    *(_get(path, 422) for path in (
        ENTRIES + "?limit=0", ENTRIES + "?limit=10001", ENTRIES + "?max_bytes=0",
        ENTRIES + "?wait_ms=60001", ENTRIES + "?from=2&to=1", ENTRIES + "?encoding=hex",
        ENTRIES + "?encoding=", ENTRIES + "?unknown=1", ENTRIES + "?From=1",
        ENTRIES + "/0?from=1", "/v1/ledgers?limit=0", "/v1/ledgers?limit=10001",
        "/v1/ledgers?state=open", "/v1/ledgers?state=", "/v1/ledgers?bookie=",
        "/v1/ledgers?bookie=a%20b", "/v1/ledgers?bookie=b@01", "/v1/ledgers?log=%2e%2e%2f",
        "/v1/ledgers?metadata=1", "/v1/ledgers?metadata[k=1", "/v1/ledgers?metadata%5Bk%5D=%00",
        "/v1/ledgers/1?x=1", "/v1/bookies?x", "/v1/cluster?x=1",
        "/v1/ledgers/1/last-add-confirmed?after=-2",
    )),
    *(_get(path, 400) for path in (
        ENTRIES + "?from=1&from=2", "/v1/ledgers?limit=1&limit=1",
    )),
    ("POST", ENTRIES + "?expect=-1", b'{"text":"a"}', JSON, 422),
    ("POST", ENTRIES + "?expect=x", b'{"text":"a"}', JSON, 400),
    ("POST", ENTRIES + "?expect=1&x=2", b'{"text":"a"}', JSON, 422),
    ("POST", "/v1/ledgers?x=1", b"{}", JSON, 422),
    ("POST", "/v1/ledgers/1/close?x=1", None, {}, 422),
    ("DELETE", "/v1/ledgers/1?x=1", None, {}, 422),
]  # fmt: skip

OTHERS = [
    _json("POST", "/v1/ledgers/1/close", {"x": 1}, 422),
    _json("POST", "/v1/ledgers/1/close", [], 422),
    _json("POST", "/v1/ledgers/1/recover", {"declare_lost": "b@1"}, 422),
    _json("POST", "/v1/ledgers/1/recover", {"declare_lost": ["b"]}, 422),
    _json("POST", "/v1/ledgers/1/recover", {"declare_lost": [1]}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": 0}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": 1, "last": 0}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": -1, "last": 0}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": 0, "last": 0.0}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": 0, "last": 0, "declare_lost": ["b"]}, 422),
    _json("POST", "/v1/ledgers/1/accept-loss", {"first": 0, "last": 0, "yes": True}, 422),
    _json("POST", "/v1/ledgers/1/recover", {"x": 1}, 422),
    _json("DELETE", "/v1/ledgers/1", {"x": 1}, 400),
    ("POST", "/v1/ledgers", b"{}", JSON | {"Idempotency-Key": ""}, 422),
    ("POST", "/v1/ledgers", b"{}", JSON | {"Idempotency-Key": "a b"}, 422),
    ("POST", "/v1/ledgers", b"{}", JSON | {"Idempotency-Key": "x" * 256}, 422),
    ("POST", "/v1/ledgers", b"{}", JSON | {"Idempotency-Key": "ü"}, 422),
    ("GET", ENTRIES, None, {"Ledger-Password": "x" * 1025}, 422),
    *(_get(path, 404) for path in (
        "/v1", "/v2/ledgers", "/v1/ledgers/", "/v1/ledgers/1/", "/v1/ledgers/1/entries/",
        "/v1/ledgers/1/entries/0/", "/v1/ledgers/1/entries/0/1", "//v1/ledgers", "/V1/ledgers",
        "/problems/none", "/v1/ledgers/2", "/v1/ledgers/2/entries", "/v1/ledgers/2/entries/0",
        "/v1/ledgers/2/last-add-confirmed", "/v1/ledgers/1/entries/0",
    )),
    ("POST", "/v1/ledgers/2/entries", b'{"text":"a"}', JSON, 404),
    ("POST", "/v1/ledgers/2/close", None, {}, 404),
    ("POST", "/v1/ledgers/2/recover", None, {}, 404),
    ("DELETE", "/v1/ledgers/2", None, {}, 404),
    ("PUT", "/v1/ledgers", b"{}", JSON, 405),
    ("DELETE", "/v1/ledgers", None, {}, 405),
    ("PATCH", "/v1/ledgers/1", b"{}", JSON, 405),
    ("PUT", ENTRIES, b"x", OCTETS, 405),
    ("GET", "/v1/ledgers/1/close", None, {}, 405),
    ("TRACE", ENTRIES, None, {}, 405),
    ("PROPFIND", "/v1/bookies", None, {}, 405),
]  # fmt: skip

TABLES: dict[str, list[Case]] = {
    "create": CREATE,
    "broken JSON": BROKEN_JSON,
    "append": APPEND,
    "media types": MEDIA,
    "frames": FRAME_BODIES,
    "large": LARGE,
    "ids": IDS,
    "queries": QUERIES,
    "others": OTHERS,
}

CODES = {
    400: {"bad-request"},
    404: {"not-found", "no-such-ledger", "not-yet-confirmed"},
    405: {"method-not-allowed"},
    406: {"not-acceptable"},
    413: {"too-large"},
    415: {"unsupported-media-type"},
    422: {"invalid"},
}


@pytest.mark.parametrize("table", TABLES)
async def test_bad_input_is_a_4xx_with_why(table: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as gateway:
        await gateway.create()
        before = gateway.engine.state()

        for method, path, body, headers, status in TABLES[table]:
            answer = await gateway.ask(method, path, body, headers=headers)

            case = (method, path, (body or b"")[:80], dict(headers), answer)
            assert answer.status == status, case
            assert answer.code in CODES[status], case
            problem = answer.json
            assert problem["type"] == f"/problems/{answer.code}", case
            assert problem["status"] == status, case
            assert problem["instance"] == answer.headers["X-Request-Id"], case
            assert problem["outcome"] == "not-done", case
            assert problem["retryable"] is (answer.code == "not-yet-confirmed"), case
            assert answer.headers["Cache-Control"] == "no-store", case
            assert b"Traceback" not in answer.body, case
            if status == 422:
                assert problem["errors"], case
                assert all(set(e) == {"pointer", "detail"} for e in problem["errors"]), case
            if status == 405:
                assert "OPTIONS" in answer.headers["Allow"], case
            assert gateway.engine.state() == before, case
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_errors_point_to_each_place_that_is_wrong(gateway: Gateway) -> None:
    await gateway.create()

    create = await gateway.ask(
        "POST", "/v1/ledgers", json={"ensemble_size": 0, "digest": "x", "a/b~": 1}
    )
    batch = await gateway.ask("POST", ENTRIES, json={"entries": [{"text": "a"}, {"data": "?"}]})
    query = await gateway.ask("GET", ENTRIES + "?limit=0")
    path = await gateway.ask("GET", "/v1/ledgers/-1")

    pointers = {error["pointer"] for error in create.json["errors"]}
    assert pointers == {"/ensemble_size", "/digest", "/a~1b~0"}
    assert [e["pointer"] for e in batch.json["errors"]] == ["/entries/1/data"]
    assert [e["pointer"] for e in query.json["errors"]] == ["/query/limit"]
    assert [e["pointer"] for e in path.json["errors"]] == ["/path/ledger_id"]


async def test_form_encoding_is_refused_with_what_to_add_to_curl(gateway: Gateway) -> None:
    await gateway.create()

    answer = await gateway.ask(
        "POST",
        ENTRIES,
        '{"text":"a"}',
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )

    assert answer.status == 415
    assert "-H 'Content-Type: application/json'" in answer.json["detail"]


async def test_an_empty_form_is_no_body(gateway: Gateway) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    assert (await gateway.ask("POST", "/v1/ledgers", b"", headers=form)).status == 201
    assert (await gateway.ask("POST", ENTRIES, b"", headers=form)).status == 422


async def test_each_get_has_a_head_and_each_path_options(gateway: Gateway) -> None:
    await gateway.create()
    await gateway.ask("POST", ENTRIES, json={"text": "a"})

    for path, allow in {
        "/v1/ledgers": "GET, HEAD, OPTIONS, POST",
        "/v1/ledgers/1": "DELETE, GET, HEAD, OPTIONS",
        ENTRIES: "GET, HEAD, OPTIONS, POST",
        ENTRIES + "/0": "GET, HEAD, OPTIONS",
        "/v1/ledgers/1/last-add-confirmed": "GET, HEAD, OPTIONS",
        "/v1/bookies": "GET, HEAD, OPTIONS",
        "/v1/cluster": "GET, HEAD, OPTIONS",
        "/health/live": "GET, HEAD, OPTIONS",
        "/health/ready": "GET, HEAD, OPTIONS",
        "/metrics": "GET, HEAD, OPTIONS",
        "/openapi.json": "GET, HEAD, OPTIONS",
        "/": "GET, HEAD, OPTIONS",
        "/docs": "GET, HEAD, OPTIONS",
        "/problems/invalid": "GET, HEAD, OPTIONS",
    }.items():
        got, head = await gateway.ask("GET", path), await gateway.ask("HEAD", path)
        options = await gateway.ask("OPTIONS", path)

        assert (got.status, head.status, options.status) == (200, 200, 204), path
        assert head.body == options.body == b"", path
        assert head.headers["Content-Type"] == got.headers["Content-Type"], path
        assert options.headers["Allow"] == allow, path
        for answer in (got, head, options):
            assert answer.headers["X-Request-Id"], path
    assert (await gateway.ask("OPTIONS", "/nowhere")).status == 404
    missing = await gateway.ask("HEAD", "/v1/ledgers/9")
    assert (missing.status, missing.body) == (404, b"")


async def test_request_ids_of_clients_come_back(gateway: Gateway) -> None:
    for path in ("/v1/bookies", "/nowhere", "/v1/ledgers/9"):
        good = await gateway.ask("GET", path, headers={"X-Request-Id": "my-id.1_A"})
        bad = await gateway.ask("GET", path, headers={"X-Request-Id": "x" * 65})

        assert good.headers["X-Request-Id"] == "my-id.1_A"
        assert len(bad.headers["X-Request-Id"]) <= 64


async def test_media_ranges_are_read_as_http_says(gateway: Gateway) -> None:
    await gateway.create()
    await gateway.ask("POST", ENTRIES, json={"text": "a"})
    json, octets = "application/json", "application/octet-stream"

    for accept, expected in {
        "*/*": json,
        "application/*": json,
        "application/octet-stream": octets,
        "application/json;q=0.5, application/octet-stream": octets,
        "application/json;q=0.5, application/octet-stream;q=0.4": json,
        "*/*;q=0.1, application/octet-stream;q=0.2": octets,
        "application/json;q=0, */*": octets,
        "text/html, application/xhtml+xml, */*;q=0.8": json,
        " Application/JSON ; charset=utf-8": json,
        "": json,
    }.items():
        answer = await gateway.ask("GET", ENTRIES + "/0", headers={"Accept": accept})
        assert (answer.status, answer.headers.get("Content-Type")) == (200, expected), accept
        assert "Accept" in answer.headers["Vary"]


async def test_limits_are_settings() -> None:
    limits = Limits(entry_bytes_max=10, body_bytes_max=100, frames_bytes_max=50)
    async with running(limits=limits) as gateway:
        await gateway.create()
        for body, headers, status in (
            (b"x" * 10, OCTETS, 201),
            (b"x" * 11, OCTETS, 413),
            (b'{"text":"%b"}' % (b"x" * 11), JSON, 413),
            (b'{"json":%b"x"}' % (b" " * 100), JSON, 413),
            ((struct.pack(">I", 8) + b"x" * 8) * 4, FRAMES, 201),
            ((struct.pack(">I", 8) + b"x" * 8) * 5, FRAMES, 413),
        ):
            answer = await gateway.ask("POST", ENTRIES, body, headers=headers)
            assert answer.status == status, answer
