"""The pages Tokens and Audit."""

import re

import aiohttp
import pytest
from playwright.async_api import Page, expect

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.console.support import Tabs, fits_phone, log_in, no_serious_violations

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE = [
    "<script>alert(1)</script>",
    "<b onmouseover=alert(1)>bold</b> & co",
    "\u202etxet desrever",
    "long " + "x" * 95,
]


async def test_a_token_is_created_shown_once_and_revoked(page: Page, cluster: Cluster) -> None:
    await page.goto("/#/tokens")
    await expect(page.get_by_text("This gateway requires no tokens")).to_be_visible()
    await page.get_by_role("button", name="Create a token").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Name", exact=True).fill("orders service")
    await dialog.get_by_label("Log", exact=True).fill("orders")
    await dialog.get_by_role("button", name="Add a grant").click()
    second = dialog.get_by_role("group", name="Grant 2")
    await second.get_by_label("Scope").select_option("append")
    await second.get_by_label("On").select_option("logs that begin with …")
    await second.get_by_label("Beginning of the name").fill("orders-")
    await expect(second).to_contain_text("Append to the logs whose names begin with orders-")
    await dialog.get_by_role("button", name="Add a grant").click()
    await dialog.get_by_role("button", name="Remove grant 3").click()
    await dialog.get_by_text("Limits", exact=True).click()
    await dialog.get_by_label("Requests per second").fill("100")
    await dialog.get_by_label("Lifetime").select_option("1 day")
    await dialog.get_by_role("button", name="Create a token").click()

    shown = page.get_by_role("dialog", name="The new token")
    await expect(shown).to_contain_text("be shown again")
    secret = await shown.locator("code").inner_text()
    await expect(shown.get_by_role("button", name="Copy", exact=True)).to_be_visible()
    await no_serious_violations(page)
    await shown.get_by_role("button", name="I have copied the token").click()
    await expect(page.get_by_text(secret)).to_have_count(0)

    row = page.get_by_role("row", name="orders service")
    for text in ("read:logs/orders", "append:logs/orders-*", "100 requests per second", "in 24 h"):
        await expect(row).to_contain_text(text)
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        aiohttp.ClientSession(cluster.gateways[1], headers=headers) as session,
        session.get("/v1/caller") as answer,
    ):
        assert (await answer.json())["grants"] == ["read:logs/orders", "append:logs/orders-*"]

    await row.get_by_role("button", name="Revoke").click()
    dialog = page.get_by_role("dialog", name="Revoke a token")
    confirm = dialog.get_by_role("button", name="Revoke")
    await expect(confirm).to_be_disabled()
    await dialog.get_by_role("textbox").fill("orders service")
    await confirm.click()
    await expect(row).to_have_count(0)


async def test_a_wrong_token_is_not_created(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 422")
    await page.goto("/#/tokens")
    await page.get_by_role("button", name="Create a token").click()
    dialog = page.get_by_role("dialog")
    name, log = dialog.get_by_label("Name", exact=True), dialog.get_by_label("Log", exact=True)
    create = dialog.get_by_role("button", name="Create a token")
    await name.fill("wrong")
    await log.fill("not a name")
    await create.click()
    assert not await log.evaluate("(input) => input.checkValidity()")
    await log.fill("orders")
    await name.fill("control \u007f")
    await create.click()
    await expect(dialog.get_by_role("alert")).to_contain_text("/name")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("row", name="control")).to_have_count(0)


async def test_hostile_names_are_texts(page: Page, cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        for name in HOSTILE:
            await client.create_token(name, ["read:cluster"])
    await page.goto("/#/tokens")
    for name in HOSTILE:
        row = page.get_by_role("row").filter(has_text=name)
        await expect(row).to_be_visible()
        await row.get_by_role("button", name="Revoke").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.locator("label code")).to_have_text(name)
        await page.keyboard.press("Escape")
    await no_serious_violations(page)
    await fits_phone(page)


async def test_long_lists_have_pages_and_a_search(page: Page, cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        made = [await client.create_token(f"many-{n:02}", [f"read:logs/m{n}"]) for n in range(51)]
    await page.goto(f"/#/tokens?search={made[7]['id']}")
    rows = page.get_by_role("table").get_by_role("row")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text("many-07")
    await page.get_by_label("Search").fill("many-")
    await expect(rows).to_have_count(51)
    await page.get_by_role("button", name="Next").click()
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text("many-50")
    await page.get_by_label("Search").fill("no such token")
    await expect(page.get_by_text("No token matches the search.")).to_be_visible()


async def test_the_own_token_is_explained(cluster: Cluster, tabs: Tabs) -> None:
    tabs.expected.append("status of 401")
    grants = ["manage:ledgers/team-a", "append:ledgers/*", "read:cluster"]
    async with Client(cluster.gateways[0]) as client:
        made = await client.create_token("explained", grants, quotas={"bytes_per_s": 1 << 20})
    page = await tabs.open(cluster.gateways[1])
    await page.goto("/#/tokens")
    await log_in(page, made["token"])
    for text in (
        "Create, change and delete the ledgers of the namespace team-a",
        "Append to all ledgers that belong to no log",
        "Read the state of the cluster: bookies, services and metrics",
        "1.0 MiB per second",
        "When it is revoked",
        "Only a token with the grant admin:* can list",
    ):
        await expect(page.get_by_role("main")).to_contain_text(text)
    await expect(page.get_by_role("table")).to_have_count(0)


async def test_the_audit_log_is_searched(page: Page, cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        await client.create_log("audited")
        made = [await client.create_token("audited", ["read:cluster"]) for _ in range(101)][-1]
        await client.log("audited").delete()
    await page.goto("/#/audit?last=")
    rows = page.get_by_role("table", name="Changes").get_by_role("row")
    await expect(rows).to_have_count(101)
    await page.get_by_role("button", name="Next").click()
    await expect(page.get_by_text("Page 2")).to_be_visible()

    await page.get_by_label("Target").fill("logs/audited")
    await page.get_by_role("button", name="Search").click()
    await expect(rows).to_have_count(3)
    await expect(page.get_by_text("Page 2")).to_have_count(0)
    await expect(rows.nth(2)).to_contain_text(re.compile("everyone|anonymous"))
    await expect(rows.nth(2)).to_contain_text("127.0.0.1")
    await expect(rows.nth(2).get_by_role("link", name="deleteLog")).to_have_attribute(
        "href", "/docs#deleteLog"
    )
    link = rows.nth(1).get_by_role("link", name="logs/audited")
    await expect(link).to_have_attribute("href", "#/logs/audited")
    await no_serious_violations(page)
    await fits_phone(page)

    await page.get_by_label("Target").fill(f"tokens/{made['id']}")
    await page.get_by_role("button", name="Search").click()
    await expect(rows).to_have_count(2)
    await page.get_by_label("Period").select_option("Since …")
    await page.get_by_label("Since", exact=True).fill("2100-01-01T00:00:00")
    await page.get_by_role("button", name="Search").click()
    await expect(page.get_by_text("No change matches the search.")).to_be_visible()
    await page.go_back()
    await expect(rows).to_have_count(2)
    await rows.nth(1).get_by_role("link", name=f"tokens/{made['id']}").click()
    await expect(page.get_by_label("Search")).to_have_value(made["id"])
