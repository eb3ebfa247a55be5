"""A real browser for tests of web pages: Chromium without a window, driven by Playwright.

`make test` installs Debian's package if it may (`make browser`). The browser resolves no names, so it reaches this
machine only.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Final

import pytest
from playwright.async_api import Browser, Error, Page, async_playwright, expect

from tests.support.waiting import DEADLINE_S, within

_NAMES: Final = ("chromium", "google-chrome")
_FLAGS: Final = (
    "--disable-gpu",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)

DEADLINE_MS: Final = DEADLINE_S * 1000
expect.set_options(timeout=DEADLINE_MS)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run a browser until the end of the block, for tests on the same event loop.

    Skips the test if there is no Chromium, or if it does not start.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium here: `make browser` installs it, as root on Debian")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), folder)
        async with async_playwright() as driver:
            try:
                started = await driver.chromium.launch(
                    executable_path=program, args=_FLAGS, env={**os.environ, **home}
                )
            except Error as error:
                pytest.skip(f"Chromium does not start here: {str(error)[-800:]}")
            async with started:
                yield started


@contextlib.asynccontextmanager
async def page(browser: Browser, url: str) -> AsyncIterator[Page]:
    """Open a page with its own cookies and storage until the end of the block."""
    async with within("the browser does its work"), await browser.new_context() as context:
        context.set_default_timeout(0)  # the deadline is that of the block
        shown = await context.new_page()
        await shown.goto(url)
        yield shown
