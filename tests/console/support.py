"""Pages of the console in a browser, and checks of how a page looks and reads."""

import re
from collections.abc import AsyncIterator
from typing import Any, Final

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    ViewportSize,
    WebError,
)

from tests.support.browser import DEADLINE_MS

_IMPACTS: Final = ("serious", "critical")
_PHONE: Final[ViewportSize] = {"width": 375, "height": 812}

_TOO_WIDE: Final = """() => {
  if (!document.querySelector("meta[name=viewport]")) return ["<meta name=viewport> is missing"];
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth <= clientWidth) return [];
  const beyond = [...document.querySelectorAll("body *")]
    .filter((element) => element.getBoundingClientRect().right > clientWidth)
    .map((element) => element.cloneNode().outerHTML);
  return [`the page is ${scrollWidth} px wide`, ...beyond];
}"""


_HURRIED: Final = """const later = setTimeout;
window.setTimeout = (run, ms = 0, ...given) => later(run, ms / 5, ...given);"""
"""Pages ask again after a fifth of the time that they wait otherwise."""


class Pages:
    """Pages that tests use one after another: a new page takes more than half a second of processor time."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._idle: dict[str, list[Page]] = {}

    async def take(self, url: str) -> Page:
        """An empty page whose relative URLs begin with `url`, without cookies and storage."""
        if idle := self._idle.get(url):
            return idle.pop()
        context = await self._browser.new_context(base_url=url, reduced_motion="reduce")
        context.set_default_timeout(DEADLINE_MS)
        await context.add_init_script(_HURRIED)
        return await context.new_page()

    async def put_back(self, url: str, page: Page) -> None:
        """Clear a page for another test, or close it if that fails."""
        try:
            await page.unroute_all(behavior="ignoreErrors")
            await page.evaluate("localStorage.clear(); sessionStorage.clear()")
            await page.goto("about:blank")
            await page.context.clear_cookies()
            await page.emulate_media(color_scheme="light")
        except Error:
            await page.context.close()
        else:
            self._idle.setdefault(url, []).append(page)


class Tabs:
    """Opens pages, and collects the errors that they log.

    Errors are calls of `console.error`, exceptions that no script catches, violations of the content security
    policy, and requests that fail or get a status of 400 or more.
    """

    def __init__(self, pages: Pages, url: str) -> None:
        self._pages, self._url = pages, url
        self._opened: list[tuple[str, Page]] = []
        self._errors: list[str] = []
        self.expected: list[str] = []
        """Regular expressions of errors that the test expects, such as `status of 403 .*/v1/tokens`."""

    async def open(self, url: str = "") -> Page:
        """Open an empty page. `url`: what relative URLs begin with, if it is not the URL of these tabs."""
        page = await self._pages.take(url or self._url)
        self._opened.append((url or self._url, page))
        page.context.on("console", self._note_message)
        page.context.on("weberror", self._note_exception)
        return page

    async def close(self) -> None:
        """End the use of all pages."""
        for url, page in self._opened:
            page.context.remove_listener("console", self._note_message)
            page.context.remove_listener("weberror", self._note_exception)
            await self._pages.put_back(url, page)

    @property
    def unexpected(self) -> list[str]:
        """The errors so far that no expression in `expected` matches, each with the URL of its source."""
        return [e for e in self._errors if not any(re.search(known, e) for known in self.expected)]

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._errors.append(f"{message.text} {message.location['url']}")

    def _note_exception(self, error: WebError) -> None:
        self._errors.append(str(error.error))


async def no_serious_violations(page: Page, part: str | None = None) -> None:
    """Fail if axe-core finds a serious or critical violation, in either colour scheme.

    `part`: the selector of the only part to check; the whole of a long page takes seconds. The page must set its background, because axe-core takes the browser's own dark background for white.
    """
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    async for scheme in _schemes(page):
        rules = (await Axe().run(page, part, options)).response["violations"]
        options["runOnly"] = ["color-contrast", "link-in-text-block"]  # schemes differ in colours
        found = [
            f"{rule['id']} ({rule['impact']}) at {node['target']}: {rule['help']}: {node['failureSummary']}"
            for rule in rules
            if rule["impact"] in _IMPACTS
            for node in rule["nodes"]
        ]
        assert not found, f"in the {scheme} colour scheme:\n" + "\n".join(found)


async def fits_phone(page: Page) -> None:
    """Fail if the page scrolls sideways on a phone's screen, in either colour scheme."""
    size = page.viewport_size
    assert size is not None
    await page.set_viewport_size(_PHONE)
    async for scheme in _schemes(page):
        found = await page.evaluate(_TOO_WIDE)
        assert not found, f"in the {scheme} colour scheme:\n" + "\n".join(found)
    await page.set_viewport_size(size)


async def _schemes(page: Page) -> AsyncIterator[str]:
    """Show the page in each colour scheme in turn, its own scheme last."""
    is_dark = await page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    for scheme in ("light", "dark") if is_dark else ("dark", "light"):
        await page.emulate_media(color_scheme=scheme)
        yield scheme


async def log_in(page: Page, token: str) -> None:
    """Log in by the form that the page shows; an empty page is sent to the console first."""
    if page.url == "about:blank":
        await page.goto("/")
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Log in").click()
