"""HTTP sessions with other services: as many connections as a busy time needs, and few again after it."""

import asyncio
import ssl
from dataclasses import dataclass
from functools import cache, partial

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from quorumlog.net import trace
from quorumlog.net.aiohttp_parts import Connector
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


class _Connector(Connector):
    """Connections with the newest certificates of this process, whose guard judges who answers."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(limit=0)
        self._credentials = credentials
        if credentials.guard is not None:
            credentials.guard.watch(self)

    def context(self) -> ssl.SSLContext:
        """The newest context."""
        newest = self._credentials.client_context
        return _verifying_context() if newest is None else newest()

    def check_server(self, transport: asyncio.Transport, request: ClientRequest) -> None:
        """Have the guard judge who answers. Raises: ClientConnectorCertificateError."""
        guard, expected = self._credentials.guard, request.ssl
        if guard is None:
            return
        assert isinstance(expected, ExpectedServer), "each request passes `_ask_a_service`"
        try:
            guard.check_server(transport, expected.role, expected.name)
        except ssl.CertificateError as error:
            transport.abort()
            raise aiohttp.ClientConnectorCertificateError(request.connection_key, error) from error


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
