"""The pages of logs: the list, a log with its settings, ledgers and consumers, and 10,000 logs."""

import re
from typing import Any, Final
from urllib.parse import quote

import asyncpg
import pytest
from playwright.async_api import Locator, Page, expect

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.console.support import Tabs, fits_phone, log_in, no_serious_violations

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE: Final = "<script>document.title = 'owned'</script><b>\u202e" + "x" * 200
MANY: Final = 10_000
COPIES: Final = """
ALTER TABLE logs DISABLE TRIGGER USER;
INSERT INTO logs (name, version, body)
    SELECT 'many-' || lpad(n::text, 5, '0'), 1, l.body FROM logs l, generate_series(0, {count} - 1) n
    WHERE l.name = 'pattern';
ALTER TABLE logs ENABLE TRIGGER USER;
ANALYZE logs;
"""


async def ask(page: Page, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """A request beside the page's own. Returns the JSON of the response."""
    response = await page.request.fetch(path, method=method, data=body, headers=headers)
    assert response.ok, await response.text()
    return await response.json() if await response.body() else None


async def make(
    page: Page, name: str, *batches: list[dict[str, Any]], rolls: bool = False, **settings: Any
) -> None:
    """Create a log, and append batches of records. `rolls`: each batch gets a ledger of its own."""
    await ask(page, "PUT", f"/v1/logs/{name}", settings)
    for records in batches:
        await ask(page, "POST", f"/v1/logs/{name}/records", {"records": records})
        if rolls:
            await ask(page, "POST", f"/v1/logs/{name}/roll")


def dialog(page: Page) -> Locator:
    """The open dialog."""
    return page.get_by_role("dialog")


async def opened(page: Page, label: str) -> Locator:
    """Press a button that opens a dialog."""
    await page.get_by_role("button", name=label, exact=True).click()
    return dialog(page)


async def confirm(page: Page, label: str, typed: str = "") -> None:
    """Type the name if it has to be typed, and press the button of the open dialog."""
    button = dialog(page).get_by_role("button", name=label, exact=True)
    if typed:
        await expect(button).to_be_disabled()
        await dialog(page).get_by_label("to confirm").fill(typed)
    await button.click()


def fact(page: Page, name: str) -> Locator:
    """The value of a fact."""
    return page.locator("dl.facts > div", has=page.get_by_text(name, exact=True)).locator("dd")


async def test_the_list_is_searched_and_a_row_shows_bytes_and_lag(page: Page) -> None:
    await make(page, "orders-a", [{"text": "one"}, {"text": "two"}])
    await make(page, "orders-b")
    await make(page, "payments", retention_seconds=604800)
    await ask(page, "POST", "/v1/logs/orders-a/consumers/mail/lease", {"holder": "worker-7"})
    await page.goto("/#/logs")
    await expect(page.get_by_role("row").filter(has_text="payments")).to_contain_text("7 d")

    await page.get_by_label("Name begins with").fill("orders-")
    await expect(page.get_by_role("link", name="orders-b")).to_be_visible()
    await expect(page.get_by_role("link", name="payments")).to_have_count(0)
    await page.get_by_role("button", name="Details of orders-a").click()
    consumers = page.get_by_role("region", name="Consumers of orders-a")
    await expect(consumers).to_contain_text("2 records")
    await expect(consumers).to_contain_text("worker-7")
    await no_serious_violations(page)
    await fits_phone(page)

    await page.get_by_label("Name begins with").fill("<b>")
    await expect(page.get_by_role("status")).to_contain_text("No log's name begins like this")
    await page.get_by_label("Name begins with").fill("zz")
    await expect(page.get_by_text("No log has a name with this beginning.")).to_be_visible()
    await page.get_by_text("Consumers of all logs").click()
    await expect(page.get_by_role("region", name="Consumers of all logs")).to_contain_text("mail")

    await page.get_by_label("Name begins with").fill("orders-a")
    await page.get_by_role("link", name="orders-a").first.click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("orders-a")


async def test_a_log_is_created_with_settings(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 409 .*/v1/logs/created")
    await page.goto("/#/logs")
    form = await opened(page, "Create a log")
    await form.get_by_label(re.compile("^Name")).fill("not a name")
    await confirm(page, "Create a log")
    await expect(form.get_by_role("alert")).to_contain_text("letters, digits")
    await form.get_by_label(re.compile("^Name")).fill("created")
    await form.get_by_label("New ledger after bytes").fill("1 parsec")
    await confirm(page, "Create a log")
    await expect(form.get_by_role("alert")).to_contain_text("must be a whole number")
    await form.get_by_label("New ledger after bytes").fill("64 MiB")
    await form.get_by_label("Keep for").fill("7 d")
    await form.get_by_label("Cleanup").select_option("compact,delete")
    await form.get_by_label("Keep tombstones for").fill("2 h")
    await form.get_by_label("Metadata").fill(f"note = {HOSTILE}")
    await no_serious_violations(page)
    await confirm(page, "Create a log")

    await expect(page).to_have_url(re.compile("#/logs/created$"))
    await expect(fact(page, "New ledger after bytes")).to_have_text("64.0 MiB")
    await expect(fact(page, "note")).to_have_text(HOSTILE)
    settings = (await ask(page, "GET", "/v1/logs/created"))["settings"]
    assert (settings["roll_bytes"], settings["retention_seconds"]) == (64 << 20, 604800)
    assert (settings["cleanup_policy"], settings["delete_retention_s"]) == ("compact,delete", 7200)
    await expect(fact(page, "Cleanup")).to_have_text("compact,delete")
    await expect(fact(page, "Compact closed ledgers after time")).to_have_text("at once")

    await page.goto("/#/logs")
    form = await opened(page, "Create a log")
    await form.get_by_label(re.compile("^Name")).fill("created")
    await confirm(page, "Create a log")
    await expect(form.get_by_role("alert")).to_contain_text("exists")


async def test_a_change_of_settings_names_what_changed_before_it(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 412 .*/v1/logs/changed")
    await make(page, "changed")
    await page.goto("/#/logs/changed")
    form = await opened(page, "Change settings")
    await form.get_by_label("Keep for").fill("2 h")
    await ask(page, "PATCH", "/v1/logs/changed", {"roll_entries": 77})
    await confirm(page, "Change settings")

    alert = form.get_by_role("alert")
    await expect(alert).to_contain_text("“New ledger after append requests” is 77 now.")
    await expect(alert).to_contain_text("anonymous sent the last change (patchLog)")
    await confirm(page, "Change settings")
    await expect(page.get_by_text("The settings are changed.")).to_be_visible()
    await expect(fact(page, "Keep for")).to_have_text("2 h")
    await expect(fact(page, "New ledger after append requests")).to_have_text("77")


async def test_ledgers_are_a_time_line_in_pages(page: Page) -> None:
    batches = [[{"text": f"record {n}"}] for n in range(55)]
    await make(page, "rolled", *batches, rolls=True, merge_below_bytes=0)
    ledgers = (await ask(page, "GET", "/v1/logs/rolled"))["ledgers"]
    assert len(ledgers) == 56
    await page.goto("/#/logs/rolled")

    table = page.get_by_role("region", name="Ledgers of the log")
    await expect(table.locator("tbody tr")).to_have_count(50)
    await expect(page.locator(".timeline a")).to_have_count(50)
    newest = table.get_by_role("link", name=str(ledgers[-1]["ledger_id"]), exact=True)
    await expect(newest).to_have_attribute("href", f"#/ledgers/{ledgers[-1]['ledger_id']}")
    await expect(table.locator("tbody tr").nth(1)).to_contain_text(re.compile(r"\d+ B"))
    await expect(table.locator("tbody tr").nth(1)).to_contain_text("CLOSED")
    await no_serious_violations(page)
    await fits_phone(page)
    await page.get_by_role("button", name="Next").click()
    await expect(table.locator("tbody tr")).to_have_count(len(ledgers) - 50)
    await expect(table.locator("tbody tr").last).to_contain_text("0 to 0")

    await page.get_by_role("button", name="Previous").click()
    await opened(page, "Roll")
    await confirm(page, "Roll")
    await expect(page.get_by_text("The log continues in a new ledger.")).to_be_visible()


async def test_a_log_is_protected_truncated_closed_and_deleted(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 404 .*/v1/logs/ends")
    batches = [[{"text": "a"}, {"text": "b"}], [{"text": "c"}], [{"text": "d"}], [{"text": "e"}]]
    await make(page, "ends", *batches, rolls=True, deletion_protection=True)
    await page.goto("/#/logs/ends")
    await expect(page.get_by_role("button", name="Delete")).to_be_disabled()
    await expect(page.get_by_text("until “Change settings” switches it off")).to_be_visible()
    form = await opened(page, "Change settings")
    await form.get_by_role("checkbox").uncheck()
    await confirm(page, "Change settings")

    form = await opened(page, "Truncate")
    await form.get_by_label("find the offset").fill("2000-01-01T00:00:00")
    await form.get_by_role("button", name="Find the offset").click()
    await expect(form.get_by_label("Drop records below offset")).to_have_value("0")
    await form.get_by_label("Drop records below offset").fill("3")
    await expect(form.get_by_role("status")).to_contain_text(
        "This drops 2 of 5 ledgers, at most 3 records."
    )
    await confirm(page, "Truncate", "ends")
    await expect(page.get_by_text("The log begins at offset 3 now.")).to_be_visible()

    await opened(page, "Close for good")
    await confirm(page, "Close for good", "ends")
    await expect(page.get_by_role("heading", level=1)).to_contain_text("CLOSED")
    await expect(page.get_by_role("button", name="Append")).to_have_count(0)
    await opened(page, "Delete")
    await confirm(page, "Delete", "ends")
    await expect(page).to_have_url(re.compile("#/logs$"))
    await page.goto("/#/logs/ends")
    await expect(page.get_by_role("alert")).to_contain_text("No such log")


async def test_consumers_are_reset_and_deleted(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 409 .*/consumers/mail")
    await make(page, "consumed", [{"text": str(n)} for n in range(10)])
    path = "/v1/logs/consumed/consumers/mail"
    lease = await ask(page, "POST", f"{path}/lease", {"holder": HOSTILE[:200], "lease_ms": 600_000})
    fencing = {"Fencing-Token": str(lease["lease"]["fencing_token"])}
    await ask(page, "PUT", path, {"offset": 4}, **fencing)
    await page.goto("/#/logs/consumed/consumers")

    table = page.get_by_role("region", name="Consumers of the log")
    await expect(table).to_contain_text("6 records")
    await expect(table).to_contain_text(HOSTILE[:200])
    await no_serious_violations(page)
    await fits_phone(page)
    await opened(page, "Delete")
    await confirm(page, "Delete", "mail")
    await expect(dialog(page).get_by_role("alert")).to_contain_text("holds the lease")
    await dialog(page).get_by_role("button", name="Cancel").click()
    form = await opened(page, "Reset")
    await form.get_by_label("Continue at").select_option("offset")
    await form.get_by_role("textbox", name="Offset").fill("-3")
    await confirm(page, "Reset")
    await expect(table).to_contain_text("3 records")
    form = await opened(page, "Reset")
    await form.get_by_label("Continue at").select_option("time")
    await form.get_by_label("Time, in your time zone").fill("2000-01-01T00:00:00")
    await confirm(page, "Reset")
    await expect(table).to_contain_text("10 records")
    await opened(page, "Delete")
    await confirm(page, "Delete", "mail")
    await expect(page.get_by_text("No consumer. A program creates one")).to_be_visible()


async def test_queues_are_created_redriven_and_deleted(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 422 .*/queues/mail")
    await make(page, "queued", [{"text": str(n)} for n in range(5)])
    await make(page, "queued.dead")
    await page.goto("/#/logs/queued/queues")
    await expect(page.get_by_text("No queue. A queue gives")).to_be_visible()
    form = await opened(page, "Create a queue")
    await form.get_by_label("Name").fill("not a name")
    await confirm(page, "Create a queue")
    await expect(form.get_by_role("alert")).to_contain_text("letters, digits")
    await form.get_by_label("Name").fill("mail")
    await form.get_by_label("Attempts").fill("1")
    await confirm(page, "Create a queue")
    await expect(form.get_by_role("alert")).to_contain_text("dead_letter_log")
    await form.get_by_label("Dead-letter log").fill("queued.dead")
    await no_serious_violations(page)
    await confirm(page, "Create a queue")
    await expect(page.get_by_text("The queue mail gives records")).to_be_visible()

    path = "/v1/logs/queued/queues/mail"
    claimed = (await ask(page, "POST", f"{path}/claim", {"max": 3}))["records"]
    refused = {"claims": [{"claim": claimed[0]["claim"], "offsets": [0]}]}
    await ask(page, "POST", f"{path}/nak", refused)
    table = page.get_by_role("region", name="Queues of the log")
    await expect(table.locator("[data-name='Dead letters']")).to_have_text("1")
    await expect(table.locator("[data-name='Not done']")).to_have_text("4")
    await expect(table.locator("[data-name='Workers have']")).to_have_text("2")
    await expect(table.locator("[data-name='Oldest']")).to_contain_text("ago")
    await page.get_by_role("button", name="Details of mail").click()
    await expect(fact(page, "Given and not done")).to_have_text("2 of at most 1,000")
    await no_serious_violations(page)
    await fits_phone(page)

    await opened(page, "Redrive")
    await confirm(page, "Redrive")
    await expect(page.get_by_text("Dead letters that were sent back: 1.")).to_be_visible()
    await expect(table.locator("[data-name='Not done']")).to_have_text("5")
    await opened(page, "Delete")
    await confirm(page, "Delete", "mail")
    await expect(page.get_by_text("No queue. A queue gives")).to_be_visible()


async def test_a_token_for_reading_one_log_changes_nothing(
    cluster: Cluster, admin: str, page: Page, tabs: Tabs
) -> None:
    await make(page, "readable", [{"text": "seen"}])
    await make(page, "secret")
    async with Client(cluster.gateways[0], token=admin) as client:
        token = (await client.create_token("reader", ["read:logs/readable"]))["token"]
    tabs.expected += ["status of 401", "status of 403 .*/v1/logs/secret"]
    limited = await tabs.open(cluster.gateways[1])
    await log_in(limited, token)
    await expect(limited.get_by_role("link", name="readable")).to_be_visible()
    await expect(limited.get_by_role("link", name="secret")).to_have_count(0)
    await expect(limited.get_by_role("button", name="Create a log")).to_have_count(0)

    await limited.get_by_role("link", name="readable").click()
    await expect(fact(limited, "Records")).to_have_text("1")
    for label in ("Append", "Roll", "Change settings", "Truncate", "Close for good", "Delete"):
        await expect(limited.get_by_role("button", name=label)).to_have_count(0)
    await limited.get_by_role("link", name="Records").click()
    await expect(limited.get_by_text("seen")).to_be_visible()
    await expect(limited.get_by_role("button", name="Append")).to_have_count(0)
    await limited.evaluate("location.hash = '#/logs/secret/records'")
    await expect(limited.get_by_text("does not allow reading the records")).to_be_visible()


async def test_names_in_the_address_appear_as_text(page: Page) -> None:
    await page.goto(f"/#/logs/{quote(HOSTILE, safe='')}")
    await expect(page.get_by_role("main")).to_contain_text(HOSTILE)
    await expect(page).not_to_have_title("owned")
    name = "n" * 200
    await make(page, name, [{"text": "a"}])
    await page.goto(f"/#/logs/{name}")
    await expect(page.get_by_role("heading", level=1)).to_contain_text(name)
    await fits_phone(page)


async def test_ten_thousand_logs_are_paged_one_request_each(cluster: Cluster, page: Page) -> None:
    await make(page, "pattern")
    dsn = cluster.settings.postgres_dsn
    assert dsn is not None
    connection = await asyncpg.connect(dsn.get_secret_value())
    try:
        await connection.execute(COPIES.format(count=MANY))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.partition("/v1/")[2]))
        await page.goto("/#/logs?prefix=many-")

        rows = page.get_by_role("region", name="Logs").locator("tbody tr")
        await expect(rows).to_have_count(50)
        assert {path.partition("?")[0] for path in asked if path} == {"caller", "logs"}
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_role("link", name="many-00050", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Previous").click()
        await expect(page.get_by_role("link", name="many-00000", exact=True)).to_be_visible()
        await page.get_by_label("Name begins with").fill("many-0999")
        await expect(rows).to_have_count(10)
        await fits_phone(page)
    finally:
        await connection.execute("DELETE FROM logs WHERE name LIKE 'many-%'")
        await connection.close()
