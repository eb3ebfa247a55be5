"""The common parts of all services' responses: request ids, problem documents and HTML pages."""

import itertools
import re
import secrets
from typing import Final

from aiohttp import web

from quorumlog import header
from quorumlog.errors import BadRequest, MethodNotAllowed, QuorumLogError, RouteNotFound, TooLarge
from quorumlog.net.aiohttp_parts import name_server
from quorumlog.wire import problems

SERVER_NAME: Final = "quorumlog"
name_server(SERVER_NAME)

_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Vary": "Accept",
}
"""Headers of HTML pages. A page with these headers loads nothing, runs no script, and can't be framed."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_ids = itertools.count(1)
_process = secrets.token_hex(4)


def request_id(offered: str | None) -> str:
    """The id of a request: `offered` if it is short and has only safe characters, else a new id."""
    if offered is not None and _REQUEST_ID.fullmatch(offered):
        return offered
    return f"{_process}-{next(_ids):x}"


REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The key of a request object under which its id is stored."""
CODE: Final = web.ResponseKey("code", str)
"""The key of a response object under which its problem code is stored."""


def problem_response(error: QuorumLogError, instance: str) -> web.Response:
    """The response that reports an error."""
    response = web.Response(
        body=problems.to_bytes(error, instance),
        status=error.status,
        content_type=problems.CONTENT_TYPE,
        headers=error.headers,
    )
    response[CODE] = error.code
    response.headers[header.REQUEST_ID] = instance
    response.headers["Cache-Control"] = "no-store"
    if error.status in (408, 413):
        # Close the connection, so that the rest of the request need not be read.
        response.force_close()
    return response


def html_response(text: str) -> web.Response:
    """A response with an HTML page."""
    return web.Response(text=text, content_type="text/html", headers=_PAGE_HEADERS)


def error_of_http(exc: web.HTTPException, method: str, path: str) -> QuorumLogError:
    """The QuorumLogError for an HTTP exception of aiohttp."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(exc.allowed_methods | {"OPTIONS"}))
        return MethodNotAllowed(
            f"{path} does not support {method}: use {allow}", headers={"Allow": allow}
        )
    by_status: dict[int, type[QuorumLogError]] = {404: RouteNotFound, 413: TooLarge}
    if exc.status in by_status:
        return by_status[exc.status](f"{method} {path}: {exc.reason}")
    return BadRequest(exc.reason) if 400 <= exc.status < 500 else QuorumLogError(exc.reason)


def forgotten(error: ConnectionError) -> ConnectionError:
    """A lost connection's error without its traceback. aiohttp's error refers to itself through its
    traceback. So the traceback's frames, with the unread response, would stay in memory until the
    next full garbage collection, which is rare.
    """
    return error.with_traceback(None)


def raw_response(error: QuorumLogError) -> bytes:
    """An error response as bytes, for a connection that has no request."""
    body = problems.to_bytes(error)
    headers = {
        "Content-Type": problems.CONTENT_TYPE,
        "Content-Length": str(len(body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        header.REQUEST_ID: request_id(None),
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} Error", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
