"""What pages of other origins may read, by the headers of answers; `test_browser.py` asks a browser."""

from collections.abc import Mapping
from typing import Any

import pytest
from multidict import CIMultiDictProxy

from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from services.gateway.edge.http.middleware import EXPOSED
from tests.support.waiting import within
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import served

PAGE = "https://a.example"
ALLOW = "Access-Control-Allow-Origin"
EVENTS = {"Accept": "text/event-stream"}
LINES = {"Accept": "application/x-ndjson"}
SEND_LINES = LINES | {"Content-Type": "application/x-ndjson"}

ANSWERS: Mapping[str, tuple[str, str, dict[str, str], int]] = {
    "JSON": ("GET", "/ITEMS", {}, 200),
    "frames": ("GET", "/ITEMS", {"Accept": "application/vnd.quorumlog.frames"}, 200),
    "lines": ("GET", "/ITEMS", LINES, 200),
    "events": ("GET", "/ITEMS", EVENTS, 200),
    "acknowledgements": ("POST", "/ITEMS", SEND_LINES, 200),
    "head of events": ("HEAD", "/ITEMS", EVENTS, 200),
    "what is not there": ("GET", "/nothing", {}, 404),
    "a wrong parameter": ("GET", "/ITEMS?max_bytes=0", EVENTS, 422),
    "a form that is not there": ("GET", "/ITEMS", {"Accept": "image/png"}, 406),
    "a body of another type": ("POST", "/ITEMS", {"Content-Type": "text/plain"}, 415),
    "a method that is not there": ("PATCH", "/ITEMS", {}, 405),
    "options": ("OPTIONS", "/ITEMS", {}, 204),
}


async def _head(http: Http, name: str, of: str, origin: str) -> tuple[int, CIMultiDictProxy[str]]:
    method, path, headers, _ = ANSWERS[name]
    path = path.replace("ITEMS", "records" if "/logs/" in of else "entries")
    body = b'{"text":"a"}\n' if method == "POST" else None
    async with (
        within(name),
        http.session.request(
            method, http.urls[0] + of + path, data=body, headers=headers | {"Origin": origin}
        ) as response,
    ):
        return response.status, response.headers


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_allowed_page_may_read_each_answer_in_each_form(name: str) -> None:
    async with served(cors_origins=(PAGE,)) as http:
        assert (await http.ask("PUT", "/v1/logs/log", {})).status == 201
        assert (await http.ask("POST", "/v1/ledgers", {})).status == 201
        for of in ("/v1/logs/log", "/v1/ledgers/1"):
            status, headers = await _head(http, name, of, PAGE)

            assert status == ANSWERS[name][3], of
            assert headers.get(ALLOW) == PAGE, of
            assert "Origin" in headers.getall("Vary"), of
            assert "Next-Offset" in headers["Access-Control-Expose-Headers"], of


@pytest.mark.parametrize("name", ANSWERS)
async def test_nobody_else_may_and_without_the_setting_no_page_at_all(name: str) -> None:
    for allowed, origin in (((PAGE,), "https://b.example"), ((), PAGE)):
        async with served(cors_origins=allowed) as http:
            await http.ask("PUT", "/v1/logs/log", {})

            _, headers = await _head(http, name, "/v1/logs/log", origin)

            assert not [each for each in headers if each.startswith("Access-Control")]


async def test_a_socket_of_an_allowed_page_opens_and_says_so() -> None:
    async with served(cors_origins=(PAGE,)) as http:
        await http.ask("PUT", "/v1/logs/log", {})

        async with http.session.ws_connect(http.urls[0] + "/v1/logs/log/ws", origin=PAGE) as socket:
            assert socket._response.headers[ALLOW] == PAGE


async def test_each_header_that_an_answer_may_have_is_exposed() -> None:
    async with served(cors_origins=("*",)) as http:
        described: Any = (await http.ask("GET", "/openapi.json")).json
    reported = {
        name
        for item in described["paths"].values()
        for operation in item.values()
        for response in operation["responses"].values()
        for name in response["headers"]
    }

    assert reported - {"Cache-Control"} <= set(EXPOSED)


def test_without_the_setting_nothing_is_added_to_an_answer() -> None:
    assert not build_app(FakeEngine(), Limits()).on_response_prepare
