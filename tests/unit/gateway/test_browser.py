"""Pages of another port in a real browser: what `CORS_ORIGINS` allows, that nothing is allowed without, and pages
with a token.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from playwright.async_api import Browser, Page

from loadtest.stores import StoreServers
from tests.support.browser import chromium, page
from tests.support.issuer import Issuer
from tests.unit.client.test_guides import BLOCK, ROOT, snippets
from tests.unit.gateway.tokens.support import Guarded, guarded
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import served

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOG = "/v1/logs/log"
RECORDS = f"{LOG}/records"
LINES = '{headers: {Accept: "application/x-ndjson"}}'
APPEND = '{method: "POST", body: "{\\"text\\":\\"more\\"}", headers: {"Content-Type": "application/json"}}'
SIMPLE = '{method: "POST", body: "more", headers: {"Content-Type": "text/plain"}}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser for all tests of this module."""
    async with chromium() as started:
        yield started


async def run(shown: Page, script: str) -> Any:
    """Run the body of an async function in a page, and return its result."""
    return await shown.evaluate(f"async () => {{ {script} }}")


async def empty(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<!doctype html><title>a page</title>", content_type="text/html")


@contextlib.asynccontextmanager
async def somewhere(tail: Handler = empty) -> AsyncIterator[str]:
    """The origin of somebody else's web server, on a port of its own: a page, and a tail maybe."""
    app = web.Application()
    app.router.add_get("/", empty)
    app.router.add_get("/tail", tail)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


@contextlib.asynccontextmanager
async def visited(browser: Browser, *origins: str) -> AsyncIterator[tuple[Page, Http, str]]:
    """A page of elsewhere, a gateway with two records, and the gateway's URL. `PAGE` stands for the
    page's origin.
    """
    async with somewhere() as own:
        allowed = tuple(own if origin == "PAGE" else origin for origin in origins)
        async with served(cors_origins=allowed) as http, page(browser, own + "/") as shown:
            assert (await http.ask("PUT", LOG, {})).status == 201
            body = {"records": [{"text": "one"}, {"data": "/w=="}]}
            assert (await http.ask("POST", RECORDS, body)).status == 201
            yield shown, http, http.urls[0]


@pytest.mark.parametrize("origin", ["PAGE", "*"])
async def test_an_allowed_page_fetches_streams_and_writes(browser: Browser, origin: str) -> None:
    async with visited(browser, origin) as (shown, http, url):
        read = await run(shown, f'return (await fetch("{url}{RECORDS}?encoding=text")).json()')
        lines = await run(
            shown,
            f'const answer = await fetch("{url}{RECORDS}?encoding=text", {LINES});'
            'return [answer.headers.get("Next-Offset"), answer.headers.get("X-Request-Id") !== null,'
            " await answer.text()];",
        )
        missing = await run(
            shown,
            f'const answer = await fetch("{url}/v1/logs/none/records", {LINES});'
            "return [answer.status, (await answer.json()).code];",
        )
        # A body of JSON is no simple request: the browser asks first (preflight).
        wrote = await run(shown, f'return (await fetch("{url}{RECORDS}", {APPEND})).status')
        end = (await http.ask("GET", LOG)).json["next_offset"]

    assert [record.get("text") for record in read["records"]] == ["one", None]
    assert read["records"][1]["data_base64"] == "/w=="
    assert lines[:2] == ["2", True]
    assert [json.loads(line)["offset"] for line in lines[2].splitlines()] == [0, 1]
    assert missing == [404, "no-such-log"]
    assert (wrote, end) == (201, 3)


async def test_an_allowed_page_follows_events_past_a_record_of_no_json(browser: Browser) -> None:
    async with visited(browser, "PAGE") as (shown, http, url):
        await http.ask("POST", RECORDS, {"json": {"n": 1}})
        found = await run(
            shown,
            f'const source = new EventSource("{url}{RECORDS}?encoding=json");'
            "const found = [];"
            "await new Promise((done, failed) => {"
            "  source.onerror = () => failed(new Error('the stream failed'));"
            "  source.onmessage = (event) => {"
            '    found.push([event.lastEventId.split(".")[0], JSON.parse(event.data)]);'
            "    if (found.length === 3) done();"
            "  };"
            "});"
            "source.close();"
            "return found.map(([id, record]) => [id, record.json ?? null, record.data_base64 ?? null]);",
        )

    assert found == [["0", None, "b25l"], ["1", None, "/w=="], ["2", {"n": 1}, None]]


SOCKET = """
const socket = new WebSocket("ws" + "{url}{log}/ws".slice(4));
const told = [];
await new Promise((done) => {{
  socket.onopen = () => {{ told.push("open"); socket.send('{{"text":"by socket"}}'); }};
  socket.onmessage = (event) => {{ told.push(JSON.parse(event.data)); done(); }};
  socket.onclose = () => {{ told.push("closed"); done(); }};
}});
socket.onclose = null;
socket.close();
return told;
"""


async def test_an_allowed_page_opens_sockets(browser: Browser) -> None:
    async with visited(browser, "PAGE") as (shown, _, url):
        reported = await run(shown, SOCKET.format(url=url, log=LOG))

    assert reported == ["open", {"first_offset": 2, "last_offset": 2}]


FAILS = "return fetch({}, {}).then((answer) => answer.status, (error) => error.name);"
EVENTS_FAIL = """
const source = new EventSource("{url}{entries}?limit=2");
return await new Promise((done) => {{
  source.onmessage = () => done("a message");
  source.onerror = () => {{ if (source.readyState === EventSource.CLOSED) done("closed"); }};
}});
"""


@pytest.mark.parametrize("origins", [(), ("https://other.example",)], ids=["unset", "another"])
async def test_without_the_setting_a_page_reads_nothing_and_changes_nothing(
    browser: Browser, origins: tuple[str, ...]
) -> None:
    async with visited(browser, *origins) as (shown, http, url):
        fetches = [
            await run(shown, FAILS.format(f'"{url}{RECORDS}"', options))
            for options in ("{}", LINES, APPEND, SIMPLE)
        ]
        unread = await run(
            shown,
            f'return (await fetch("{url}{LOG}/close", {{method: "POST", mode: "no-cors"}})).type',
        )
        events: Any = await run(shown, EVENTS_FAIL.format(url=url, entries=RECORDS))
        socket = await run(shown, SOCKET.format(url=url, log=LOG))
        log = (await http.ask("GET", LOG)).json

    assert fetches == ["TypeError"] * 4
    assert (unread, events, socket) == ("opaque", "closed", ["closed"])
    assert (log["next_offset"], log["state"]) == (2, "OPEN")


async def test_an_event_source_keeps_the_id_that_comes_before_any_event(browser: Browser) -> None:
    """Through a proxy that cuts the first connection after what came at once."""
    seen: list[str | None] = []
    async with served() as http:
        await http.ask("PUT", LOG, {})
        await http.ask("POST", RECORDS, {"text": "one"})

        async def proxy(request: web.Request) -> web.StreamResponse:
            seen.append(request.headers.get("Last-Event-ID"))
            headers = {"Accept": "text/event-stream"}
            headers |= {"Last-Event-ID": seen[-1]} if seen[-1] else {}
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b"retry: 1\n\n")
            async with http.session.get(
                f"{http.urls[0]}{RECORDS}?from=latest&encoding=text", headers=headers
            ) as tail:
                await answer.write(await tail.content.readuntil(b"\n\n"))
            if len(seen) == 1:
                await http.ask("POST", RECORDS, {"text": "meanwhile"})
            return answer

        async with somewhere(proxy) as url, page(browser, url + "/") as shown:
            found = await run(
                shown,
                'const source = new EventSource("/tail");'
                "const text = await new Promise((done) => {"
                "  source.onmessage = (event) => done(JSON.parse(event.data).text);"
                "});"
                "source.close();"
                "return text;",
            )

    assert found == "meanwhile"
    assert seen[0] is None
    assert str(seen[1]).startswith("0."), "the offset, and a mark of the log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_tokens(
    servers: StoreServers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Guarded, Issuer]]:
    """Gateways that require tokens and know those of an issuer too, with a log."""
    issuer = Issuer(tmp_path_factory.mktemp("issuer") / "keys.json")
    async with guarded(servers.fresh(), follow=(0,), issuer=issuer, cors_origins=("*",)) as found:
        await found.log("orders")
        yield found, issuer


PRINTING = """
const printed = [];
const console = {
  log: (...said) => printed.push(
    said.map((one) => Array.isArray(one) ? `[ ${one.join(", ")} ]` : String(one)).join(" ")
  ),
};
"""
CONNECTED = """
const record = await new Promise((done, failed) => {
  events.onerror = () => failed(new Error("the stream failed"));
  events.onmessage = (event) => done(JSON.parse(event.data).text);
});
const tailed = await new Promise((done, failed) => {
  socket.onclose = () => failed(new Error("the socket failed"));
  socket.onopen = () => socket.send('{"tail":{"from":0}}');
  socket.onmessage = (event) => done(JSON.parse(event.data).records.length);
});
const urls = performance.getEntriesByType("resource").map((entry) => entry.name);
"""


async def test_the_guides_program_and_streams_work_in_a_page_with_a_token(
    browser: Browser, with_tokens: tuple[Guarded, Issuer]
) -> None:
    guarded, issuer = with_tokens
    url, (program,) = guarded.http.urls[0], snippets("javascript")
    guide = (ROOT / "docs" / "guides" / "tokens.md").read_text()
    (streams,) = [found[2] for found in BLOCK.finditer(guide) if found[1] == "js"]
    own, _ = await guarded.token("manage:logs/*", "append:logs/*", "read:logs/*")
    issued = issuer.jwt("manage:logs/*", "append:logs/*", "read:logs/*")
    for token in (own, issued):
        async with somewhere() as elsewhere, page(browser, elsewhere + "/") as shown:
            await run(shown, f'sessionStorage.setItem("token", "{token}")')
            source = program.source.replace("http://127.0.0.1:8080", url)
            printed = await run(shown, f"{PRINTING}{source}return printed;")
            reported = await run(
                shown,
                f'const gateway = "{url}", token = "{token}";{streams}{CONNECTED}'
                "events.close(); socket.onclose = null; socket.close();"
                "return [record, tailed, urls];",
            )

        assert printed == program.output.splitlines()
        assert reported[:2] == ["a record", 1]
        assert any("/v1/tickets" in one for one in reported[2]), "requests were seen"
        assert [one for one in reported[2] if token in one] == []


async def test_a_page_without_its_token_or_with_a_used_up_ticket_reads_nothing(
    browser: Browser, with_tokens: tuple[Guarded, Issuer]
) -> None:
    guarded, _ = with_tokens
    url, path = guarded.http.urls[0], "/v1/logs/orders/records"
    token, _ = await guarded.token("read:logs/orders")
    made = await guarded.ask(token, "POST", "/v1/tickets", {"path": path})
    query = f"?limit=2&ticket={made.json['ticket']}"
    assert (await guarded.ask(None, "GET", path + query)).status == 200
    async with somewhere() as elsewhere, page(browser, elsewhere + "/") as shown:
        refused = await run(
            shown,
            f'const answer = await fetch("{url}{path}");'
            'return [answer.status, (await answer.json()).code, answer.headers.get("WWW-Authenticate")];',
        )
        fails = EVENTS_FAIL.format(url=url, entries=path)
        without = await run(shown, fails)
        guarded.skews["s"] = 31.0
        late = await run(shown, fails.replace("?limit=2", query))
        guarded.skews["s"] = 0.0

    assert refused[:2] == [401, "unauthenticated"]
    assert refused[2].startswith("Bearer")
    assert (without, late) == ("closed", "closed")
