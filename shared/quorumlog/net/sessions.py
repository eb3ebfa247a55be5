"""HTTP sessions with other services."""

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
    """The service that must answer a request, passed to aiohttp as the request's `ssl`. aiohttp
    keeps connections to different expected servers apart, even if they have the same address.
    """

    role: Role
    name: str = ""
    """The name of a bookie; "" if any service of the role may answer."""

    def check(self, transport: asyncio.Transport) -> None:
        """Refuse a connection whose certificate was not verified. Given a fingerprint, aiohttp
        itself verifies no certificate, but `_Connector` does. Raises: ServerFingerprintMismatch.
        """
        context = transport.get_extra_info("sslcontext")
        if context is not None and context.verify_mode is not ssl.CERT_REQUIRED:
            raise aiohttp.ServerFingerprintMismatch(b"", b"", str(self), 0)

    def __str__(self) -> str:
        """The expected server, as text for aiohttp's errors."""
        return f"{self.role} {self.name}".rstrip()


class _Connector(Connector):
    """Connects with this process's newest certificate. The credentials' guard checks each server."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(limit=0)
        self._credentials = credentials
        if credentials.guard is not None:
            credentials.guard.watch(self)

    def context(self) -> ssl.SSLContext:
        """The TLS context with the newest certificate."""
        newest = self._credentials.client_context
        return _verifying_context() if newest is None else newest()

    def check_server(self, transport: asyncio.Transport, request: ClientRequest) -> None:
        """Make the guard check the server's identity. Raises: ClientConnectorCertificateError."""
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
    """The TLS context of a process without a certificate, which trusts the system's authorities."""
    return ssl.create_default_context()


async def _ask_a_service(
    credentials: Credentials, request: ClientRequest, handler: ClientHandlerType
) -> ClientResponse:
    """Send a request with the credentials. Requests without an ExpectedServer, and redirects, fail.

    A redirect may come from a compromised server, and the request carries credentials that all
    services accept. (For WebSocket requests, aiohttp can't be configured not to follow redirects.)
    """
    if not isinstance(request.ssl, ExpectedServer):
        raise TypeError(f"{request.url}: pass the expected service, ssl=ExpectedServer(…)")
    # Use the newest headers, because the session keeps the headers from its creation.
    request.headers.update(credentials.headers)
    answer = await handler(request)
    if 300 <= answer.status < 400:
        answer.close()
        raise aiohttp.ClientResponseError(
            answer.request_info, (), status=answer.status, message="unexpected redirect"
        )
    return answer


def service_session(credentials: Credentials = ANONYMOUS) -> aiohttp.ClientSession:
    """A session for requests to other services. Requests carry the trace of the work that they
    belong to, and `credentials`. Each request needs an ExpectedServer as its `ssl`. A redirect
    raises ClientResponseError.
    """
    return aiohttp.ClientSession(
        connector=_Connector(credentials),
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(partial(_ask_a_service, credentials),),
        trace_configs=[trace.config()],
    )
