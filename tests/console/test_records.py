"""A log's records: pages, values of all kinds, the search, the live tail, and appends by hand."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.support import Tabs, fits_phone, no_serious_violations
from tests.console.test_logs import HOSTILE, ask, confirm, make, opened

pytestmark = pytest.mark.asyncio(loop_scope="package")

EXACT: Final = '{"b":9007199254740993,"1":1.10,"b":12345678901234567.89,"list":[1,{"deep":null}]}'


def lines(page: Page) -> Locator:
    """The records that the page shows."""
    return page.locator("ol.records > li")


def numbered(count: int) -> Sequence[dict[str, Any]]:
    return [
        {"text": f"record {n}", "key": f"k{n % 10}", "headers": {"n": str(n)}} for n in range(count)
    ]


async def unfold(page: Page, text: str) -> Locator:
    """Open the record whose line has this text."""
    line = lines(page).filter(has_text=text).first
    await line.locator("summary").first.click()
    return line


async def test_records_are_paged_both_ways_and_found_by_offset_and_time(page: Page) -> None:
    await make(page, "paged", list(numbered(120)))
    await page.goto("/#/logs/paged/records")
    await expect(page.get_by_text("Offsets 70 to 119.")).to_be_visible()
    await page.get_by_role("button", name="Older").click()
    await expect(page.get_by_text("Offsets 20 to 69.")).to_be_visible()
    await page.get_by_role("button", name="Older").click()
    await expect(page.get_by_text("Offsets 0 to 19.")).to_be_visible()
    await expect(page.get_by_role("button", name="Older")).to_be_disabled()
    await page.get_by_role("button", name="Newer").click()
    await expect(page.get_by_text("Offsets 20 to 69.")).to_be_visible()

    await page.get_by_label("Begin at").select_option("offset")
    await page.get_by_role("textbox", name="Offset").fill("100")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text("Offsets 100 to 119.")).to_be_visible()
    await page.get_by_role("button", name="Newer").click()
    await expect(page.get_by_text("no record at offset 120 or later")).to_be_visible()
    await page.get_by_label("Begin at").select_option("time")
    await page.get_by_label("Time, in your time zone").fill("2000-01-01T00:00:00")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text("Offsets 0 to 49.")).to_be_visible()
    await no_serious_violations(page)
    await fits_phone(page)

    await page.goto("/#/logs/paged/records?from=7")
    await expect(page.get_by_text("Offsets 7 to 56.")).to_be_visible()


async def test_an_offset_outside_the_log_leads_back_into_it(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 41[06] ")
    batches = [[{"text": f"record {n}"}] for n in range(4)]
    await make(page, "cut", *batches, rolls=True)
    first = (await ask(page, "POST", "/v1/logs/cut/truncate", {"before": 2}))["first_offset"]
    assert first == 2
    await page.goto("/#/logs/cut/records?from=0")
    await page.get_by_role("button", name=f"Go to offset {first}").click()
    await expect(page.get_by_text(f"Offsets {first} to 3.")).to_be_visible()
    await page.goto("/#/logs/cut/records?from=900")
    await page.get_by_role("button", name="Go to offset 4").click()
    await expect(page.get_by_text("no record at offset 4")).to_be_visible()


async def test_values_are_shown_as_they_were_stored(page: Page, tmp_path: Path) -> None:
    data = bytes(range(256)) * 8
    records: list[dict[str, Any]] = [
        {"text": EXACT, "key": "exact", "headers": {"trace": "5f3a"}},
        {"data": base64.b64encode(data).decode(), "key": "/w=="},
        {"text": "long " * 2000},
        {"text": "[" * 500 + "]" * 500, "key": "deep"},
        {"text": '{"open":', "key": "broken"},
    ]
    await make(page, "values", records)
    await page.goto("/#/logs/values/records")
    exact = await unfold(page, "exact")
    for text in ('"b": 9007199254740993', '"1": 1.10', '"b": 12345678901234567.89', "trace"):
        await expect(exact).to_contain_text(text)
    assert (await exact.locator(".tree").inner_text()).index('"b"') < (
        await exact.locator(".tree").inner_text()
    ).index('"1"')
    await exact.locator(".tree summary", has_text="list").click()
    await expect(exact.locator(".tree").get_by_text('"deep"')).to_have_count(0)
    time = exact.locator("summary time")
    await expect(time).to_have_attribute("title", re.compile("Z$"))

    binary = await unfold(page, "0xff")
    await expect(binary).to_contain_text("00000010  10 11 12")
    await binary.get_by_role("button", name="Show all of 2,048 bytes").click()
    await expect(binary).to_contain_text("000007f0  f0 f1")
    async with page.expect_download() as download:
        await binary.get_by_role("button", name="Download").click()
    saved = tmp_path / "value"
    await (await download.value).save_as(saved)
    assert saved.read_bytes() == data
    assert (await download.value).suggested_filename == "values-1.bin"

    long = await unfold(page, "long long")
    assert len(await long.locator("pre").inner_text()) < 5000
    await long.get_by_role("button", name="Show all 10,000 characters").click()
    assert len(await long.locator("pre").inner_text()) >= 9999
    await unfold(page, "[[[[")
    await page.get_by_label("Show values as").select_option("json")
    await expect(await unfold(page, "broken")).to_contain_text("The value is not JSON")
    await page.get_by_label("Show values as").select_option("hex")
    await expect(exact).to_contain_text("7b 22 62 22")
    await no_serious_violations(page)
    await fits_phone(page)


async def test_hostile_records_appear_as_text(page: Page) -> None:
    record = {"text": HOSTILE, "key": HOSTILE, "headers": {HOSTILE: HOSTILE, "__proto__": "p"}}
    member = {"text": '{"__proto__": {"x": 1}, "' + "<img src=x onerror=alert(1)>" + '": 2}'}
    await make(page, "hostile", [record, member])
    await page.goto("/#/logs/hostile/records")
    shown = await unfold(page, "<script>")
    await expect(shown.locator("pre")).to_have_text(HOSTILE)
    await expect(shown.locator("dt").filter(has_text="<script>")).to_have_count(1)
    await expect(shown).to_contain_text("__proto__")
    await expect(await unfold(page, "onerror")).to_contain_text('"<img src=x onerror=alert(1)>": 2')
    await expect(page).not_to_have_title("owned")
    await expect(page.locator("main img, main script")).to_have_count(0)
    await fits_phone(page)


async def test_a_filter_and_a_search_over_pages(page: Page) -> None:
    await make(page, "searched", list(numbered(3000)))
    await page.goto("/#/logs/searched/records?from=0")
    await page.get_by_label("Text", exact=True).fill("record 1")
    await expect(page.get_by_text("11 of 50 records match")).to_be_visible()
    await page.get_by_label("Filter").select_option("key")
    await page.get_by_label("Text", exact=True).fill("k7")
    await expect(lines(page)).to_have_count(5)

    await page.get_by_label("Filter").select_option("value")
    await page.get_by_label("Text", exact=True).fill("record 2999")
    await expect(lines(page)).to_have_count(0)
    await page.get_by_role("button", name="Search newer").click()
    found = page.get_by_role("region", name="Search")
    await expect(found).to_contain_text("Looked at 2,950 records, up to offset 2,999. 1 match.")
    await expect(found).to_contain_text("The log ends here.")
    await expect(lines(page)).to_have_count(1)
    await no_serious_violations(page)
    await page.get_by_role("button", name="Back to the page").click()

    await page.get_by_label("Begin at").select_option("-50")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text("Offsets 2,950 to 2,999")).to_be_visible()
    await page.get_by_label("Filter").select_option("header")
    await page.get_by_label("Text", exact=True).fill("n: 5")
    await page.get_by_role("button", name="Search older").click()
    await expect(found).to_contain_text("down to offset")
    await expect(found).to_contain_text("match")
    await page.get_by_role("button", name="Search on").click()
    await expect(found).to_contain_text("The log begins here.")


async def test_a_search_is_stopped_and_says_how_far_it_looked(page: Page) -> None:
    await make(page, "stopped", list(numbered(1500)))
    await page.goto("/#/logs/stopped/records?from=0")
    await page.get_by_label("Text", exact=True).fill("nothing")
    await expect(page.get_by_text("0 of 50 records match")).to_be_visible()
    # The second page of the search never comes.
    await page.route(re.compile("from=1050"), lambda _: None)
    await page.get_by_role("button", name="Search newer").click()
    found = page.get_by_role("region", name="Search")
    await expect(found).to_contain_text("Searching: looked at 1,000 records, up to offset 1,049.")
    await page.get_by_role("button", name="Stop").click()
    await expect(found).to_contain_text("The search stopped before.")
    await page.unroute_all()
    await page.get_by_role("button", name="Search on").click()
    await expect(found).to_contain_text("The log ends here.")


async def test_the_tail_is_live_pauses_and_reconnects(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("ERR_FAILED|ERR_CONNECTION")
    path = "/v1/logs/tailed/records"
    await make(page, "tailed", [{"text": f"old {n}"} for n in range(30)])
    await page.goto("/#/logs/tailed/tail")
    await expect(lines(page)).to_have_count(10)
    await ask(page, "POST", path, {"text": "first news"})
    await expect(lines(page).first).to_contain_text("first news")
    await no_serious_violations(page)
    await fits_phone(page)

    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("paused", exact=True)).to_be_visible()
    await ask(page, "POST", path, {"text": "in the pause"})
    await page.get_by_role("button", name="Continue").click()
    await expect(lines(page).first).to_contain_text("in the pause")

    await page.route("**/records?*", lambda route: route.abort())
    await ask(page, "POST", path, {"text": "ends the poll"})
    await expect(page.get_by_text("reconnecting", exact=True)).to_be_visible()
    await ask(page, "POST", path, {"text": "while it is away"})
    await page.unroute_all()
    await expect(lines(page).first).to_contain_text("while it is away")
    await expect(page.get_by_text("live", exact=True)).to_be_visible()

    await ask(page, "POST", path, {"records": [{"text": f"many {n}"} for n in range(300)]})
    await expect(lines(page).first).to_contain_text("many 299")
    await expect(lines(page)).to_have_count(200)
    await expect(page.get_by_text(re.compile(r"11\d dropped from view"))).to_be_visible()
    await page.get_by_label("Text", exact=True).fill("wanted")
    await ask(page, "POST", path, {"records": [{"text": "other"}, {"text": "wanted"}]})
    await expect(lines(page).first).to_contain_text("wanted")
    await expect(page.get_by_text("1 did not match the filter")).to_be_visible()
    await ask(page, "POST", "/v1/logs/tailed/close")
    await expect(page.get_by_text("ended", exact=True)).to_be_visible()


async def test_records_are_appended_by_hand(page: Page, tabs: Tabs) -> None:
    tabs.expected.append("status of 422 .*/records")
    await make(page, "written")
    await page.goto("/#/logs/written/records")
    form = await opened(page, "Append")
    await form.get_by_label("Value is").select_option("json")
    await form.get_by_label("Value", exact=True).fill('{"n": 9007199254740993,')
    await confirm(page, "Append")
    await expect(form.get_by_role("alert")).to_contain_text("record 1 is not JSON")
    await form.get_by_label("Value", exact=True).fill('{"n": 9007199254740993}')
    await form.get_by_label(re.compile("^Key")).fill("schlüssel")
    await form.get_by_label("Headers").fill("trace: a:b\nkind: test")
    await form.get_by_role("button", name="Another record").click()
    second = form.get_by_role("group", name="Record 2")
    await second.get_by_label("Value is").select_option("data")
    await second.get_by_label("Value", exact=True).fill("no base64!")
    await second.get_by_label(re.compile("^Key")).fill("ü")
    await no_serious_violations(page)
    await fits_phone(page)
    await confirm(page, "Append")
    await expect(form.get_by_role("alert")).to_contain_text("/records/1/data")
    await second.get_by_label("Value", exact=True).fill("AAH/")
    await confirm(page, "Append")

    await expect(page.get_by_text("The records have the offsets 0 to 1.")).to_be_visible()
    await expect(lines(page)).to_have_count(2)
    found = (await ask(page, "GET", "/v1/logs/written/records?encoding=text"))["records"]
    assert found[0]["text"] == '{"n": 9007199254740993}'
    assert (found[0]["key"], found[1]["key"]) == ("schlüssel", "ü")
    assert found[0]["headers"] == {"trace": "a:b", "kind": "test"}
    assert found[1]["data_base64"] == "AAH/"
