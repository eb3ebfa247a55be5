"""`make screenshots`: pictures of the console beside a cluster under load, for the README and `docs/guides/console.md`.

The cluster has zones, logs with a consumer and a producer, and at last a bookie that is killed.
"""

import asyncio
import contextlib
import itertools
import json
import math
from pathlib import Path
from typing import Final

import aiohttp
from playwright.async_api import Page, ViewportSize, expect
from rich.console import Console

from loadtest.cluster import running
from loadtest.program import Teller
from quorumlog.client import Client, Record
from tests.support.browser import chromium, page

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "console"
_LOGS: Final = ("orders", "payments", "shipments", "clicks", "invoices", "audit-trail")
_LOAD_S: Final = 240
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
    async with (
        running(None, bookies=5, gateways=2) as cluster,
        Client(*cluster.gateways) as client,
    ):
        load = asyncio.create_task(_load(client, cluster.gateways[0]))
        with Teller(Console()) as teller:
            for second in range(_LOAD_S):
                teller.show("the cluster works", second, _LOAD_S)
                await asyncio.wait({load}, timeout=1)
                if load.done():
                    await load
        async with chromium() as browser, page(browser, cluster.gateways[0]) as shown:
            await shown.set_viewport_size(_SIZE)
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


async def _load(client: Client, gateway: str) -> None:
    """Append to all logs by the SDK and over HTTP, read, and commit offsets, until cancelled."""
    logs = [await client.create_log(name) for name in _LOGS]
    async with (
        aiohttp.ClientSession(gateway, raise_for_status=True) as http,
        logs[0].consumer("billing", holder="billing-1") as consumer,
    ):
        for number in itertools.count():
            value = {"order": number, "state": "new" if number % 3 else "paid"}
            record = Record(json.dumps(value).encode(), f"customer-{number % 50}".encode())
            done = await logs[0].append(*[record] * 20)
            for name in _LOGS[1:]:
                await http.post(f"/v1/logs/{name}/records", json={"json": value})
            if number % 10 == 0:
                await http.get(f"/v1/logs/{_LOGS[0]}/records?from={done.first_offset}")
            if number % 50 == 0:
                await consumer.commit(done.first_offset)
            await asyncio.sleep(0.005 * (2 + math.sin(number / 300)))


async def _take(shown: Page, url: str, name: str) -> None:
    await shown.goto(url)
    await shown.wait_for_load_state("networkidle")
    await expect(shown.get_by_text("Loading")).to_have_count(0)
    await shown.screenshot(path=FOLDER / f"{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
