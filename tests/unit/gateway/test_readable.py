"""No record stops those who read a ledger or log as text or JSON: what is neither comes as base64."""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import orjson
import pytest

from quorumlog.wire.strict import DEPTH_MAX, MARKS_MAX
from services.gateway.edge import log_models, models
from services.gateway.edge.payloads import encoded, encoded_key
from tests.support.events import after_retry
from tests.support.waiting import within
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import served

LOG: Final = "/v1/logs/log"
LEDGER: Final = "/v1/ledgers/1"
LINES: Final = {"Accept": "application/x-ndjson"}
EVENTS: Final = {"Accept": "text/event-stream"}
WORDS: Final = (b'"a"', b"\xff\xfe", b'{"n":1}')
"""Text and JSON, neither, text and JSON."""


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    """A log and a ledger with the same three records, both closed."""
    async with served() as found:
        for path, method in ((LOG, "PUT"), ("/v1/ledgers", "POST")):
            assert (await found.ask(method, path, {})).status == 201
        for path in (LOG, LEDGER):
            await appended(found, path, *WORDS)
        yield found


def noun(path: str) -> str:
    """What a ledger's or a log's items are called in paths and bodies."""
    return "records" if path == LOG else "entries"


async def appended(http: Http, path: str, *values: bytes, key: bytes | None = None) -> None:
    items: list[dict[str, str]] = [{"data": base64.b64encode(each).decode()} for each in values]
    if key is not None:
        items = [item | {"key": base64.b64encode(key).decode()} for item in items]
    answer = await http.ask("POST", f"{path}/{noun(path)}", {noun(path): items})
    assert answer.status == 201, answer


def shown(record: Mapping[str, Any]) -> tuple[str, Any]:
    """The form that a record has, of which there is one, and what it says."""
    (form,) = {"data", "data_base64", "text", "json"} & record.keys()
    return form, record[form]


EXPECTED: Final[Mapping[str, list[tuple[str, Any]]]] = {
    "text": [("text", '"a"'), ("data_base64", "//4="), ("text", '{"n":1}')],
    "json": [("json", "a"), ("data_base64", "//4="), ("json", {"n": 1})],
    "base64": [("data", base64.b64encode(value).decode()) for value in WORDS],
}


async def page(http: Http, path: str, encoding: str) -> list[Any]:
    answer = await http.ask("GET", f"{path}/{noun(path)}?encoding={encoding}")
    assert answer.status == 200, answer
    model = log_models.LogRecords if path == LOG else models.Entries
    model.model_validate(answer.json)
    return list(answer.json[noun(path)])


async def lines(http: Http, path: str, encoding: str) -> list[Any]:
    answer = await http.ask("GET", f"{path}/{noun(path)}?encoding={encoding}", headers=LINES)
    return [orjson.loads(line) for line in answer.body.splitlines()]


async def events(http: Http, path: str, encoding: str) -> list[Any]:
    answer = await http.ask(
        "GET", f"{path}/{noun(path)}?encoding={encoding}&limit=3", headers=EVENTS
    )
    assert b"event: problem" not in answer.body
    return [
        orjson.loads(line.removeprefix(b"data: "))
        for line in answer.body.splitlines()
        if line.startswith(b"data: ")
    ]


async def socket(http: Http, path: str, encoding: str) -> list[Any]:
    found: list[Any] = []
    async with http.session.ws_connect(f"{http.urls[0]}{path}/ws") as talk, within("pages come"):
        await talk.send_json({"tail": {"encoding": encoding}})
        while len(found) < len(WORDS):
            found += (await talk.receive_json())[noun(path)]
    return found


@pytest.mark.parametrize("encoding", EXPECTED)
@pytest.mark.parametrize("path", [LOG, LEDGER])
@pytest.mark.parametrize("read", [page, lines, events, socket])
async def test_what_is_not_readable_comes_as_base64_among_the_others(
    http: Http, read: Any, path: str, encoding: str
) -> None:
    assert [shown(record) for record in await read(http, path, encoding)] == EXPECTED[encoding]


@pytest.mark.parametrize("encoding", EXPECTED)
async def test_one_entry_alone_comes_as_base64_too(http: Http, encoding: str) -> None:
    answer = await http.ask("GET", f"{LEDGER}/entries/1?encoding={encoding}")

    assert answer.status == 200
    assert shown(answer.json) == EXPECTED[encoding][1]


async def test_a_tail_goes_on_after_a_record_that_is_not_readable(http: Http) -> None:
    seen = b""
    async with (
        within("the events come"),
        http.session.get(
            f"{http.urls[0]}{LOG}/records?from=3&encoding=json", headers=EVENTS
        ) as response,
    ):
        for number, value in enumerate((b"\xff", b"[4]"), 3):
            await appended(http, LOG, value)
            seen = b""
            while not seen.endswith(b"\n\n") or b"data" not in seen:
                seen += await response.content.readline()
            assert b"id: %d." % number in seen
    assert b'"json":[4]' in seen


@pytest.mark.parametrize("encoding", ["text", "json"])
async def test_a_key_that_is_no_text_has_a_field_of_its_own(http: Http, encoding: str) -> None:
    await appended(http, LOG, b"1", key=b"\xff")
    await appended(http, LOG, b"\xfe", key=b"k")

    last, other = (await page(http, LOG, encoding))[3:]

    assert (last["key"], last["key_base64"], shown(last)[0]) == (None, "/w==", encoding)
    assert (other["key"], "key_base64" in other, shown(other)) == (
        "k", False, ("data_base64", "/g=="),
    )  # fmt: skip


NOT_JSON: Final = (
    b"", b" ", b"{", b"\xef\xbb\xbf1", b"NaN", b"1e999", b"9" * 5000, b'"\\ud800"', b'"\xff"', b"1 2",
    b"],[", b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), b'{"a":' * 900 + b"1" + b"}" * 900,
    b"],[" * 100, b"[" * 5000, b"[" + b"0," * MARKS_MAX + b"0]",
)  # fmt: skip
"""Also what parsers refuse in the middle of a page: numbers beyond all floats, nesting without an end,
brackets that would end the page."""


@pytest.mark.parametrize("value", NOT_JSON, ids=range(len(NOT_JSON)))
def test_json_that_a_parser_of_pages_refuses_is_not_given_as_json(value: bytes) -> None:
    assert encoded(value, "json").startswith(b'"data_base64":')


READABLE: Final = (
    b"[" * DEPTH_MAX + b"]" * DEPTH_MAX, b"[" * (DEPTH_MAX - 1) + b"[],[]" + b"]" * (DEPTH_MAX - 1), b"[" + b"[]," * 5000 + b"[]]", b"1.10", b"18446744073709551617",
    b'{"a":1,"a":2}', b" [1,\r\n2] ", b"\r1\r", b'"\\r\\n"',
)  # fmt: skip


@pytest.mark.parametrize("value", READABLE, ids=range(len(READABLE)))
def test_json_is_given_as_it_was_stored_but_on_one_line(value: bytes) -> None:
    member = encoded(value, "json")

    assert member.startswith(b'"json":')
    assert not {b"\r", b"\n"} & {member[at : at + 1] for at in range(len(member))}
    assert json.loads(b"{%b}" % member)["json"] == json.loads(value)
    assert member.removeprefix(b'"json":').split() == value.split()


@pytest.mark.parametrize("value", [b"", b"\0\r\n\x1b", "\u2028\x85\ud7ff\U0010ffff".encode()])
def test_any_utf_8_is_text_and_stays_on_one_line(value: bytes) -> None:
    for member in (encoded(value, "text"), encoded_key(value, "text").replace(b"key", b"text")):
        assert orjson.loads(b"{%b}" % member) == {"text": value.decode()}
        assert not {10, 13} & set(member)


@pytest.mark.parametrize("value", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"])
def test_what_is_not_utf_8_is_no_text(value: bytes) -> None:
    reported = base64.b64encode(value).decode()

    assert orjson.loads(b"{%b}" % encoded(value, "text")) == {"data_base64": reported}
    assert orjson.loads(b"{%b}" % encoded_key(value, "json")) == {
        "key": None,
        "key_base64": reported,
    }


async def test_line_ends_within_json_do_not_end_an_event_early(http: Http) -> None:
    await appended(http, LOG, b'[1,\r"x"\r\r,2]')

    answer = await http.ask("GET", f"{LOG}/records?from=3&limit=1&encoding=json", headers=EVENTS)

    (_id, data, end, _) = after_retry(answer.body).split(b"\n")
    assert (end, orjson.loads(data.removeprefix(b"data: "))["json"]) == (b"", [1, "x", 2])
    assert b"\r" not in data
