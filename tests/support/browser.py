"""A real browser for tests of web pages: Chromium without a window, over the DevTools protocol.

`make test` installs Debian's package where it may (`make browser`). The browser resolves no names, so that it
talks to this machine only.
"""

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from services.local.process import Program, start, stop
from tests.support.waiting import DEADLINE_S, until_sync, within

MISSING: Final = "there is no Chromium here: `make browser` installs it, as root on Debian"

_NAMES: Final = ("chromium", "google-chrome")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # root, and containers without user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


_TEXTS: Final = """
const list = document.getElementById({of});
const texts = () => [...list.children].map((line) => line.textContent);
await new Promise((done) => {{
  const look = () => {{ if (texts().length >= {count}) done(); }};
  new MutationObserver(look).observe(list, {{ childList: true }});
  look();
}});
return texts();
"""
_SEND: Final = """
for (const [id, text] of Object.entries(texts)) document.getElementById(id).value = text;
document.querySelector("form").requestSubmit();
"""


class DoesNotStart(Exception):
    """The browser ended before it listened; the message has its last output."""


def chromium() -> str | None:
    """The path of Chromium, or None if it isn't installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.contextmanager
def running(program: str) -> Iterator[str]:
    """Run a browser during the block; yields the address of its DevTools. Raises: DoesNotStart."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        reported = Path(folder, "DevToolsActivePort")
        argv = (program, *_FLAGS, f"--user-data-dir={folder}", "about:blank")
        env = {**os.environ, "HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder}
        log = Path(folder, "log")
        process = start(Program("chromium", argv, env), log)
        try:

            def address() -> str | None:
                if process.poll() is not None:
                    raise DoesNotStart(log.read_text(errors="replace")[-500:])
                lines = reported.read_text().splitlines() if reported.exists() else []
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}" if len(lines) == 2 else None

            yield until_sync(address, "Chromium listens") or ""
        finally:
            stop(process, signal.SIGTERM, DEADLINE_S)


class Page:
    """A tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._session: str | None = None

    async def open(self, url: str) -> None:
        """Load a page in a new tab."""
        target = (await self._call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        await self._call("Page.enable")
        await self._call("Page.navigate", url=url)
        while (await self._socket.receive_json()).get("method") != "Page.loadEventFired":
            pass

    async def run(self, script: str) -> Any:
        """Run the body of an async function in the page, and return its result."""
        reported = await self._call(
            "Runtime.evaluate",
            expression=f"(async () => {{ {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in reported, reported
        return reported["result"].get("value")

    async def texts(self, of: str, count: int) -> list[str]:
        """The texts of the items of a list, given by its id, once it has so many or more."""
        found: list[str] = await self.run(_TEXTS.format(of=orjson.dumps(of).decode(), count=count))
        return found

    async def send(self, **fields: str) -> None:
        """Fill in fields of the page's form, given by their ids, and send it."""
        texts = orjson.dumps(fields).decode()
        await self.run(f"const texts = {texts}; {_SEND}")

    async def _call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        call = {"id": number, "method": method, "params": params}
        await self._socket.send_json(call | ({"sessionId": self._session} if self._session else {}))
        while (answer := await self._socket.receive_json()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]


@contextlib.asynccontextmanager
async def page(address: str, url: str) -> AsyncIterator[Page]:
    """A page of the browser at an address (`running`)."""
    async with (
        within("the browser does its work"),
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        found = Page(socket)
        await found.open(url)
        yield found
