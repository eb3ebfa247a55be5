"""`make screenshots`: pictures of the console beside a cluster under load, for the README and `docs/guides/console.md`.

The cluster has zones, logs with a consumer and a producer, and at last a bookie that is killed.
"""

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Final

from playwright.async_api import Page, ViewportSize
from rich.console import Console

from loadtest.cluster import running
from loadtest.program import Teller
from quorumlog.client import Client, Record
from tests.support.browser import chromium, page

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "console"
_LOGS: Final = ("orders", "payments", "shipments", "clicks", "invoices", "audit-trail")
_LOAD_S: Final = 150
"""The gateways keep a value of each rate for 15 s."""
_SIZE: Final[ViewportSize] = {"width": 1280, "height": 800}
_PAGES: Final = {
    "logs": "/#/logs",
    "log": "/#/logs/orders",
    "ledger": "/#/ledgers/1",
    "repair": "/#/repair",
    "api": "/docs",
}
"""The pages without a problem of the cluster, by the names of their pictures."""


async def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    console = Console()
    async with (
        running(None, bookies=5, gateways=2) as cluster,
        Client(*cluster.gateways) as client,
        chromium() as browser,
        page(browser, cluster.gateways[0]) as shown,
    ):
        await shown.set_viewport_size(_SIZE)
        load = asyncio.create_task(_load(client))
        with Teller(console) as teller:
            for second in range(_LOAD_S):
                teller.show("the cluster works", second, _LOAD_S)
                await asyncio.wait({load}, timeout=1)
                if load.done():
                    await load
        for name, path in _PAGES.items():
            await _take(shown, cluster.gateways[0] + path, name)
        await cluster.kill("bookie-3")
        await shown.goto(f"{cluster.gateways[0]}/#/")
        await shown.get_by_text("lost", exact=True).first.wait_for()
        await _take(shown, f"{cluster.gateways[0]}/#/", "overview")
        await shown.emulate_media(color_scheme="dark")
        await _take(shown, f"{cluster.gateways[0]}/#/", "overview-dark")
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load


async def _load(client: Client) -> None:
    """Append to all logs, and commit the offsets of a consumer of the first, until cancelled."""
    logs = [await client.create_log(name) for name in _LOGS]
    async with logs[0].consumer("billing", holder="billing-1") as consumer:
        for number in itertools.count():
            value = {
                "order": number,
                "state": "new" if number % 3 else "paid",
                "total": number % 97,
            }
            record = Record(json.dumps(value).encode(), f"customer-{number % 50}".encode())
            for place, log in enumerate(logs):
                done = await log.append(*[record] * (20 if place == 0 else 1))
                if place == 0 and number % 50 == 0:
                    await consumer.commit(done.first_offset)
            await asyncio.sleep(0.02)


async def _take(shown: Page, url: str, name: str) -> None:
    await shown.goto(url)
    await shown.wait_for_load_state("networkidle")
    await shown.screenshot(path=FOLDER / f"{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
