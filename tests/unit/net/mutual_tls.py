"""An authority, a listener that says whom it takes a caller for, and who asks it."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import aiohttp
from aiohttp import web

from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.errors import Forbidden, QuorumLogError
from quorumlog.net.connections import Listener, ListenLimits
from quorumlog.net.identity import Credentials, Identity, Role
from quorumlog.net.listen import listening
from quorumlog.net.responses import problem_response
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.tls import PeerCertificate, Tls, TlsFiles
from tests.support.waiting import within

LOCAL = ("127.0.0.1", "localhost")
METADATA = ExpectedServer(Role.METADATA)
BOOKIE = ExpectedServer(Role.BOOKIE, "bookie-1")
REFUSED = (aiohttp.ClientError, OSError)
"""How a client meets a server that refuses its certificate: at once, or when it reads."""


class Authority:
    """An authority in a folder, and the contexts of certificates that it makes."""

    def __init__(self, folder: Path, cluster: str = "tests") -> None:
        self.folder = folder
        self.file = create_authority(folder, cluster)

    def issue(self, role: str, name: str, hosts: Iterable[str] = LOCAL) -> Path:
        return issue(self.folder, role, name, hosts)

    def tls(self, role: str, name: str, hosts: Iterable[str] = LOCAL) -> Tls:
        return self.load(self.issue(role, name, hosts))

    def load(self, certificate: Path) -> Tls:
        return Tls(TlsFiles(certificate, key_file(certificate), self.file))


@contextlib.asynccontextmanager
async def serving(tls: Tls, limits: ListenLimits | None = None) -> AsyncIterator[Listener]:
    """A listener that answers with whom it takes the caller for."""
    authenticator = PeerCertificate(tls)

    async def who(request: web.Request) -> web.StreamResponse:
        try:
            found = authenticator.identify(request)
        except QuorumLogError as error:
            return problem_response(error, "1")
        said = {"role": found.role, "name": found.name, "hosts": sorted(found.hosts or ())}
        return web.json_response(said)

    async def socket(request: web.Request) -> web.StreamResponse:
        opened = web.WebSocketResponse()
        await opened.prepare(request)
        await opened.send_str(authenticator.identify(request).name)
        await opened.receive()
        return opened

    app = web.Application()
    app.router.add_get("/", who)
    app.router.add_get("/socket", socket)
    async with listening(
        app, host="127.0.0.1", port=0, context=tls.server, limits=limits
    ) as listener:
        yield listener


async def ask(
    listener: Listener, credentials: Credentials, expected: ExpectedServer = METADATA
) -> Identity:
    """Whom a new connection's server takes these credentials for. Raises: Forbidden."""
    async with (
        service_session(credentials) as session,
        within("the server answers or refuses"),
        session.get(f"https://127.0.0.1:{listener.port}/", ssl=expected) as answer,
    ):
        said = await answer.json(content_type=None)
    if answer.status != 200:
        raise Forbidden(said["detail"])
    return Identity(said["role"], said["name"], frozenset(said["hosts"]))
