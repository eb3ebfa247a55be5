"""The page Overview: what it says of a real cluster, and how it helps."""

import json
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
from playwright.async_api import Locator, Page, Route, expect

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.console.support import Tabs, fits_phone, log_in, no_serious_violations

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE: Final = "<script>document.title = 'owned'</script><b>\u202e" + "x" * 200
AWAY: Final = "status of 503"


def verdict(page: Page) -> Locator:
    """The sentence that says whether all is well."""
    return page.locator(".verdict")


def row(page: Page, bookie: str) -> Locator:
    """The row of a bookie."""
    return page.get_by_role("row").filter(has_text=f"{bookie}@")


def problem(page: Page, name: str) -> Locator:
    """A problem that the page lists."""
    return page.get_by_role("article", name=name)


async def confirm(page: Page, label: str) -> None:
    """Press the button of the open dialog, and wait until the dialog closes."""
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name=label, exact=True).click()
    await expect(dialog).to_have_count(0)


async def alter(page: Page, path: str, change: Callable[[Any], object]) -> None:
    """Let the page see the cluster's answer to a request with a change, for states that are rare."""

    async def answer(route: Route) -> None:
        response = await route.fetch()
        body = await response.json()
        change(body)
        await route.fulfill(response=response, body=json.dumps(body))

    await page.route(f"**{path}", answer)


async def test_a_killed_bookie_is_lost_and_back(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/")
    await expect(verdict(page)).to_contain_text("All is well: 4 bookies are writable")
    await expect(page.get_by_role("heading", name="Zone north")).to_be_visible()
    await expect(row(page, "bookie-4")).to_contain_text("writable")

    await cluster.kill("bookie-4")

    await expect(row(page, "bookie-4")).to_contain_text("lost")
    await expect(verdict(page)).to_contain_text("the bookie bookie-4 is lost")
    await expect(problem(page, "bookie-4 is lost")).to_contain_text("Start the bookie again")

    cluster.start("bookie-4")

    await expect(row(page, "bookie-4")).to_contain_text("writable")
    await expect(problem(page, "bookie-4 is lost")).to_have_count(0)


async def test_a_bookie_reports_its_room_and_sync_time(cluster: Cluster, page: Page) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger(ensemble_size=4)
        await ledger.append(b"payload")
    await page.goto("/")

    for name in ("bookie-1", "bookie-2", "bookie-3", "bookie-4"):
        await expect(row(page, name)).to_contain_text(re.compile(r"\d GiB"))
        await expect(row(page, name)).to_contain_text(re.compile(r"\d ms"))
        await expect(row(page, name)).to_contain_text("B/s")


async def test_an_admin_changes_the_state_of_a_bookie(page: Page) -> None:
    await page.goto("/")
    await row(page, "bookie-2").get_by_role("button", name="Make read-only").click()
    await confirm(page, "Make read-only")
    await expect(row(page, "bookie-2").locator(".state").first).to_have_text("read-only")

    listed = problem(page, "bookie-2 is read-only")
    await listed.get_by_role("button", name="Make bookie-2 writable").click()
    await confirm(page, "Make bookie-2 writable")
    await expect(row(page, "bookie-2").locator(".state").first).to_have_text("writable")
    await expect(listed).to_have_count(0)


async def test_an_admin_pauses_the_maintenance_of_a_bookie(page: Page) -> None:
    await page.goto("/")
    await row(page, "bookie-1").get_by_role("button", name="Pause maintenance").click()
    await confirm(page, "Pause maintenance")
    await expect(row(page, "bookie-1")).to_contain_text("paused")

    await row(page, "bookie-1").get_by_role("button", name="Resume maintenance").click()
    await confirm(page, "Resume maintenance")
    await expect(row(page, "bookie-1")).not_to_contain_text("paused")


async def test_a_failed_change_is_shown_in_place(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/")
    await row(page, "bookie-3").get_by_role("button", name="Drain").click()
    await cluster.kill("bookie-3")
    dialog = page.get_by_role("dialog", name="Drain bookie-3")
    await dialog.get_by_role("button", name="Drain", exact=True).click()

    await expect(dialog.get_by_role("alert")).to_contain_text("bookie")


async def test_paused_repairs_are_a_problem_that_a_button_ends(page: Page) -> None:
    await page.request.patch("/v1/autorecovery", data={"paused": True})
    await page.goto("/")
    await expect(verdict(page)).to_contain_text("repairs are paused")

    await problem(page, "repairs are paused").get_by_role("button").press("Enter")
    await confirm(page, "Resume repairs")

    await expect(problem(page, "repairs are paused")).to_have_count(0)
    [process] = (await (await page.request.get("/v1/autorecovery")).json())["autorecovery"]
    assert process["paused"] is False


async def test_data_stays_while_metadata_is_away(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/")
    await expect(row(page, "bookie-1")).to_contain_text("writable")

    await cluster.kill("metadata-1")

    await expect(verdict(page)).to_contain_text("cannot be reached")
    await expect(verdict(page)).to_contain_text("This page shows what was known at")
    await expect(row(page, "bookie-1")).to_contain_text("writable")
    await expect(page.locator(".facts")).to_contain_text("unavailable")

    cluster.start("metadata-1")

    await expect(verdict(page)).to_contain_text("4 bookies are writable")


async def test_absent_metadata_is_told_at_once(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await cluster.kill("metadata-1")
    await page.goto("/")

    await expect(verdict(page)).to_contain_text("The metadata service or its database")
    await expect(page.get_by_role("main")).to_contain_text("Start the metadata service again")


async def test_rates_are_shown_for_all_gateways_and_for_each(cluster: Cluster, page: Page) -> None:
    await page.goto("/")
    await expect(
        page.get_by_role("img", name=re.compile("Requests per second over"))
    ).to_have_count(1)

    await page.get_by_role("button", name="Show each gateway").click()

    each = page.get_by_role("region", name=cluster.gateways[0])
    await expect(each.get_by_role("img")).to_have_count(7)


async def test_each_rare_problem_has_its_reason_and_its_remedy(page: Page) -> None:
    def break_cluster(found: dict[str, Any]) -> None:
        found |= {
            "missing_witnesses": [{"witness": "w.0", "holder": HOSTILE}],
            "degraded_ledgers": [5],
            "under_replicated_count": 2,
            "under_replicated": [{"ledger_id": 6, "bookie": "bookie-1@1"}],
            "kept_count": 1,
            "kept_ledgers": [{"ledger_id": 7, "holders": ["bookie-2"]}],
            "clock_doubt": "the database's clock is +60 s from this machine's clock",
            "quarantined": ["bookie-3"],
        }
        found["services"].append(
            {
                "kind": "gateway",
                "id": "gone",
                "url": "http://192.0.2.1:8080",
                "state": "gone",
                "last_seen_at": "2026-01-02T03:04:05Z",
            }
        )

    def block(found: dict[str, Any]) -> None:
        blocked = {"ledger_id": 8, "bookie": "bookie-4@1", "entry_id": 3, "why": HOSTILE}
        lost = {"ledger_id": 9, "first": 3, "last": 4, "answers": {}}
        for process in found["autorecovery"]:
            process |= {"blocked": 1, "blocked_recoveries": [blocked], "lost_entries": [lost]}

    def damage(found: dict[str, Any]) -> None:
        found |= {"damages": 2, "disk_low": True}

    await alter(page, "/v1/cluster", break_cluster)
    await alter(page, "/v1/autorecovery", block)
    await alter(page, "/v1/bookies/bookie-1", damage)
    await alter(page, "/v1/bookies", lambda found: found.update(stale=True))
    await page.goto("/")

    for name, text in {
        "database lacks 1 acknowledged change": "Restore the newest database",
        "http://192.0.2.1:8080 is gone": "Start the process again",
        "1 recovery is blocked": "declare it lost",
        "1 range of entries": "accept the loss",
        "bookie-1 has damaged files": "queues repairs",
        "disk of bookie-1 is nearly full": "becomes read-only below",
        "1 ledger is degraded": "add bookies",
        "2 ledgers lack copies": "queue of repairs",
        "1 ledger is kept": "Rebuild the metadata",
        "Redis does not answer": "Start Redis again",
        "a clock is in doubt": "check the time service",
        "bookie-3 is quarantined": "This ends by itself",
    }.items():
        await expect(problem(page, name)).to_contain_text(text)
    blocked = problem(page, "1 recovery is blocked")
    await expect(blocked.get_by_role("link", name="ledger 8")).to_have_attribute(
        "href", "#/ledgers/8"
    )
    await expect(blocked).to_contain_text(HOSTILE)
    assert "quorumlog" in await page.title()
    await expect(page.get_by_role("row").filter(has_text="192.0.2.1")).to_contain_text("gone since")
    await problem(page, "damaged files").get_by_role("button", name="Damage of bookie-1").click()
    await expect(page.get_by_role("dialog")).to_contain_text("The damage was repaired.")
    await page.keyboard.press("Escape")
    await no_serious_violations(page)
    await fits_phone(page)


async def test_many_bookies_are_shown_in_pages(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 404 .*/v1/bookies/many-")
    asked: list[str] = []

    def grow(found: dict[str, Any]) -> None:
        one = {**found["bookies"][0], "zone": "large"}
        found["bookies"] = [{**one, "id": f"many-{number}@1"} for number in range(120)]

    await alter(page, "/v1/cluster", grow)

    async def count(route: Route) -> None:
        asked.append(route.request.url)
        await route.fulfill(status=404, body="{}", content_type="application/json")

    await page.route("**/v1/bookies/many-*", count)
    await page.goto("/")
    await expect(page.get_by_role("row").filter(has_text="many-")).to_have_count(50)
    assert len(set(asked)) <= 50

    pages = page.get_by_role("navigation", name="Pages of the list").first
    await pages.get_by_role("button", name="Next").click()
    await pages.get_by_role("button", name="Next").click()
    await expect(page.get_by_role("row").filter(has_text="many-")).to_have_count(20)


async def test_a_reader_sees_no_buttons_that_change_anything(
    cluster: Cluster, admin: str, tabs: Tabs
) -> None:
    tabs.expected.append("status of 401")
    async with Client(cluster.gateways[1], token=admin) as client:
        token = (await client.create_token(HOSTILE[:60], ["read:cluster"]))["token"]
    page = await tabs.open(cluster.gateways[1])
    await log_in(page, token)

    await expect(row(page, "bookie-1")).to_contain_text("writable")
    await expect(
        page.get_by_role("button", name=re.compile("Drain|Make|maintenance"))
    ).to_have_count(0)
    await expect(page.get_by_role("columnheader", name="Change")).to_have_count(0)


async def test_a_token_without_rights_on_the_cluster_sees_no_overview(
    cluster: Cluster, admin: str, tabs: Tabs
) -> None:
    tabs.expected += ["status of 401", "status of 403"]
    async with Client(cluster.gateways[1], token=admin) as client:
        token = (await client.create_token("logs", ["read:logs/mine"]))["token"]
    page = await tabs.open(cluster.gateways[1])
    await log_in(page, token)

    await expect(page.get_by_role("heading", level=1, name="Logs")).to_be_visible()
    await expect(page.get_by_role("link", name="Overview")).to_have_count(0)


async def test_the_overview_is_accessible_and_fits_a_phone(page: Page) -> None:
    await page.goto("/")
    await expect(row(page, "bookie-1")).to_contain_text("GiB")
    await no_serious_violations(page)
    await fits_phone(page)

    await row(page, "bookie-1").get_by_role("button", name="Drain").click()
    await no_serious_violations(page)


async def test_a_process_that_left_has_its_time(cluster: Cluster, page: Page, tabs: Tabs) -> None:
    tabs.expected.append(AWAY)
    await page.goto("/")
    await expect(verdict(page)).to_contain_text("4 bookies are writable")

    await cluster.kill("gateway-2")

    await expect(problem(page, f"{cluster.gateways[1]} is gone")).to_contain_text("was last seen")
    listed = page.get_by_role("region", name="Processes").get_by_role("row")
    await expect(listed.filter(has_text=cluster.gateways[1])).to_contain_text("gone since")

    cluster.start("gateway-2")

    await expect(listed.filter(has_text=cluster.gateways[1])).to_contain_text("ready")
    await expect(problem(page, f"{cluster.gateways[1]} is gone")).to_have_count(0)
