"""Who calls a service, and what a service shows to say who it is (docs/security.md).

The internal listener of every service asks an authenticator about each request before anything is done with
it. A `ClusterSecret` knows one caller, "of this cluster": whoever has the secret is every service and the
operator too.

Files with credentials are looked at again and again (`Followed`): what changes in them is taken without a restart.
"""

import asyncio
import hmac
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Never, Protocol
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from quorumlog.errors import CallerRefused, Unauthenticated
from quorumlog.wire.secret import SecretUnusable, checked_secrets, headers_of, read_secrets


class Role(StrEnum):
    """What a caller of an internal route is."""

    GATEWAY = "gateway"
    BOOKIE = "bookie"
    METADATA = "metadata"
    AUTORECOVERY = "autorecovery"
    OPERATOR = "operator"
    """A person with the command line."""
    MONITOR = "monitor"
    """What reads health and metrics, and nothing else."""


GATEWAYS: Final = frozenset({Role.GATEWAY})
BOOKIES: Final = frozenset({Role.BOOKIE})
METADATA: Final = frozenset({Role.METADATA})
HEALERS: Final = frozenset({Role.AUTORECOVERY})
OPERATORS: Final = frozenset({Role.OPERATOR})
WRITERS: Final = GATEWAYS | HEALERS
"""The processes that run the protocol's machines: they change ledger metadata and read keys."""
SERVICES: Final = WRITERS | BOOKIES
ALL: Final = SERVICES | OPERATORS


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that is known."""

    role: Role | None
    """None: any service of this cluster, or its operator."""
    name: str
    hosts: frozenset[str] | None = None
    """The hosts that are proven to be the caller's; None where nothing is proven of them."""


ANYBODY: Final = Identity(None, "anonymous")
"""The caller of a listener that asks for no credentials."""

CALLER: Final = web.RequestKey("caller", Identity)
"""Who sent a request to an internal listener."""


class Authenticator(Protocol):
    """Knows callers by what they show."""

    def identify(self, request: web.BaseRequest) -> Identity:
        """Who sends a request. Raises: Unauthenticated, Forbidden."""


class HoldsConnections(Protocol):
    """A listener, or a pool of connections to others."""

    def transports(self) -> Iterable[asyncio.Transport]:
        """Of the connections that stand."""


class PeerGuard(Protocol):
    """Judges the processes at the other ends of TLS connections."""

    def check_server(self, transport: asyncio.Transport, role: Role, name: str) -> None:
        """Refuse a server without this role, and this name where one is given. Raises: CertificateError."""

    def watch(self, holder: HoldsConnections) -> None:
        """Cut connections of a holder when their peers are refused from then on."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a service shows to others with each request and each handshake."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    client_context: Callable[[], ssl.SSLContext] | None = None
    """The TLS context of a new connection, which shows a certificate."""
    guard: PeerGuard | None = None
    """Judges who answers there."""


ANONYMOUS: Final = Credentials()
"""Shows nothing: enough where nothing but loopback can reach the services, and nobody has set a secret."""


def caller_of(request: web.Request) -> Identity:
    """Who sent a request."""
    caller: Identity = request.get(CALLER, ANYBODY)
    return caller


def check_name(request: web.Request, name: str) -> None:
    """Refuse a bookie that speaks for another bookie. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.role is Role.BOOKIE and caller.name != name:
        raise CallerRefused(
            f"the certificate of bookie {caller.name} may not speak for bookie {name}: give"
            f" {name} a certificate of its own"
        )


def check_url(request: web.Request, url: str) -> None:
    """Refuse a caller that says that it listens at a host that is not its own. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.hosts is None or caller.role is Role.OPERATOR or not url:
        return
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise CallerRefused(f"{url} is no URL of a listener with a certificate: https://…")
    host = (parts.hostname or "").lower()
    if host not in caller.hosts and not _is_wild(host, caller.hosts):
        raise CallerRefused(
            f"{url} is no URL of {caller.role} {caller.name}, whose certificate is for"
            f" {', '.join(sorted(caller.hosts)) or 'no host'}"
        )


def _is_wild(host: str, hosts: frozenset[str]) -> bool:
    """Whether a certificate's `*.example` stands for a host, as a TLS client reads it."""
    first, _, rest = host.partition(".")
    return bool(first) and f"*.{rest}" in hosts


log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How often files are looked at (taste)."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Differs once a file, its place or its permissions have changed; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    # Not the time of modification, which a copy may keep, and a new mode does not change.
    return found.st_ctime_ns, found.st_ino, found.st_size


class Followed(ABC):
    """What is read from files that belong together, and read again when they change."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """The files as they are now count as known."""
        self._paths = tuple(paths)
        self._seen = self._known = tuple(map(stamp_of, self._paths))

    async def follow(self) -> Never:
        """Take new files, for ever. Files that can't be used change nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the files if they have changed, and have not changed since the last look: by then all are written."""
        found = tuple(map(stamp_of, self._paths))
        was_seen, self._seen = found == self._seen, found
        if was_seen and found != self._known:
            self._known = found
            self.reload()

    @abstractmethod
    def reload(self) -> None:
        """Take the files as they are now, or log why not."""


_OF_THE_CLUSTER: Final = Identity(None, "cluster")


class ClusterSecret(Followed):
    """A secret that all services of a cluster share, sent as `Authorization: Bearer`. Implements `Authenticator`.

    Two lines in its file are two secrets, for as long as one takes the other's place: the first is shown, both are
    accepted (docs/guides/operations.md, "A new secret"). A changed file is taken within seconds.

    Invariant: no text of an object or of an error has the secret.
    """

    def __init__(self, text: str, file: Path | None = None) -> None:
        """`file`: where the text was read. Raises: SecretUnusable."""
        super().__init__(() if file is None else (file,))
        self._headers: dict[str, str] = {}
        self.credentials = Credentials(self._headers)
        self._take(checked_secrets(text))

    def _take(self, tokens: tuple[str, ...]) -> None:
        # In place: sessions have the credentials.
        self._headers.update(headers_of(tokens[0]))
        self._tokens = tuple(token.encode() for token in tokens)

    def identify(self, request: web.BaseRequest) -> Identity:
        """Any service of the cluster. Raises: Unauthenticated."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                "only the cluster's services and operators may ask this, with its secret as"
                " Authorization: Bearer (CLUSTER_SECRET_FILE; of the command line also --secret-file)"
            )
        given = token.encode("utf-8", "surrogateescape")
        # Constant time: the time of an answer says nothing of the secret.
        if not any(hmac.compare_digest(given, token) for token in self._tokens):
            raise Unauthenticated("this is not the cluster's secret")
        return _OF_THE_CLUSTER

    def reload(self) -> None:
        """Take the file as it is now, or log why not."""
        try:
            self._take(read_secrets(self._paths[0]))
        except SecretUnusable as error:
            log.error("secret-unusable", extra={"why": str(error)})  # noqa: TRY400  (the error says all)
        else:
            log.info("secret-loaded", extra={"accepted": len(self._tokens)})
