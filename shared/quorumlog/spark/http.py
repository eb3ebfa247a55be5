"""HTTP requests from Spark's processes to any gateway that responds; standard library only.

As in the SDK (client/transport.py), a request is retried if it was certainly not carried out, or if
repeating it has no further effect. All attempts of a request share an `Idempotency-Key`. A response
429 delays a task but never fails it, because the gateway sheds load, and the task can only wait.
"""

import http.client
import json
import os
import random
import re
import ssl
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from quorumlog import errors, header
from quorumlog.wire.problems import from_answer

DEADLINE_S: Final = 120.0
"""Deadline of a request with its retries: longer than a takeover of a log on a slow machine."""

_TIMEOUT_S: Final = 60.0
_REST_S_MAX: Final = 15.0
"""Connections that were idle for longer are not reused: servers close idle connections, and the
outcome of a request on a closing connection is unknown."""

_CUT_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that ended during the TLS handshake, but not because of certificates."""
_REFUSED: Final = re.compile("CERTIFICATE|UNKNOWN_CA")
"""Matches an error of a server that rejects or requires a client certificate. With TLS 1.3 the
error replaces the first response."""

_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A gateway's successful response."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        """The body, parsed as JSON."""
        return json.loads(self.body)


class Gateways(AbstractContextManager["Gateways"]):
    """One connection to one of several gateways. Not thread-safe.

    Invariant: `_at` is the gateway that responded last, so the client stays with a healthy gateway.
    """

    def __init__(
        self,
        urls: str,
        *,
        deadline_s: float = DEADLINE_S,
        headers: Mapping[str, str] | None = None,
        token: str | Callable[[], str | None] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`urls`: the gateways' URLs, separated by commas. All requests have `headers` and the token;
        if `token` is a function, each request calls it. `context`: the TLS context; None: the default.
        """
        self._urls: Sequence[str] = [url.strip().rstrip("/") for url in urls.split(",")]
        for url in self._urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ValueError(f"{url!r} is not a gateway URL: use http://host:port")
        self._deadline_s = deadline_s
        self._headers = dict(headers or {})
        self._token, self._context = token, context
        # Tasks begin with different gateways, which spreads the load.
        self._at = random.randrange(len(self._urls))  # noqa: S311
        self.speaks_arrow = True
        """False after a gateway has rejected Arrow: pages and rows are then JSON."""
        self._connection: http.client.HTTPConnection | None = None
        self._answered_at = 0.0
        self._pid = os.getpid()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(
        self,
        method: str,
        path: str,
        *,
        is_repeatable: bool,
        body: bytes | None = None,
        value: Any = None,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Send a request, with safe retries, until there is a final answer. `value`: a JSON body.

        Raises: an error of `quorumlog.errors`: the gateway's, ConnectionLost or UntrustedServer.
        """
        sent = {**self._headers, **(headers or {})}
        if is_repeatable and method != "GET":
            sent.setdefault(header.IDEMPOTENCY_KEY, uuid.uuid4().hex)
        if value is not None:
            body, sent["Content-Type"] = json.dumps(value).encode(), "application/json"
        target = path if not params else f"{path}?{urlencode(params)}"
        end, pause_s = time.monotonic() + self._deadline_s, _PAUSE_FIRST_S
        may_be_done = False
        rests_until: dict[int, float] = {}  # by gateway, from Retry-After
        while True:
            asked = self._at
            try:
                return self._once(method, target, body, {**sent, **self._authorization()})
            except errors.QuorumLogError as error:
                # The outcome of a retry says nothing about earlier attempts.
                may_be_done = may_be_done or (error.outcome == errors.UNKNOWN and method != "GET")
                rests_until[asked] = time.monotonic() + (error.retry_after_s or 0)
                rest_s = max(
                    pause_s * random.uniform(0.5, 1),  # noqa: S311
                    rests_until.get(self._at, 0.0) - time.monotonic(),
                )
                if isinstance(error, errors.Overloaded):
                    end += rest_s
                elif (
                    not error.retryable
                    or not (is_repeatable or error.outcome == errors.NOT_DONE)
                    or time.monotonic() + rest_s >= end
                ):
                    if may_be_done and error.outcome != errors.UNKNOWN:
                        raise error.with_outcome(errors.UNKNOWN) from error
                    raise
            time.sleep(rest_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _authorization(self) -> dict[str, str]:
        token = self._token() if callable(self._token) else self._token
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    def get(self, path: str, params: Mapping[str, str | int] | None = None) -> Any:
        """Send a GET; returns the response's JSON."""
        return self.request("GET", path, params=params, is_repeatable=True).json()

    def post(
        self, path: str, value: Any = None, params: Mapping[str, str | int] | None = None
    ) -> Any:
        """Send a POST that may be retried; returns the response's JSON, or None without a body."""
        answer = self.request("POST", path, value=value, params=params, is_repeatable=True)
        return answer.json() if answer.body else None

    def pages(self, path: str, name: str, **only: str) -> list[Any]:
        """All items of a paged list; `only` adds query parameters that filter the list."""
        found: list[Any] = []
        params: dict[str, str | int] = {"limit": 1000, **only}
        while True:
            page = self.get(path, params)
            found += page[name]
            if page["next"] is None:
                return found
            params["after"] = page["next"]

    def _once(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> HttpAnswer:
        url = self._urls[self._at]
        if time.monotonic() - self._answered_at > _REST_S_MAX or self._pid != os.getpid():
            self.close()  # idle for too long, or a parent process's connection after a fork
            self._pid = os.getpid()
        is_kept = self._connection is not None
        try:
            connection = self._connection or self._connect(url)
        except OSError as error:
            self._turn()
            if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
                raise errors.UntrustedServer(
                    f"{url}: {error}; check the options tls.ca and tls.certificate"
                ) from error
            raise errors.ConnectionLost(f"{url}: {error}", outcome=errors.NOT_DONE) from error
        self._connection = connection
        try:
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if not is_kept:
                self._turn()
            if isinstance(error, ssl.SSLError) and _REFUSED.search(str(error)):
                raise errors.UntrustedServer(
                    f"{url}: {error}; check the option tls.certificate"
                ) from error
            # The server may have closed an idle connection, or may have carried out the request.
            raise errors.ConnectionLost(f"{url}: {type(error).__name__} {error}") from error
        self._answered_at = time.monotonic()
        if response.will_close:
            self.close()
        kind = response.headers.get("Content-Type", "")
        if response.status >= 300:
            refused = from_answer(response.status, content, response.headers, url)
        elif header.REQUEST_ID in response.headers or kind.startswith("application/json"):
            return HttpAnswer(response.status, response.headers, content)
        else:
            # Every response of a gateway has a request id; a proxy's blank page has none.
            refused = errors.ConnectionLost(f"{url} does not lead to a gateway: check the URL")
        if refused.retryable and len(self._urls) > 1:
            # The next gateway may be able to serve the request.
            self.close()
            self._turn()
        raise refused

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        address, is_tls = (parts.hostname or "", parts.port), parts.scheme == "https"
        connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
        if is_tls:
            context = self._context or ssl.create_default_context()
            connection = http.client.HTTPSConnection(*address, timeout=_TIMEOUT_S, context=context)
        connection.connect()
        return connection

    def _turn(self) -> None:
        self._at = (self._at + 1) % len(self._urls)
