"""The fixtures of this folder, at the start page of a gateway."""

import pytest
from playwright.async_api import Page, expect

from loadtest.cluster import Cluster
from tests.console.support import Tabs, fits_phone, no_serious_violations
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

VIEWPORT = '<!doctype html><html lang="en"><title>A page</title><meta name="viewport" content="width=device-width">'
ICON = "status of 404 .*/favicon.ico"


async def test_the_start_page_has_a_heading(page: Page, tabs: Tabs) -> None:
    tabs.expected.append(ICON)
    await page.goto("/")

    await expect(page.get_by_role("heading", level=1)).to_be_visible()


async def test_faults_of_a_page_are_named(page: Page) -> None:
    await page.set_content(f"{VIEWPORT}<main><h1>Fits</h1></main>")
    await no_serious_violations(page)
    await fits_phone(page)

    await page.set_content(f"{VIEWPORT}<main><button id=save style='width: 400px'></button></main>")
    with pytest.raises(AssertionError, match=r"button-name \(critical\) at \['#save'\]"):
        await no_serious_violations(page)
    with pytest.raises(AssertionError, match=r'408 px wide\n<button id="save"'):
        await fits_phone(page)


async def test_errors_of_a_page_are_collected(page: Page, tabs: Tabs) -> None:
    tabs.expected.append(ICON)
    await page.goto("/")
    await page.evaluate("document.body.append(Object.assign(new Image(), {src: '/x'}))")
    await page.evaluate("setTimeout(() => { throw new Error('a fault') })")
    await page.goto("/v1/logs/none")
    await until(lambda: len(tabs.unexpected) == 3, "all errors are seen")

    tabs.expected += ["Content Security Policy", "a fault", r"status of 404 .*/v1/logs/none"]


async def test_one_gateway_requires_tokens_and_reports_a_killed_bookie(
    cluster: Cluster, admin: str, tabs: Tabs
) -> None:
    tabs.expected += [ICON, "status of 401"]
    page = await tabs.open(base_url=cluster.gateways[1])
    await page.goto("/v1/bookies")
    await expect(page.locator("body")).to_contain_text("unauthenticated")

    await cluster.kill("bookie-4")
    await page.set_extra_http_headers({"Authorization": f"Bearer {admin}"})

    async def is_lost() -> bool:
        await page.goto("/v1/bookies")
        return '"lost"' in await page.inner_text("body")

    await until(is_lost, "bookie-4 is lost")
