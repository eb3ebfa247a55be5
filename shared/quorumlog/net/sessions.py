"""HTTP sessions with other services: as many connections as a busy time needs, and few again after it."""

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from aiohttp.client_proto import ResponseHandler

from quorumlog.net import trace
from quorumlog.net.identity import ANONYMOUS, Credentials, Role


@dataclass(frozen=True)
class ExpectedServer(aiohttp.Fingerprint):
    """Who must answer a request to another service: its `ssl`. aiohttp keeps the connections of one apart from those
    of another one, which may have been made to the same address.
    """

    role: Role
    name: str = ""
    """Of a bookie; "" where any service of the role will do."""

    def check(self, transport: asyncio.Transport) -> None:
        """For a fingerprint aiohttp verifies no certificate. The connector below does, and other sessions don't: refuse
        what was not verified. Raises: ServerFingerprintMismatch.
        """
        context = transport.get_extra_info("sslcontext")
        if context is not None and context.verify_mode is not ssl.CERT_REQUIRED:
            raise aiohttp.ServerFingerprintMismatch(b"", b"", str(self), 0)

    def __str__(self) -> str:
        """For aiohttp's errors."""
        return f"{self.role} {self.name}".rstrip()


class _Connector(aiohttp.TCPConnector):
    """Takes the free connection that was used last; aiohttp takes the one that was free longest.

    In aiohttp's order each connection that a burst once needed gets its turn before it counts as
    idle, so a process that always asks something (a heartbeat is enough) would keep them all.
    """

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(limit=0)
        self._credentials = credentials
        if credentials.guard is not None:
            credentials.guard.watch(self)

    def transports(self) -> Iterator[asyncio.Transport]:
        """Of all connections, free ones too."""
        free = (protocol for kept in self._conns.values() for protocol, _ in kept)
        for protocol in (*free, *self._acquired):
            if protocol.transport is not None:
                yield protocol.transport

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        # Appended at the end; the next one is taken from the front.
        if (free := self._conns.get(key)) is not None:
            free.rotate()

    async def _wrap_create_connection(
        self, *args: Any, req: ClientRequest, **kwargs: Any
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        """Connect, and have the guard judge who answers."""
        made = await super()._wrap_create_connection(*args, req=req, **kwargs)
        guard, expected = self._credentials.guard, req.ssl
        if req.is_ssl() and guard is not None:
            assert isinstance(expected, ExpectedServer), "each request passes `_ask_a_service`"
            try:
                guard.check_server(made[0], expected.role, expected.name)
            except ssl.CertificateError as error:
                made[0].abort()
                raise aiohttp.ClientConnectorCertificateError(req.connection_key, error) from error
        return made

    def _get_ssl_context(self, req: ClientRequest) -> ssl.SSLContext | None:
        """The newest context: aiohttp would keep the one of its construction."""
        if not req.is_ssl():
            return None
        newest = self._credentials.client_context
        return _verifying_context() if newest is None else newest()


@cache
def _verifying_context() -> ssl.SSLContext:
    """Of a process without a certificate: the system's authorities count."""
    return ssl.create_default_context()


async def _ask_a_service(
    credentials: Credentials, request: ClientRequest, handler: ClientHandlerType
) -> ClientResponse:
    """Each request says who must answer, and no service redirects.

    Who redirects may have been taken over, and the request carries what this process shows: to other services as
    well as to that one. Of sockets aiohttp would follow a redirect whatever their caller says.
    """
    if not isinstance(request.ssl, ExpectedServer):
        raise TypeError(f"{request.url}: who must answer? ssl=ExpectedServer(…)")
    # As they are now: the session would keep those of its beginning.
    request.headers.update(credentials.headers)
    answer = await handler(request)
    if 300 <= answer.status < 400:
        answer.close()
        raise aiohttp.ClientResponseError(
            answer.request_info, (), status=answer.status, message="no service redirects"
        )
    return answer


def service_session(credentials: Credentials = ANONYMOUS) -> aiohttp.ClientSession:
    """A session for requests to other services, which carry the trace of the work they belong to, and
    `credentials`. Each request has an ExpectedServer as its `ssl`. An answer that redirects is an error:
    ClientResponseError.
    """
    return aiohttp.ClientSession(
        connector=_Connector(credentials),
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(partial(_ask_a_service, credentials),),
        trace_configs=[trace.config()],
    )
