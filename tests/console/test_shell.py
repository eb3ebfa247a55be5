"""The console's frame: how it is served, the login, keyboard, colours, and a gateway that is away."""

import re
from urllib.parse import urlsplit

import aiohttp
import pytest
from playwright.async_api import Page, expect

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.console.support import Tabs, fits_phone, log_in, no_serious_violations
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

REFUSED = "status of 401"
AWAY = "ERR_CONNECTION|ERR_EMPTY_RESPONSE|ERR_SOCKET"


async def test_files_are_served_with_a_strict_policy_and_an_etag(cluster: Cluster) -> None:
    gateway = cluster.gateways[1]
    async with aiohttp.ClientSession() as session:
        for path in ("/", "/docs", "/console/app.js", "/console/style.css", "/console/icon.svg"):
            async with session.get(gateway + path) as answer:
                assert answer.status == 200
                policy = answer.headers["Content-Security-Policy"].split("; ")
                assert policy[0] == "default-src 'none'"
                assert "script-src 'self'" in policy
                assert not re.search("unsafe|https?:", " ".join(policy))
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                etag = answer.headers["ETag"]
            async with session.get(gateway + path, headers={"If-None-Match": etag}) as again:
                assert again.status == 304
                assert not await again.read()
                assert again.headers["ETag"] == etag
        for name in ("unknown.js", "index.html", "package.json", "..%2Fapp.py"):
            async with session.get(f"{gateway}/console/{name}") as missing:
                assert missing.status in (404, 422), name
                assert missing.content_type == "application/problem+json"
        async with session.get(f"{gateway}/console/unknown.js") as missing:
            assert missing.status == 404


async def test_no_request_leaves_the_gateway(page: Page, cluster: Cluster) -> None:
    hosts = set[str]()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    for path in ("/", "/#/logs", "/#/tokens", "/#/audit", "/docs"):
        await page.goto(path)
        await expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert hosts == {urlsplit(cluster.gateways[0]).netloc}


async def test_a_gateway_without_tokens_shows_no_login(page: Page) -> None:
    await page.goto("/")
    await expect(page.get_by_role("link", name="Overview")).to_have_attribute(
        "aria-current", "page"
    )
    await expect(page.get_by_role("link", name="Tokens")).to_be_visible()
    await expect(page.get_by_role("button", name="Log out")).to_have_count(0)


async def test_login_and_logout(cluster: Cluster, admin: str, tabs: Tabs) -> None:
    tabs.expected.append(REFUSED)
    page = await tabs.open(cluster.gateways[1])
    sent = list[tuple[str, str]]()
    page.on("request", lambda request: sent.append((request.url, request.post_data or "")))
    await page.goto("/#/audit")
    field = page.get_by_label("Token")
    await expect(field).to_be_focused()
    await expect(page).to_have_title("Log in · quorumlog")
    await expect(page.get_by_role("alert")).to_have_count(0)
    await no_serious_violations(page)
    await fits_phone(page)

    for wrong, reason in (("näh", "only letters"), ("qlt_unknown", "never created")):
        await field.fill(wrong)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text(reason)
        await expect(field).to_be_visible()

    await log_in(page, admin)
    await expect(page.get_by_role("heading", name="Audit", level=1)).to_be_visible()
    assert await page.evaluate("Object.values(localStorage)") in ([], [""])
    assert await page.evaluate("document.cookie") == ""
    assert not any(admin in url or admin in body for url, body in sent)
    await page.reload()
    await expect(page.get_by_role("heading", name="Audit", level=1)).to_be_visible()

    await page.get_by_role("button", name="Log out").click()
    await expect(field).to_be_focused()
    assert await page.evaluate("sessionStorage.length") == 0
    await expect(page.get_by_role("alert")).to_have_count(0)


async def test_a_token_that_ends_leads_to_the_login_and_back(
    cluster: Cluster, admin: str, tabs: Tabs
) -> None:
    tabs.expected.append(REFUSED)
    async with Client(cluster.gateways[0]) as client:
        made = await client.create_token("brief", ["admin:*"])
        page = await tabs.open(cluster.gateways[1])
        await page.goto("/#/audit?target=logs%2Fgone")
        await log_in(page, made["token"])
        await expect(page.get_by_label("Target")).to_have_value("logs/gone")
        await client.revoke_token(made["id"])
    alert = page.get_by_role("alert")
    search = page.get_by_role("button", name="Search")

    async def is_refused() -> bool:
        await search.or_(alert).first.click()
        return await alert.count() > 0

    await until(is_refused, "the gateway refuses the token")
    await expect(alert).to_contain_text("revoked")
    await log_in(page, admin)
    await expect(page.get_by_label("Target")).to_have_value("logs/gone")


async def test_a_token_sees_only_what_it_allows(cluster: Cluster, tabs: Tabs) -> None:
    tabs.expected.append(REFUSED)
    async with Client(cluster.gateways[0]) as client:
        made = await client.create_token("reader", ["read:logs/a*"])
    page = await tabs.open(cluster.gateways[1])
    await page.goto("/")
    await log_in(page, made["token"])
    await expect(page).to_have_url(re.compile("#/logs$"))
    pages = page.get_by_role("navigation", name="Pages").get_by_role("link")
    await expect(pages).to_have_text(["Logs", "Ledgers", "API"])
    for hidden in ("", "repair", "audit"):
        await page.goto(f"/#/{hidden}")
        if hidden:
            await expect(page.get_by_text("needs more than the token allows")).to_be_visible()
        else:
            await expect(page).to_have_url(re.compile("#/logs$"))
    await page.get_by_role("link", name="See what the token allows").click()
    await expect(page.get_by_text("Read the logs whose names begin with a")).to_be_visible()
    await expect(page.get_by_role("button", name="Create a token")).to_have_count(0)
    await no_serious_violations(page)
    await fits_phone(page)


async def test_keyboard(page: Page) -> None:
    await page.goto("/#/tokens")
    await expect(page.get_by_role("heading", name="All tokens")).to_be_visible()
    await page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    await expect(skip).to_be_focused()
    await expect(skip).to_be_in_viewport()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    assert page.url.endswith("#/tokens")
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("Search")).to_be_focused()
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    await page.keyboard.press("Tab")
    opener = page.get_by_role("button", name="Create a token")
    await expect(opener).to_be_focused()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Create a token")
    await expect(dialog).to_be_visible()
    await no_serious_violations(page)
    await fits_phone(page)
    inside = "!document.activeElement || document.activeElement === document.body || !!document.activeElement.closest('dialog')"
    for _ in range(30):
        await page.keyboard.press("Tab")
        assert await page.evaluate(inside)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(opener).to_be_focused()

    await page.get_by_role("link", name="Audit").press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    await expect(page).to_have_title("Audit · quorumlog")


async def test_the_colours_can_be_chosen(page: Page) -> None:
    await page.emulate_media(color_scheme="light")
    await page.goto("/#/tokens")
    body, colours = page.locator("body"), page.get_by_label("Colours")
    light = await body.evaluate("(body) => getComputedStyle(body).backgroundColor")

    await colours.select_option("dark")
    await expect(body).not_to_have_css("background-color", light)

    await page.reload()
    await expect(colours).to_have_value("dark")
    await expect(body).not_to_have_css("background-color", light)

    await colours.select_option("")
    await expect(body).to_have_css("background-color", light)


async def test_an_unknown_address_says_so(page: Page) -> None:
    for address in ("nothing", "logs%", "%00", "<script>alert(1)</script>"):
        await page.goto(f"/#/{address}")
        await expect(page.get_by_role("heading", level=1)).to_have_text("No such page")
        await page.get_by_role("link", name="Go to the page Overview").click()
        await expect(page).to_have_title("Overview · quorumlog")


async def test_a_gateway_goes_and_comes_back(cluster: Cluster, admin: str, tabs: Tabs) -> None:
    tabs.expected += [REFUSED, AWAY]
    page = await tabs.open(cluster.gateways[1])
    await page.goto("/#/audit")
    await log_in(page, admin)
    await expect(page.get_by_role("table", name="Changes")).to_be_visible()
    await cluster.stop("gateway-2")

    await page.get_by_role("button", name="Search").click()
    await expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer")
    await page.get_by_role("button", name="Log out").click()
    await log_in(page, admin)
    await expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer")

    await cluster.restart("gateway-2")
    await expect(page.get_by_role("table", name="Changes")).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_count(0)
