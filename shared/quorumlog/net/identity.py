"""Identities of a service's callers, and the credentials that it presents (docs/reference/security.md).

The internal listener of every service has an authenticator identify the caller of each request
before anything else. A `ClusterSecret` knows only one caller: a process with the secret may act as
every service and as the operator.

Files with credentials are checked periodically (`Followed`), so changes need no restart.
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
    """The role of a caller of an internal route."""

    GATEWAY = "gateway"
    BOOKIE = "bookie"
    METADATA = "metadata"
    AUTORECOVERY = "autorecovery"
    OPERATOR = "operator"
    """A person who uses the command line."""
    MONITOR = "monitor"
    """A monitoring system, which reads health and metrics only."""


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
    """The identity of a caller."""

    role: Role | None
    """None if the caller may be any service of this cluster or its operator."""
    name: str
    hosts: frozenset[str] | None = None
    """The hosts that are proven to be the caller's; None if there is no such proof."""


ANYBODY: Final = Identity(None, "anonymous")
"""The caller at a listener that needs no credentials."""

CALLER: Final = web.RequestKey("caller", Identity)
"""The key of the caller of a request to an internal listener."""


class Authenticator(Protocol):
    """Identifies callers by their credentials."""

    def identify(self, request: web.BaseRequest) -> Identity:
        """The identity of a request's caller. Raises: Unauthenticated, Forbidden."""


class HoldsConnections(Protocol):
    """A listener, or a pool of connections to others."""

    def transports(self) -> Iterable[asyncio.Transport]:
        """The transports of the open connections."""


class PeerGuard(Protocol):
    """Checks the processes at the other ends of TLS connections."""

    def check_server(self, transport: asyncio.Transport, role: Role, name: str) -> None:
        """Refuse a server without this role (and name, if given). Raises: CertificateError."""

    def watch(self, holder: HoldsConnections) -> None:
        """Cut the connections of `holder` whose peers are refused from then on."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a service presents with each request and each handshake."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    client_context: Callable[[], ssl.SSLContext] | None = None
    """Returns the TLS context of a new connection, which presents a certificate."""
    guard: PeerGuard | None = None
    """Checks the servers that the process connects to."""


ANONYMOUS: Final = Credentials()
"""No credentials: enough if only loopback can reach the services, and no secret is set."""


def caller_of(request: web.Request) -> Identity:
    """The identity of a request's caller."""
    caller: Identity = request.get(CALLER, ANYBODY)
    return caller


def check_name(request: web.Request, name: str) -> None:
    """Refuse a bookie that acts for another bookie. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.role is Role.BOOKIE and caller.name != name:
        raise CallerRefused(
            f"the certificate of bookie {caller.name} may not speak for bookie {name}: give"
            f" {name} a certificate of its own"
        )


def check_url(request: web.Request, url: str) -> None:
    """Refuse a caller that claims to listen at a host of another process. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.hosts is None or caller.role is Role.OPERATOR or not url:
        return
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise CallerRefused(f"{url} is not a URL of a listener with a certificate: https://…")
    host = (parts.hostname or "").lower()
    if host not in caller.hosts and not _is_wild(host, caller.hosts):
        raise CallerRefused(
            f"{url} is not a URL of {caller.role} {caller.name}, whose certificate is for"
            f" {', '.join(sorted(caller.hosts)) or 'no host'}"
        )


def _is_wild(host: str, hosts: frozenset[str]) -> bool:
    """Whether a certificate's `*.example` includes a host, by the rules of TLS clients."""
    first, _, rest = host.partition(".")
    return bool(first) and f"*.{rest}" in hosts


log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""The interval of checks of files (chosen by judgement)."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Differs once a file, its place or its permissions have changed; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    # Not the time of modification: a copy may preserve it, and a new mode does not change it.
    return found.st_ctime_ns, found.st_ino, found.st_size


class Followed(ABC):
    """Data from files that belong together, which is read again when they change."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """The current state of the files counts as loaded."""
        self._paths = tuple(paths)
        self._seen = self._known = tuple(map(stamp_of, self._paths))

    async def follow(self) -> Never:
        """Load changed files, for ever. Files that can't be used change nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the files once they have changed and two checks in a row find them alike."""
        found = tuple(map(stamp_of, self._paths))
        was_seen, self._seen = found == self._seen, found
        if was_seen and found != self._known:
            self._known = found
            self.reload()

    @abstractmethod
    def reload(self) -> None:
        """Load the current files, or log why they can't be used."""


_OF_THE_CLUSTER: Final = Identity(None, "cluster")


class ClusterSecret(Followed):
    """A secret that all services of a cluster share, sent as `Authorization: Bearer`. It implements
    `Authenticator`.

    Its file has two lines while a new secret replaces another: the first is presented, both are
    accepted (docs/guides/operations.md, "A new secret"). A changed file takes effect in seconds.
    Invariant: neither the object nor an error shows the secret as text.
    """

    def __init__(self, text: str, file: Path | None = None) -> None:
        """`file` is the file that `text` was read from. Raises: SecretUnusable."""
        super().__init__(() if file is None else (file,))
        self._headers: dict[str, str] = {}
        self.credentials = Credentials(self._headers)
        self._take(checked_secrets(text))

    def _take(self, tokens: tuple[str, ...]) -> None:
        # In place, since sessions hold the credentials.
        self._headers.update(headers_of(tokens[0]))
        self._tokens = tuple(token.encode() for token in tokens)

    def identify(self, request: web.BaseRequest) -> Identity:
        """The identity that all services of the cluster share. Raises: Unauthenticated."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                "only the cluster's services and operators may ask this, with its secret as"
                " Authorization: Bearer (CLUSTER_SECRET_FILE; of the command line also --secret-file)"
            )
        given = token.encode("utf-8", "surrogateescape")
        # Constant time: the time of an answer reveals nothing of the secret.
        if not any(hmac.compare_digest(given, token) for token in self._tokens):
            raise Unauthenticated("this is not the cluster's secret")
        return _OF_THE_CLUSTER

    def reload(self) -> None:
        """Load the current file, or log why it can't be used."""
        try:
            self._take(read_secrets(self._paths[0]))
        except SecretUnusable as error:
            log.error("secret-unusable", extra={"why": str(error)})  # noqa: TRY400  (the error says all)
        else:
            log.info("secret-loaded", extra={"accepted": len(self._tokens)})
