"""The guide's programs for the TypeScript client of Durable Streams, in Node and in a browser, as the page has them."""

import asyncio
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from playwright.async_api import Browser, expect

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from tests.cluster.examples.support import ROOT, losing_answers, site
from tests.support.browser import page
from tests.unit.client.test_guides import BLOCK, output_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

GUIDE: Final = ROOT / "docs" / "guides" / "durable-streams.md"


def blocks(language: str) -> list[tuple[str, str | None]]:
    """The programs of the page in a language, each with what it prints."""
    found = [(one[2], one[3]) for one in BLOCK.finditer(GUIDE.read_text()) if one[1] == language]
    assert found, language
    return found


def at(source: str, gateways: Sequence[str]) -> str:
    """A program of the page, for a cluster of other ports."""
    for number, url in enumerate(gateways):
        assert f"http://127.0.0.1:{8080 + number}" in source
        source = source.replace(f"http://127.0.0.1:{8080 + number}", url)
    return source


async def node(source: str, packages: Path) -> str:
    """What a program prints that uses the packages."""
    file = packages / f"{uuid.uuid4().hex}.mjs"
    file.write_text(source)
    try:
        return await output_of(["node", str(file)], packages)
    finally:
        file.unlink()


@pytest.mark.parametrize("first", ["answers", "is gone", "loses answers"])
async def test_the_program_for_node_prints_what_the_guide_says(
    cluster: Cluster, packages: Path, session: aiohttp.ClientSession, first: str
) -> None:
    """Whatever the gateway does that it asks first."""
    ((source, output),) = [block for block in blocks("js") if block[1] is not None]
    (nobody,) = free_ports(1)
    one, other = cluster.gateways
    async with losing_answers(session, one) as losing:
        urls = {"answers": one, "is gone": f"http://127.0.0.1:{nobody}", "loses answers": losing}

        printed = await node(at(source, (urls[first], other)), packages)

    assert printed == output


async def test_the_page_shows_what_is_appended_by_it_and_by_others(
    cluster: Cluster,
    packages: Path,
    browser: Browser,
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    ((html, _),) = blocks("html")
    ((source, _),) = [block for block in blocks("js") if block[1] is None]
    stream = f"/v1/stream/notes-{uuid.uuid4().hex}"
    source = at(source.replace("/v1/stream/notes", stream), cluster.gateways)
    files = {"/": html, "/notes.js": await bundled(source, packages, tmp_path)}

    async with site(files) as origin, page(browser, origin + "/") as shown:
        await shown.locator("#text").fill("from the page")
        await shown.locator("#text").press("Enter")
        await expect(shown.locator("#notes > *")).to_have_text(["from the page"])
        body = b'[{"text": "from elsewhere"}, {"text": "<b>no HTML</b>"}]'
        for url in cluster.gateways:
            headers = {"Content-Type": "application/json"}
            async with session.post(url + stream, data=body, headers=headers) as answer:
                assert answer.status == 204, await answer.text()
        five = ["from the page", *["from elsewhere", "<b>no HTML</b>"] * 2]
        await expect(shown.locator("#notes > *")).to_have_text(five)
        # Another visitor sees all of it from the beginning.
        async with page(browser, origin + "/") as later:
            await expect(later.locator("#notes > *")).to_have_text(five)


async def bundled(source: str, packages: Path, folder: Path) -> str:
    """A program with its packages in one file, by the guide's command."""
    (command,) = [
        line.partition("`")[2].partition("`")[0]
        for line in GUIDE.read_text().splitlines()
        if line.startswith("`npx esbuild")
    ]
    (folder / "notes.mjs").write_text(source)
    await asyncio.to_thread(
        shutil.copytree, packages / "node_modules", folder / "node_modules", symlinks=True
    )
    await output_of(["sh", "-c", command.replace("npx ", "npx --no-install ")], folder)
    return (folder / "notes.js").read_text()
