"""The pages of ledgers: the list, and one ledger with its copies, its entries, and what may be done to it."""

import re
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import asyncpg
import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client, Ledger
from tests.console.support import Pages, Tabs, fits_phone, no_serious_violations
from tests.support.waiting import MENDED_S, UNHURRIED

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE: Final = {
    "<script>window.bad = 1</script>": "<img src=x onerror=window.bad=1>",
    "long": "W" * 200,
    "rtl": "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "&amp;": "${1}' \"`",
}
MENDED_MS: Final = 1000 * MENDED_S
MANY: Final = 100_000
PAGE_ROWS: Final = 50


@pytest_asyncio.fixture(loop_scope="package")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.gateways[0]) as opened:
        yield opened


async def show(page: Page, ledger: Ledger) -> None:
    await page.goto(f"/#/ledgers/{ledger.ledger_id}")
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Ledger {ledger.ledger_id}")


def facts(page: Page, name: str) -> Locator:
    """The value of a fact."""
    return page.locator(".facts div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def rows(page: Page, name: str) -> Locator:
    """The rows of a table, without its head."""
    return page.get_by_role("region", name=name).locator("tbody tr")


def link(page: Page, ledger: Ledger) -> Locator:
    return page.get_by_role("cell").get_by_role("link", name=str(ledger.ledger_id), exact=True)


async def looks_well(page: Page) -> None:
    """Check the page as it is now, and that no hostile text became markup."""
    await no_serious_violations(page)
    await fits_phone(page)
    assert await page.evaluate("window.bad") is None


async def test_the_list_has_filters_in_its_address(page: Page, tabs: Tabs, client: Client) -> None:
    tabs.expected.append("status of 422 .*/v1/ledgers")
    found = await client.create_ledger(metadata=HOSTILE)
    other = await client.create_ledger(ensemble_size=4, metadata={"long": "other"})
    await found.close()
    await page.goto("/#/ledgers")
    await page.get_by_text("Filter by custom metadata").click()
    await page.get_by_role("button", name="Add a pair").click()
    for name, value in HOSTILE.items():
        await page.get_by_label("Name").fill(name)
        await page.get_by_label("Value").fill(value)
        await page.get_by_role("button", name="Apply the filters").click()
        await expect(link(page, found)).to_be_visible()
        await expect(link(page, other)).to_have_count(0)
    await looks_well(page)
    await page.get_by_role("link", name="Remove all filters").click()
    await expect(link(page, other)).to_be_visible()

    await page.get_by_label("State").select_option("CLOSED")
    await page.get_by_label("Bookie").fill("bookie-1@1")
    await page.get_by_role("button", name="Apply the filters").click()
    await expect(link(page, other)).to_have_count(0)
    await page.reload()
    await expect(page.get_by_label("Bookie")).to_have_value("bookie-1@1")
    await page.get_by_label("Bookie").fill("no such bookie")
    await page.get_by_role("button", name="Apply the filters").click()
    await expect(page.get_by_role("alert")).to_contain_text("/query/bookie")


async def test_a_filter_by_log_shows_and_leads_to_the_log(page: Page, client: Client) -> None:
    log = await client.create_log("ledgers-of-it")
    await log.append(b"a record")
    await page.goto("/#/ledgers?log=ledgers-of-it")
    await expect(rows(page, "Ledgers")).to_have_count(1)
    await rows(page, "Ledgers").get_by_role("link").first.click()

    await expect(page.get_by_text("This ledger belongs to the log")).to_be_visible()
    await expect(page.get_by_role("button", name="Delete")).to_have_count(0)
    await expect(facts(page, "Log").get_by_role("link")).to_have_attribute(
        "href", "#/logs/ledgers-of-it"
    )
    await expect(rows(page, "Entries from 0").locator("pre")).to_be_visible()


async def test_a_ledger_is_found_by_its_exact_id(page: Page, tabs: Tabs, client: Client) -> None:
    ledger = await client.create_ledger(ledger_id=2**53 + 1, metadata={"exact": "yes"})
    await page.goto("/#/ledgers?metadata[exact]=yes")
    await expect(link(page, ledger)).to_have_attribute("href", f"#/ledgers/{2**53 + 1}")
    await page.get_by_label("Ledger id").fill(f" {ledger.ledger_id} ")
    await page.get_by_role("button", name="Go to the ledger").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Ledger {2**53 + 1}")
    await expect(facts(page, "State")).to_have_text("OPEN")

    tabs.expected.append("status of 404")
    await page.goto("/#/ledgers/4503599627370495")
    await expect(page.get_by_role("alert").first).to_contain_text("no-such-ledger")
    await page.goto("/#/ledgers/x")
    await expect(page.get_by_role("heading", level=1)).to_have_text("No such ledger")


async def test_a_form_creates_ledgers_or_shows_why(page: Page, tabs: Tabs, client: Client) -> None:
    # The page of the new ledger asks for its password.
    tabs.expected += ["status of 422 .*/v1/ledgers", r"status of 403 .*/v1/ledgers/\d+/"]
    await page.goto("/#/ledgers")
    await page.get_by_role("button", name="Create a ledger").click()
    dialog = page.get_by_role("dialog")
    await looks_well(page)
    await dialog.get_by_label("Write quorum (Qw)").fill("4")
    await dialog.get_by_role("button", name="Create a ledger").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("ensemble_size >= write_quorum")

    await dialog.get_by_label("Ensemble size (E)").fill("4")
    await dialog.get_by_label("Write quorum (Qw)").fill("2")
    await dialog.get_by_label("Digest").select_option("hmac-sha256")
    await dialog.get_by_label("Password (optional)").fill("correct horse ü")
    await dialog.get_by_role("button", name="Add a pair").click()
    await dialog.get_by_label("Name").fill("namespace")
    await dialog.get_by_label("Value").fill("team-a")
    await dialog.get_by_role("button", name="Create a ledger").click()
    heading = page.get_by_role("heading", level=1)
    await expect(heading).to_have_text(re.compile(r"Ledger \d+"))
    row = await client.ledger(int((await heading.inner_text()).split()[1])).info()

    sizes = tuple(row[name] for name in ("ensemble_size", "write_quorum", "ack_quorum"))
    assert (sizes, row["digest"], row["metadata"]) == (
        (4, 2, 2), "hmac-sha256", {"namespace": "team-a"},
    )  # fmt: skip


async def test_a_ledger_shows_its_facts_stripes_and_entries(page: Page, client: Client) -> None:
    ledger = await client.create_ledger(
        ensemble_size=4, write_quorum=2, ack_quorum=2, metadata=HOSTILE
    )
    document = b'{"price":1.10,"id":12345678901234567890,"<b>":[{},[]],"text":"a: \\"b\\", {c}"}'
    payloads = [document, b"<script>window.bad = 1</script>", bytes(range(256)), b"x" * 5000]
    await ledger.append_batch([*payloads, *(b"%d" % n for n in range(4, 45))])
    await show(page, ledger)
    await expect(facts(page, "State")).to_have_text("OPEN")
    await expect(facts(page, "Last add confirmed")).to_have_text("44")
    await ledger.close()
    await expect(facts(page, "State")).to_have_text("CLOSED")
    await expect(facts(page, "Last entry")).to_have_text("44")
    await expect(facts(page, "Quorums")).to_contain_text("E 4, Qw 2, Qa 2")
    for name, value in HOSTILE.items():
        await expect(rows(page, "Custom metadata").filter(has_text=name)).to_contain_text(value)

    fragment = page.get_by_role("region", name="Fragment 1", exact=True)
    members = (await ledger.info())["fragments"][0]["bookies"]
    for position, member in enumerate(members):
        row = fragment.locator("tbody tr").nth(position)
        await expect(row.get_by_role("rowheader")).to_have_text(f"{member} writable")
        stored = [entry for entry in range(4) if position in (entry, (entry + 1) % 4)]
        texts = await row.get_by_role("cell").all_inner_texts()
        assert [entry for entry, text in enumerate(texts) if "●" in text] == stored
        hidden = await row.get_by_role("cell").locator(".hidden").all_text_contents()
        assert [entry for entry, text in enumerate(hidden) if text == "stored"] == stored
    await expect(fragment).to_contain_text("from position e mod 4 on")

    entries = rows(page, "Entries from 0")
    await expect(entries).to_have_count(20)
    await expect(entries.nth(1)).to_contain_text(payloads[1].decode())
    await expect(entries.nth(2)).to_contain_text("000000f0  f0 f1")
    await entries.nth(3).get_by_role("button", name="Show all").click()
    await expect(entries.nth(3).locator("pre")).to_have_text("x" * 5000)
    for number in ("1.10", "12345678901234567890"):
        await expect(entries.nth(0).locator(".tree")).to_contain_text(number)
    await looks_well(page)
    await page.get_by_label("Show payloads as").select_option("Text")
    await expect(entries.nth(0).locator("pre")).to_have_text(document.decode())
    await page.get_by_label("Show payloads as").select_option("Hexadecimal")
    await expect(entries.nth(1)).to_contain_text("3c 73 63 72")
    await looks_well(page)

    await page.get_by_role("button", name="Next").click()
    await expect(rows(page, "Entries from 20")).to_have_count(20)
    await page.get_by_role("button", name="Next").click()
    await expect(rows(page, "Entries from 40")).to_have_count(5)
    await expect(page.get_by_role("button", name="Next")).to_be_disabled()
    await page.get_by_role("button", name="Previous").click()
    await page.get_by_label("From entry").fill("44")
    await page.get_by_role("button", name="Show the entries").click()
    await expect(rows(page, "Entries from 44")).to_have_count(1)


async def test_a_password_is_asked_once_and_unsaved(page: Page, tabs: Tabs, client: Client) -> None:
    tabs.expected.append(r"status of 403 .*/v1/ledgers/\d+/")
    ledger = await client.create_ledger(password="correct horse ü")
    await ledger.append(b"a secret")
    await show(page, ledger)
    form = page.get_by_role("form", name="Password of the ledger")
    await expect(form).to_contain_text("This ledger has a password")
    await expect(page.get_by_text("a secret")).to_have_count(0)
    await looks_well(page)
    await form.get_by_label("Ledger password").fill("wrong")
    await form.get_by_role("button").click()
    await expect(form).to_contain_text("The password is wrong")
    await form.get_by_label("Ledger password").fill("correct horse ü")
    await form.get_by_role("button").click()
    await expect(page.get_by_text("a secret")).to_be_visible()

    await page.get_by_role("button", name="Change the password").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("New password").fill("another one")
    await dialog.get_by_role("button", name="Change the password").click()
    await expect(dialog).to_have_count(0)
    await page.get_by_role("button", name="Close", exact=True).click()
    await dialog.get_by_role("button", name="Close", exact=True).last.click()
    await expect(facts(page, "State")).to_have_text("CLOSED")
    kept = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "another" not in kept
    assert "horse" not in kept
    await page.reload()
    await expect(form).to_be_visible()


async def test_a_ledger_is_deleted_by_typing_its_id(page: Page, tabs: Tabs, client: Client) -> None:
    ledger = await client.create_ledger()
    await show(page, ledger)
    await page.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name="Delete")
    await dialog.get_by_label("to confirm").fill(f"{ledger.ledger_id}0")
    await expect(button).to_be_disabled()
    await dialog.get_by_label("to confirm").fill(str(ledger.ledger_id))
    await button.click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Ledgers")
    await expect(link(page, ledger)).to_have_count(0)
    tabs.expected.append("status of 404")
    await show(page, ledger)
    await expect(page.get_by_role("alert").first).to_contain_text("no-such-ledger")


async def test_a_check_shows_what_bookies_lack_and_queues_its_repair(
    page: Page, cluster: Cluster, client: Client
) -> None:
    """The bookie is killed under the page, and lacks what was written meanwhile."""
    ledger = await client.create_ledger(ensemble_size=4, write_quorum=4, ack_quorum=2)
    await ledger.append(b"before")
    await show(page, ledger)
    await cluster.kill("bookie-4")
    standing = page.locator(".stripes tr").filter(has_text="bookie-4@1")
    await expect(standing).to_contain_text("lost")
    away = rows(page, "Copies that can't be reached")
    await expect(away).to_contain_text("3 of 4")
    await looks_well(page)
    async with aiohttp.ClientSession() as session:
        await pause_repairs(session, cluster, is_paused=True)
        await ledger.append_batch([b"during"] * 3)
        await ledger.close()
        await expect(facts(page, "State")).to_have_text("CLOSED")
        findings = rows(page, "What the check found")
        await page.get_by_role("button", name="Compare the copies").click()
        await expect(findings).to_contain_text("the bookie does not answer", timeout=MENDED_MS)

        await cluster.restart("bookie-4")
        await expect(standing).to_contain_text("writable")
        await expect(away).to_have_count(0)
        await page.get_by_role("button", name="Compare the copies").click()
        await expect(findings).to_contain_text("missing on the bookie", timeout=MENDED_MS)
        await expect(findings).to_contain_text("ntries 1 to 3")
        await looks_well(page)
        await page.get_by_role("button", name="Repair what is missing").click()
        await expect(page.get_by_text("are queued")).to_be_visible(timeout=MENDED_MS)
        await expect(rows(page, "Queued repairs")).to_contain_text("bookie-4@1")
        await pause_repairs(session, cluster, is_paused=False)
    await expect(rows(page, "Queued repairs")).to_have_count(0, timeout=MENDED_MS)
    await page.get_by_role("button", name="Compare the copies").click()
    await expect(page.get_by_text("Each bookie has all of its entries.")).to_be_visible(
        timeout=MENDED_MS
    )


async def pause_repairs(
    session: aiohttp.ClientSession, cluster: Cluster, *, is_paused: bool
) -> None:
    """Pause repairs, or resume them."""
    url = f"{cluster.gateways[0]}/v1/autorecovery"
    async with session.patch(url, json={"paused": is_paused}) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_token_sees_only_what_it_allows(
    tabs: Tabs, cluster: Cluster, client: Client
) -> None:
    made: dict[str, Any] = await client.create_token("reader", ["read:ledgers/team-b"])
    mine = await client.create_ledger(metadata={"namespace": "team-b"})
    await mine.append(b"readable")
    other = await client.create_ledger()
    tabs.expected += ["status of 401", "status of 404", "status of 403"]
    page = await tabs.open(cluster.gateways[1])
    await page.goto("/#/ledgers")
    await page.get_by_label("Token").fill(made["token"])
    await page.get_by_role("button", name="Log in").click()
    await expect(link(page, mine)).to_be_visible()
    await expect(rows(page, "Ledgers")).to_have_count(1)
    await expect(page.get_by_role("button", name="Create a ledger")).to_have_count(0)

    await link(page, mine).click()
    await expect(page.get_by_text("readable")).to_be_visible()
    for name in ("Delete", "Close", "Change the password", "Compare the copies", "Accept the loss"):
        await expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    await expect(page.get_by_role("alert")).to_have_count(0)
    await looks_well(page)
    await page.goto(f"/#/ledgers/{other.ledger_id}")
    await expect(page.get_by_role("alert").first).to_contain_text("no-such-ledger")


# Inserted as copies of one row, in one statement: what pages through them does not see how they were made.
_COPY: Final = """
ALTER TABLE ledgers DISABLE TRIGGER announce_ledger;
INSERT INTO ledgers (ledger_id, version, body)
    SELECT n, l.version, l.body FROM ledgers l, generate_series(1000001, 1000000 + {count}) n
    WHERE l.ledger_id = {ledger_id};
ALTER TABLE ledgers ENABLE TRIGGER announce_ledger;
ANALYZE;
"""


async def test_a_hundred_thousand_ledgers_are_paged(pages: Pages, servers: StoreServers) -> None:
    stores = servers.fresh()
    async with running(stores, bookies=3, gateways=1, environment=UNHURRIED) as cluster:
        async with Client(*cluster.gateways) as client:
            ledger = await client.create_ledger()
            await ledger.close()
        connection = await asyncpg.connect(stores.postgres_dsn)
        await connection.execute(_COPY.format(count=MANY, ledger_id=ledger.ledger_id))
        await connection.close()
        tabs = Tabs(pages, cluster.gateways[0])
        page = await tabs.open()
        asked: list[str] = []
        page.on(
            "request", lambda sent: asked.append(sent.url) if "/v1/ledgers" in sent.url else None
        )
        await page.goto("/#/ledgers")
        shown = rows(page, "Ledgers")
        await expect(shown).to_have_count(PAGE_ROWS)
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_text("Page 2")).to_be_visible()
        await expect(shown.first.get_by_role("link")).to_have_text(str(1_000_000 + PAGE_ROWS))
        await expect(shown).to_have_count(PAGE_ROWS)
        assert len(asked) == 2, asked
        await no_serious_violations(page)

        await page.goto(f"/#/ledgers/{1_000_000 + MANY}")
        await expect(facts(page, "State")).to_have_text("CLOSED")
        await tabs.close()
        assert not tabs.unexpected
