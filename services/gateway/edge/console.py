"""The console: static files of a web page that uses the public API only (docs/guides/console.md).

The files are in `services/gateway/console`. The gateway reads them once, at the start; they need no
build. The page loads no data from other hosts. Its Content-Security-Policy allows no inline script.
"""

import hashlib
from importlib import resources
from typing import Any, Final, NamedTuple

from aiohttp import hdrs, web

from quorumlog.errors import RouteNotFound
from quorumlog.net.operations import Content, Reply
from quorumlog.net.parameters import Given, path_text
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import OPEN
from services.gateway.edge.http.media import HTML

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser revalidates each file by its ETag, so that no page mixes files of two releases
    # after an upgrade.
    "Cache-Control": "no-cache",
}
_INDEX: Final = "index.html"
_TEXT: Final[dict[str, Any]] = {"type": "string"}
_MEDIA: Final = ("text/javascript", "text/css", "image/svg+xml")

FILE: Final = path_text("file", r"[a-z-]+\.(js|css|svg)", "The file's name.", "style.css")


class _File(NamedTuple):
    body: bytes
    etag: str
    media: str


def _read() -> dict[str, _File]:
    """Read the console's files, by name."""
    found = {}
    for one in (resources.files("services.gateway") / "console").iterdir():
        media = _TYPES.get(one.name.rpartition(".")[2])
        if media is not None:
            body = one.read_bytes()
            found[one.name] = _File(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', media)
    return found


class ConsoleRoutes(op.Handlers, tag="About"):
    """HTTP handlers for the console's files."""

    def __init__(self) -> None:
        self._files = _read()

    @op.operation(
        "GET /",
        replies={200: Reply("The console.", {HTML: Content(_TEXT)})},
        scope=OPEN,
    )
    async def get_console(self, request: web.Request, _given: Given) -> web.Response:
        """Get the console, a web page for operators and developers."""
        return self._answer(request, _INDEX)

    @op.operation(
        "GET /console/{file}",
        (FILE,),
        replies={200: Reply("The file.", {media: Content(_TEXT) for media in _MEDIA})},
        errors=(RouteNotFound,),
        scope=OPEN,
    )
    async def get_console_file(self, request: web.Request, given: Given) -> web.Response:
        """Get a file of the console: a script, the style sheet or the icon."""
        return self._answer(request, given[FILE])

    async def documentation(self, request: web.Request) -> web.Response:
        """Get the console's page about the API."""
        return self._answer(request, _INDEX)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise RouteNotFound(f"the console has no file {name}")
        headers = {**_HEADERS, hdrs.ETAG: file.etag}
        if file.etag in request.headers.get(hdrs.IF_NONE_MATCH, ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers={**headers, hdrs.CONTENT_TYPE: file.media})
