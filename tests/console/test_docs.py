"""The page of the API, /docs."""

import asyncio
import re
import shlex
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Locator, Page, expect

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.console.support import Tabs, fits_phone, log_in, no_serious_violations

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def opened(page: Page, operation: str) -> Locator:
    """Open an operation by its address, and return its element."""
    await page.goto(f"/docs#{operation}")
    found = page.locator(f"details#{operation}")
    await expect(found.get_by_role("heading", name="Responses")).to_be_visible()
    return found


async def described(cluster: Cluster) -> dict[str, Any]:
    """The OpenAPI document."""
    async with (
        aiohttp.ClientSession(cluster.gateways[0]) as session,
        session.get("/openapi.json") as answer,
    ):
        found: dict[str, Any] = await answer.json()
        return found


async def test_all_operations_are_grouped_and_filtered(page: Page, cluster: Cluster) -> None:
    openapi = await described(cluster)
    size = sum(len(item) for item in openapi["paths"].values())
    await page.goto("/docs")
    await expect(page).to_have_title("API · quorumlog")
    await expect(page.get_by_role("status")).to_have_text(f"{size} operations")
    await expect(page.locator("details.operation")).to_have_count(size)
    titles = await page.get_by_role("heading", level=2).all_inner_texts()
    assert titles == [tag["name"] for tag in openapi["tags"]]
    assert titles[:4] == ["Ledgers", "Entries", "Logs", "Records"]
    assert titles[-1] == "About"
    await no_serious_violations(page)
    await fits_phone(page)

    await page.get_by_label("Filter operations").fill("delete lease")
    await expect(page.locator("details.operation")).to_have_count(1)
    await page.get_by_label("Filter operations").fill("no such operation")
    await expect(page.get_by_text("No operation matches the filter.")).to_be_visible()


async def test_every_operation_opens(page: Page, cluster: Cluster) -> None:
    openapi = await described(cluster)
    names = [one["operationId"] for item in openapi["paths"].values() for one in item.values()]
    await page.goto("/docs")
    found = page.locator("details.operation")
    await expect(found).to_have_count(len(names))
    await found.evaluate_all("(all) => all.forEach((one) => one.querySelector('summary').click())")
    shown = page.locator("details.operation", has=page.get_by_role("heading", name="Try it"))
    await expect(shown).to_have_count(len(names))
    assert sorted(await shown.evaluate_all("(all) => all.map((one) => one.id)")) == sorted(names)
    await expect(page.get_by_role("main")).not_to_contain_text(
        re.compile(r"undefined|\[object|NaN")
    )
    await fits_phone(page)


async def test_an_address_opens_its_operation(page: Page) -> None:
    found = await opened(page, "createLedger")
    await expect(found.locator("summary").first).to_be_focused()
    await found.get_by_text("Fields of LedgerCreate").click()
    await expect(found).to_contain_text("ack_quorum integer, 1 to 255 or null")
    await expect(found.get_by_role("link", name="no-such-log")).to_have_attribute(
        "href", "/problems/no-such-log"
    )
    await no_serious_violations(page, "#createLedger")
    await fits_phone(page)

    await (
        page.get_by_role("navigation", name="Operations")
        .get_by_role("link", name="Read records")
        .click()
    )
    await expect(page).to_have_url(re.compile("/docs#readRecords$"))
    records = page.locator("details#readRecords")
    await expect(records).to_contain_text("integer, 1 to 10,000 · default 100")
    await page.go_back()
    await page.goto("/docs#/logs")
    await expect(page.get_by_role("heading", name="The HTTP API")).to_be_visible()


async def test_nested_fields_are_resolved(page: Page) -> None:
    found = await opened(page, "appendRecords")
    await found.get_by_text("Fields of RecordBatch").first.click()
    await found.get_by_text("Fields of RecordText").last.click()
    await expect(found).to_contain_text("text required string")
    await found.get_by_text("Example: batch").click()
    await expect(found.locator("pre").first).to_contain_text('"text": "a"')


async def test_an_example_is_sent(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 422")
    found = await opened(page, "createLedger")
    await found.get_by_label("Example").select_option("three copies")
    await expect(found.get_by_label("Body")).to_have_value(re.compile('"ensemble_size": 3'))
    command = found.locator(".command code")
    await expect(command).to_contain_text("--data-binary")
    await expect(command).not_to_contain_text("Authorization")
    await found.get_by_role("button", name="Send").click()
    response = found.get_by_role("region", name="Response")
    await expect(response).to_contain_text("201 Created")
    await expect(response.get_by_label("Body")).to_contain_text('"state": "OPEN"')
    await response.get_by_text("Headers").click()
    await expect(response).to_contain_text("x-request-id:")
    await no_serious_violations(page, "#createLedger")
    await fits_phone(page)

    await found.get_by_label("Body", exact=True).first.fill('{"ensemble_size": 0}')
    await found.get_by_role("button", name="Send").click()
    await expect(response).to_contain_text("422")


async def test_the_command_does_the_same(page: Page, cluster: Cluster) -> None:
    found = await opened(page, "appendRecords")
    async with Client(cluster.gateways[0]) as client:
        await client.create_log("events")
    text = """it's "quoted" `$(exit 1)` \\ $HOME"""
    await found.get_by_label("Content-Type", exact=True).select_option("application/octet-stream")
    await found.get_by_label("Body").fill(text)
    command = await found.locator(".command code").inner_text()
    assert shlex.split(command)[-1] == text
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command.replace("curl", "curl -s", 1), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert b'"first_offset":0' in output, (command, output)

    reads = await opened(page, "readRecords")
    await reads.get_by_label("encoding (query)").select_option("text")
    await expect(reads.locator(".command code")).to_contain_text(
        "/v1/logs/events/records?encoding=text'"
    )
    await reads.get_by_role("button", name="Send").click()
    await expect(reads.get_by_role("region", name="Response").get_by_label("Body")).to_contain_text(
        "$(exit 1)"
    )


async def test_a_stream_is_stopped(page: Page, cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        await client.create_log("streamed")
    found = await opened(page, "readRecords")
    await found.get_by_label("name (path)").fill("streamed")
    await found.get_by_label("from (query)").fill("latest")
    await found.get_by_label("wait_ms (query)").fill("60000")
    await found.get_by_role("button", name="Send").click()
    await found.get_by_role("button", name="Stop").click()
    await expect(found.get_by_role("alert")).to_contain_text("You stopped the request")

    await found.get_by_label("Accept").select_option("text/event-stream")
    await expect(found.locator(".command code")).to_contain_text("curl -N")
    await found.get_by_role("button", name="Send").click()
    response = found.get_by_role("region", name="Response")
    await expect(response).to_contain_text("The stream was ended after 8 seconds.")
    await expect(response).to_contain_text("200 OK")
    await expect(found.get_by_role("button", name="Stop")).to_have_count(0)


async def test_a_delete_is_asked_for(page: Page, cluster: Cluster, tabs: Tabs) -> None:
    tabs.expected.append("status of 404")
    async with Client(cluster.gateways[0]) as client:
        await client.create_log("doomed")
    found = await opened(page, "deleteLog")
    await found.get_by_label("name (path)").fill("doomed")
    await found.get_by_role("button", name="Send").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("DELETE /v1/logs/doomed")
    await no_serious_violations(page, "dialog")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(found.get_by_role("region", name="Response")).to_have_count(0)
    await found.get_by_role("button", name="Send").click()
    await dialog.get_by_role("button", name="Delete").click()
    await expect(found.get_by_role("region", name="Response")).to_contain_text("204")
    await found.get_by_role("button", name="Send").click()
    await dialog.get_by_role("button", name="Delete").click()
    await expect(found.get_by_role("region", name="Response")).to_contain_text("no-such-log")


async def test_only_requests_need_a_token(cluster: Cluster, admin: str, tabs: Tabs) -> None:
    tabs.expected.append("status of 401")
    page = await tabs.open(cluster.gateways[1])
    found = await opened(page, "listTokens")
    await found.get_by_role("button", name="Send").click()
    response = found.get_by_role("region", name="Response")
    await expect(response).to_contain_text("401")
    await page.get_by_role("button", name="Log in").click()
    await log_in(page, admin)
    found = page.locator("details#listTokens")
    await expect(found.locator(".command code")).to_contain_text('"Authorization: Bearer $TOKEN"')
    await found.get_by_role("button", name="Send").click()
    await expect(response).to_contain_text("200 OK")
    await expect(page.get_by_text(admin)).to_have_count(0)
