"""The page Repair: what its controls do at autorecovery, at bookies and at the metadata service."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, Route, expect

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client
from tests.console.support import Pages, Tabs, fits_phone, log_in, no_serious_violations
from tests.console.test_overview import HOSTILE, alter, confirm, row
from tests.support.waiting import UNHURRIED

pytestmark = pytest.mark.asyncio(loop_scope="package")

AWAY: Final = "status of 503"


@pytest_asyncio.fixture(loop_scope="package")
async def restored(cluster: Cluster, page: Page) -> AsyncIterator[Page]:
    """A page of a cluster whose settings and bookies are put back after the test."""
    yield page
    defaults = {
        "paused": False,
        "bytes_per_s": None,
        "concurrency": None,
        "lost_bookie_delay_s": None,
    }
    assert (await page.request.patch("/v1/autorecovery", data=defaults)).ok
    for name in cluster.names:
        if name.startswith("bookie-") and cluster.is_alive(name):
            path = f"/v1/bookies/{name}/state"
            assert (await page.request.put(path, data={"state": "writable"})).ok


@pytest_asyncio.fixture(loop_scope="package")
async def own(pages: Pages, servers: StoreServers) -> AsyncIterator[tuple[Cluster, Page]]:
    """A cluster for one test that empties a bookie, and its page: in the shared one, open ledgers need all bookies."""
    async with running(servers.fresh(), bookies=4, gateways=1, environment=UNHURRIED) as cluster:
        tabs = Tabs(pages, cluster.gateways[0])
        tabs.expected += [AWAY, "status of 404 .*/drain"]
        yield cluster, await tabs.open()
        await tabs.close()
        assert not tabs.unexpected


async def fill(cluster: Cluster, ledgers: int) -> None:
    """Write ledgers with copies on all bookies but one."""
    async with Client(cluster.gateways[0]) as client:
        for _ in range(ledgers):
            ledger = await client.create_ledger()
            await ledger.append_batch([b"payload"] * 10)
            await ledger.close()


async def status(page: Page) -> dict[str, Any]:
    """The status, asked of the autorecovery process and not of a gateway."""
    [found] = (await (await page.request.get("/v1/autorecovery")).json())["autorecovery"]
    assert isinstance(found, dict)
    return found


def leaver(page: Page, bookie: str) -> Locator:
    """The part about a bookie that is draining or lost."""
    return page.get_by_role("article", name=bookie, exact=True)


async def test_limits_hold_at_autorecovery_until_they_are_reset(restored: Page) -> None:
    page = restored
    await page.goto("/#/repair")
    await page.get_by_role("button", name="Change limits").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Bytes per second").fill("0")
    await dialog.get_by_role("button", name="Change limits").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("from 1 to")

    await dialog.get_by_label("Bytes per second").fill("1048576")
    await dialog.get_by_label("Concurrent repairs").fill("3")
    await dialog.get_by_label("Lost-bookie delay").fill("600")
    await confirm(page, "Change limits")

    await expect(page.get_by_role("main")).to_contain_text("1.0 MiB/s")
    await expect(page.get_by_role("main")).to_contain_text("10 min")
    found = await status(page)
    assert (found["bytes_per_s"], found["concurrency"], found["lost_bookie_delay_s"]) == (
        1 << 20,
        3,
        600,
    )

    await page.get_by_role("button", name="Change limits").click()
    await dialog.get_by_label("Bytes per second").fill("")
    await confirm(page, "Change limits")
    await expect(page.get_by_role("main")).not_to_contain_text("1.0 MiB/s")
    found = await status(page)
    assert (found["bytes_per_s"], found["concurrency"]) == (None, 3)


async def test_an_audit_and_a_check_of_copies_are_started(cluster: Cluster, restored: Page) -> None:
    page = restored
    await fill(cluster, 2)
    await page.goto("/#/repair")
    await page.get_by_role("button", name="Start an audit").click()
    await confirm(page, "Start an audit")

    await page.get_by_role("button", name="Check all copies").click()
    await confirm(page, "Check all copies")

    part = page.get_by_role("region", name="Check of all copies")
    await expect(part).to_contain_text(re.compile(r"The last check compared \d+ ledgers in"))
    assert (await status(page))["checked"] >= 2


async def test_a_check_under_way_shows_its_progress(page: Page) -> None:
    def begin(found: dict[str, Any]) -> None:
        for process in found["autorecovery"]:
            process |= {"check_runs": True, "check_ledgers": 25, "check_ledgers_before": 100}

    await alter(page, "/v1/autorecovery", begin)
    await page.goto("/#/repair")

    part = page.get_by_role("region", name="Check of all copies")
    await expect(part).to_contain_text("25 ledgers compared, of about 100 at the last check")
    await expect(part.get_by_role("progressbar")).to_have_attribute("value", "25")


async def test_failed_repairs_show_their_reasons_and_pages(page: Page) -> None:
    asked: list[str] = []

    async def answer(route: Route) -> None:
        asked.append(route.request.url)
        after = re.search("after=(.*)", route.request.url)
        start = 100 if after else 0
        items = [
            {
                "ledger_id": start + number,
                "member": "bookie-1@1",
                "version": 1,
                "ranges": [[0, 9]],
                "failures": 3,
                "detail": HOSTILE,
                "worker": None,
                "survivors": 2,
                "created_at": "2026-01-02T03:04:05Z",
                "moves": False,
            }
            for number in range(3)
        ]
        following = None if after else "2:bookie-1@1"
        await route.fulfill(json={"repairs": items, "next": following})

    await page.route("**/v1/repairs*", answer)
    await page.goto("/#/repair")
    queue = page.get_by_role("region", name="Queue", exact=True)
    await expect(queue.get_by_role("row").nth(1)).to_contain_text(HOSTILE)
    await expect(queue.get_by_role("link", name="2", exact=True)).to_have_attribute(
        "href", "#/ledgers/2"
    )
    await no_serious_violations(page)
    await fits_phone(page)

    await queue.get_by_role("button", name="Next").click()
    await expect(queue.get_by_role("link", name="102", exact=True)).to_be_visible()


async def test_time_left_is_given_only_when_it_is_known(page: Page) -> None:
    def queue(found: dict[str, Any]) -> None:
        for process in found["autorecovery"]:
            process["queue"] |= {"items": 40, "ledgers": 40}

    await alter(page, "/v1/autorecovery", queue)
    await page.clock.install()
    await page.goto("/#/repair")

    facts = page.locator(".facts").first
    await expect(facts).to_contain_text("not known: the page measures the pace for 30 s")
    await page.clock.fast_forward(31_000)
    await expect(facts).to_contain_text("not known: no repair ended in the last")
    await page.context.close()  # no other test gets its clock


async def test_a_rebuild_is_previewed(cluster: Cluster, page: Page) -> None:
    await fill(cluster, 1)
    await page.goto("/#/repair")
    await page.get_by_role("button", name="Show what a rebuild would write").click()
    await confirm(page, "Show what a rebuild would write")

    report = page.get_by_role("region", name="Report of the rebuild")
    await expect(report).to_contain_text("What a rebuild would do")
    await expect(report).to_contain_text(re.compile(r"\d+ same"))
    await expect(report).to_contain_text("bookie-1@1")


async def test_a_rebuild_needs_its_name_typed_and_says_what_it_did(page: Page) -> None:
    await page.goto("/#/repair")
    await page.get_by_role("button", name="Rebuild", exact=True).click()
    dialog = page.get_by_role("dialog", name="Rebuild the metadata")
    await expect(dialog).to_contain_text("Restore the newest database if there is any")
    await expect(dialog.get_by_role("button", name="Rebuild", exact=True)).to_be_disabled()
    await no_serious_violations(page)
    await dialog.get_by_label("Type rebuild to confirm").fill("rebuild")
    await confirm(page, "Rebuild")

    await expect(page.get_by_role("region", name="Report of the rebuild")).to_contain_text(
        "What the rebuild did"
    )


async def test_a_rebuild_that_fails_says_why(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/#/repair")
    await page.get_by_role("button", name="Show what a rebuild would write").click()
    await cluster.kill("metadata-1")
    await confirm(page, "Show what a rebuild would write")

    await expect(
        page.get_by_role("region", name="Rebuild of the metadata").get_by_role("alert")
    ).to_be_visible()


async def test_missing_witnesses_and_failed_acceptances_are_shown(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 4")

    def go_back(found: dict[str, Any]) -> None:
        found["missing"] = [{"witness": "not a witness", "holder": HOSTILE}]

    await alter(page, "/v1/witnesses", go_back)
    await page.goto("/#/repair")
    part = page.get_by_role("region", name="Witnesses of changes")
    await expect(part).to_contain_text("The database lacks 1 acknowledged change")
    await expect(part).to_contain_text(HOSTILE)
    await expect(part).to_contain_text("Restore the newest database")

    await part.get_by_role("button", name="Accept the loss").click()
    dialog = page.get_by_role("dialog")
    accept = dialog.get_by_role("button", name="Accept the loss")
    await dialog.get_by_label("Type lose 1 to confirm").fill("lose 2")
    await expect(accept).to_be_disabled()
    await dialog.get_by_label("Type lose 1 to confirm").fill("lose 1")
    await dialog.get_by_label("Ledgers to end").fill("x")
    await accept.click()
    await expect(dialog.get_by_role("alert")).to_contain_text("Ledgers must be ids")

    await dialog.get_by_label("Ledgers to end").fill("")
    await accept.click()
    await expect(dialog.get_by_role("alert")).to_contain_text("witnesses")


async def test_a_bookie_is_drained_paused_and_decommissioned(own: tuple[Cluster, Page]) -> None:
    cluster, page = own
    await fill(cluster, 8)
    await page.goto("/#/repair")
    await expect(page.get_by_role("main")).to_contain_text("No bookie is draining or lost.")
    await page.get_by_role("button", name="Pause repairs").click()
    await confirm(page, "Pause repairs")
    await expect(page.get_by_role("main")).to_contain_text("Repairs are paused.")
    assert (await status(page))["paused"] is True

    await page.get_by_role("link", name="Overview").click()
    await row(page, "bookie-4").get_by_role("button", name="Drain").click()
    await confirm(page, "Drain")
    await page.get_by_role("link", name="Show the progress of the drain").click()

    part = leaver(page, "bookie-4")
    await expect(part).to_contain_text("copying is paused")
    await expect(part).to_contain_text(re.compile(r"[1-9]\d* ledgers? still names? bookie-4"))
    await expect(part.get_by_role("button", name="Decommission")).to_be_disabled()
    queue = page.get_by_role("region", name="Queue of repairs")
    await expect(queue.get_by_role("row").filter(has_text="bookie-4@1").first).to_be_visible()

    await page.get_by_role("button", name="Resume repairs").click()
    await confirm(page, "Resume repairs")

    await expect(part).to_contain_text("No ledger names bookie-4. Stop its process")
    await expect(page.get_by_role("main")).to_contain_text("The queue is empty.")
    assert (await status(page))["repaired"] > 0

    await cluster.kill("bookie-4")
    await part.get_by_role("button", name="Decommission").click()
    dialog = page.get_by_role("dialog", name="Decommission bookie-4")
    await expect(dialog.get_by_role("button", name="Decommission")).to_be_disabled()
    await dialog.get_by_label("Type bookie-4 to confirm").fill("bookie-4")
    await confirm(page, "Decommission")

    await expect(part).to_have_count(0)
    found = await (await page.request.get("/v1/bookies")).json()
    assert "bookie-4" not in json.dumps(found)


async def test_a_drain_is_cancelled(restored: Page) -> None:
    page = restored
    await page.request.put("/v1/bookies/bookie-4/state", data={"state": "draining"})
    await page.goto("/#/repair")
    part = leaver(page, "bookie-4")
    await part.get_by_role("button", name="Cancel the drain").click()
    await confirm(page, "Cancel the drain")

    await expect(part).to_have_count(0)
    info = await (await page.request.get("/v1/bookies/bookie-4")).json()
    assert info["state"] == "writable"


async def test_autorecovery_that_is_gone_is_shown(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/#/repair")
    await expect(page.get_by_role("main")).to_contain_text("No ledger lacks copies.")

    await cluster.kill("autorecovery-1")

    await expect(page.get_by_role("main")).to_contain_text("No process of autorecovery answers")


async def test_a_reader_sees_no_buttons_that_change_anything(
    cluster: Cluster, admin: str, tabs: Tabs
) -> None:
    tabs.expected.append("status of 40")
    async with Client(cluster.gateways[1], token=admin) as client:
        reader = (await client.create_token("reader", ["read:cluster"]))["token"]
        other = (await client.create_token("other", ["read:logs/*"]))["token"]
    page = await tabs.open(cluster.gateways[1])
    await log_in(page, reader)
    await page.get_by_role("link", name="Repair").click()

    await expect(page.get_by_role("main")).to_contain_text(
        "Changes need a token with admin on everything"
    )
    await expect(page.get_by_role("main")).to_contain_text("The database lacks no change")
    assert await page.get_by_role("main").get_by_role("button").all_inner_texts() == []

    page = await tabs.open(cluster.gateways[1])
    await log_in(page, other)
    await expect(page).to_have_url(re.compile("#/logs$"))  # where such a token begins
    await page.goto("/#/repair")
    await expect(page.get_by_role("main")).to_contain_text(
        "This page needs more than the token allows"
    )


async def test_the_page_is_accessible_and_fits_a_phone(restored: Page) -> None:
    page = restored
    await page.request.put("/v1/bookies/bookie-1/state", data={"state": "draining"})
    await page.goto("/#/repair")
    await expect(leaver(page, "bookie-1")).to_contain_text("bookie-1")
    await expect(page.get_by_role("main")).to_contain_text("Rebuild of the metadata")

    await no_serious_violations(page)
    await fits_phone(page)
