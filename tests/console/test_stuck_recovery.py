"""A new user finds a stuck recovery, and ends it by the console alone: by starting the bookies that the page names
again, or, if they never return, by recovering without them and accepting the loss.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Final

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError
from tests.console.support import Pages, Tabs, fits_phone, no_serious_violations
from tests.support.waiting import MENDED_S, UNHURRIED, until

pytestmark = pytest.mark.asyncio(loop_scope="package")

BOOKIES: Final = 6
# Autorecovery notices a writer's death at once, and looks at what is stuck all the time.
SETTINGS: Final = {
    **UNHURRIED, "QUARANTINE_FAILURES": "0", "ABANDONED_S": "1", "IN_RECOVERY_S": "1", "AUDIT_S": "0.5",
}  # fmt: skip
MENDED_MS: Final = 1000 * MENDED_S


@pytest_asyncio.fixture(loop_scope="package")
async def stuck(pages: Pages, servers: StoreServers) -> AsyncIterator[Cluster]:  # noqa: ARG001
    """A cluster of its own, because its processes do not come back. A single lost bookie is waited for."""
    async with running(
        servers.fresh(), bookies=BOOKIES, environment=SETTINGS, lost_bookie_delay_s=3600
    ) as started:
        async with Client(started.gateways[0]) as client:
            on_all = lambda: client.create_ledger(ensemble_size=BOOKIES)  # noqa: E731
            await until(on_all, "the gateway knows all bookies", passing=(QuorumLogError,))
        yield started


@pytest_asyncio.fixture(loop_scope="package")
async def page(pages: Pages, stuck: Cluster) -> AsyncIterator[Page]:
    """A page of the gateway that stays."""
    tabs = Tabs(pages, stuck.gateways[1])
    # Entries can't be read before the recovery has ended, and some of them never; a loss needs proof.
    tabs.expected += [
        r"status of 50\d .*/v1/ledgers/\d+/",
        r"status of 410 .*/entries",
        # The overview asks bookies that are not listed as lost yet.
        r"status of 503 .*/v1/bookies/",
        "status of 409 .*/accept-loss",
    ]
    yield await tabs.open()
    await tabs.close()
    assert not tabs.unexpected


def names(members: Iterable[str]) -> list[str]:
    """The bookies' names without incarnations."""
    return [member.partition("@")[0] for member in members]


async def append(ledger: Ledger, texts: Iterable[str]) -> None:
    for text in texts:
        await ledger.append(text.encode())


async def kill(cluster: Cluster, members: Iterable[str]) -> None:
    """Kill the ledgers' writer and bookies, all at once."""
    await asyncio.gather(*(cluster.kill(name) for name in ("gateway-1", *names(members))))


async def found(page: Page, ledger: Ledger) -> Locator:
    """Find the ledger from the console's start, and return what its page says about the recovery."""
    await page.goto("/")
    problem = page.get_by_role("article", name=re.compile("blocked"))
    link = problem.get_by_role("link", name=f"ledger {ledger.ledger_id}")
    await link.wait_for(timeout=MENDED_MS)
    await link.press("Enter")  # a click may miss it, because a new problem above moves it down
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Ledger {ledger.ledger_id}")
    recovery = page.get_by_role("region", name="Recovery")
    await expect(recovery).to_contain_text("The recovery is blocked", timeout=MENDED_MS)
    return recovery


async def until_closed(page: Page, recovery: Locator) -> None:
    """Wait until the page shows the ledger CLOSED, without a reload."""
    state = page.locator(".facts").get_by_text("CLOSED", exact=True)
    await expect(state).to_be_visible(timeout=MENDED_MS)
    await expect(recovery).to_have_count(0)


async def choose(dialog: Locator, members: Iterable[str]) -> None:
    """Choose bookies that never return."""
    for member in members:
        await dialog.get_by_role("checkbox", name=member).check()


async def confirm(dialog: Locator, ledger: Ledger, label: str) -> None:
    """Type the ledger's id, and do what the dialog explains."""
    await dialog.get_by_label("to confirm").fill(str(ledger.ledger_id))
    await dialog.get_by_role("button", name=label).click()
    await expect(dialog).to_have_count(0, timeout=MENDED_MS)


async def test_named_bookies_return_and_the_ledger_is_closed(stuck: Cluster, page: Page) -> None:
    async with Client(stuck.gateways[0]) as client:
        ledger = await client.create_ledger()
        await append(ledger, ("one", "two", "three"))
        members = (await ledger.info())["fragments"][-1]["bookies"]
    await kill(stuck, members[:2])

    recovery = await found(page, ledger)
    named = recovery.get_by_role("listitem").locator("strong")
    await expect(named).to_have_text(members[:2], timeout=MENDED_MS)
    await expect(recovery).to_contain_text("Reason: too few bookies could be fenced")
    await expect(recovery).to_contain_text("Start the bookies again")
    await no_serious_violations(page)
    await fits_phone(page)
    for name in names(await named.all_text_contents()):
        await stuck.restart(name)

    await until_closed(page, recovery)
    entries = page.get_by_role("region", name="Entries from 0").get_by_role("row")
    await expect(entries).to_have_count(4)
    await expect(entries.nth(3)).to_contain_text("three")
    await expect(page.get_by_text("may lack entries")).to_have_count(0)


async def test_lost_bookies_stay_away_and_entries_are_given_up(stuck: Cluster, page: Page) -> None:
    async with Client(stuck.gateways[0]) as client:
        ledger = await client.create_ledger()
        await append(ledger, ("a", "b", "c"))
        first = (await ledger.info())["fragments"][0]["bookies"]
        await stuck.kill(names(first)[2])

        async def is_replaced() -> bool:
            await append(ledger, ("kept",))
            return len((await ledger.info())["fragments"]) == 2

        await until(is_replaced, "the writer replaced the bookie")
        await append(ledger, ("the last",))
        _, second = (await ledger.info())["fragments"]
    begin = second["first_entry"]
    await kill(stuck, first[:2])

    recovery = await found(page, ledger)
    label = "Recover without these bookies"
    await recovery.get_by_role("button", name=label).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("to confirm").fill(str(ledger.ledger_id))
    await dialog.get_by_role("button", name=label).click()
    await expect(dialog.get_by_role("alert")).to_contain_text("Choose the bookies")
    await choose(dialog, first[:2])
    await confirm(dialog, ledger, label)
    await until_closed(page, recovery)

    missing = page.get_by_role("region", name="Copies that can't be reached")
    row = missing.get_by_role("row").filter(has_text=f"0 to {begin - 1}")
    await expect(row).to_contain_text("none")
    label = "Accept the loss"
    await row.get_by_role("button", name=label).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Last lost entry")).to_have_value(str(begin - 1))
    await dialog.get_by_label("to confirm").fill(str(ledger.ledger_id))
    await dialog.get_by_role("button", name=label).click()
    await expect(dialog.get_by_role("alert")).to_contain_text("loss-not-proven", timeout=MENDED_MS)
    await choose(dialog, first)
    await confirm(dialog, ledger, label)

    lost = page.get_by_role("region", name="Lost entries").get_by_role("row")
    await expect(lost.nth(1)).to_contain_text(f"Entries 0 to {begin - 1}")
    await expect(lost.nth(1)).to_contain_text("lost")
    await expect(page.locator(".facts")).to_contain_text("CLOSED")
    await expect(page.locator(".facts")).to_contain_text("may lack entries")
    await page.get_by_role("button", name=f"Continue at entry {begin}").click()
    await expect(page.get_by_role("region", name=f"Entries from {begin}")).to_contain_text(
        "the last"
    )
    await no_serious_violations(page)
    await fits_phone(page)
