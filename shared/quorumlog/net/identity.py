"""Identities of a service's callers, and a service's own credentials (docs/reference/security.md).

At the internal listener of every service, an authenticator first identifies the caller of each
request. With a `ClusterSecret` there is only one identity: a process with the secret may act as any
service and as an operator.

Files with credentials are read again when they change (`Followed`), without a restart.
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
    """A monitoring system, which only reads health and metrics."""


GATEWAYS: Final = frozenset({Role.GATEWAY})
BOOKIES: Final = frozenset({Role.BOOKIE})
METADATA: Final = frozenset({Role.METADATA})
HEALERS: Final = frozenset({Role.AUTORECOVERY})
OPERATORS: Final = frozenset({Role.OPERATOR})
WRITERS: Final = GATEWAYS | HEALERS
"""Roles that run the protocol's machines, so they change ledger metadata and read keys."""
SERVICES: Final = WRITERS | BOOKIES
ALL: Final = SERVICES | OPERATORS


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a caller."""

    role: Role | None
    """None if the caller may be any service of this cluster or an operator."""
    name: str
    hosts: frozenset[str] | None = None
    """The hosts in the caller's certificate; None if the caller has presented no certificate."""


ANYBODY: Final = Identity(None, "anonymous")
"""The identity of any caller at a listener that needs no credentials."""

CALLER: Final = web.RequestKey("caller", Identity)
"""The request key for the caller's identity at an internal listener."""


class Authenticator(Protocol):
    """Identifies callers by their credentials."""

    def identify(self, request: web.BaseRequest) -> Identity:
        """The identity of a request's caller. Raises: Unauthenticated, Forbidden."""


class HoldsConnections(Protocol):
    """A listener, or a pool of connections to other processes."""

    def transports(self) -> Iterable[asyncio.Transport]:
        """The transports of the open connections."""


class PeerGuard(Protocol):
    """Checks the peers of TLS connections."""

    def check_server(self, transport: asyncio.Transport, role: Role, name: str) -> None:
        """Refuse a server of another role (or name, if given). Raises: CertificateError."""

    def watch(self, holder: HoldsConnections) -> None:
        """From now on, abort connections of `holder` whose peers are no longer accepted."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a service presents with each request and each handshake."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    client_context: Callable[[], ssl.SSLContext] | None = None
    """Returns the TLS context of a new connection, which presents a certificate."""
    guard: PeerGuard | None = None
    """Checks the servers that the process connects to."""


ANONYMOUS: Final = Credentials()
"""No credentials, which suffices if services listen on loopback only and no secret is set."""


def caller_of(request: web.Request) -> Identity:
    """The identity of a request's caller."""
    caller: Identity = request.get(CALLER, ANYBODY)
    return caller


def check_name(request: web.Request, name: str) -> None:
    """Refuse a bookie that acts for another bookie. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.role is Role.BOOKIE and caller.name != name:
        raise CallerRefused(
            f"the certificate of bookie {caller.name} is not valid for bookie {name}:"
            f" issue a certificate for {name}"
        )


def check_url(request: web.Request, url: str) -> None:
    """Refuse a caller whose URL has a host outside of its certificate. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.hosts is None or caller.role is Role.OPERATOR or not url:
        return
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise CallerRefused(f"{url} must begin with https://, because the caller has a certificate")
    host = (parts.hostname or "").lower()
    if host not in caller.hosts and not _is_wild(host, caller.hosts):
        raise CallerRefused(
            f"the host of {url} is not in the certificate of {caller.role} {caller.name}, which lists"
            f" {', '.join(sorted(caller.hosts)) or 'no host'}"
        )


def _is_wild(host: str, hosts: frozenset[str]) -> bool:
    """Whether a wildcard such as `*.example` matches a host, by the rules of TLS clients."""
    first, _, rest = host.partition(".")
    return bool(first) and f"*.{rest}" in hosts


log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""The interval at which files are checked (chosen by judgement)."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """A value that changes with a file's content, inode or permissions; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    # The modification time is not used: a copy may preserve it, and chmod does not change it.
    return found.st_ctime_ns, found.st_ino, found.st_size


class Followed(ABC):
    """Data from a group of files, which is read again when a file changes."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Create the object; the current state of the files counts as loaded."""
        self._paths = tuple(paths)
        self._seen = self._known = tuple(map(stamp_of, self._paths))

    async def follow(self) -> Never:
        """Load changed files, for ever. Unusable files are ignored."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the files if they have changed and are the same at two successive checks."""
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
    """A secret that all services of a cluster share, sent as `Authorization: Bearer`. Implements
    `Authenticator`.

    While a new secret replaces another, the file has two lines: the first secret is presented, and
    both are accepted (docs/guides/operations.md, "A new secret"). A changed file takes effect in
    seconds. Invariant: neither the object nor an error shows the secret as text.
    """

    def __init__(self, text: str, file: Path | None = None) -> None:
        """`file`: the file from which `text` was read. Raises: SecretUnusable."""
        super().__init__(() if file is None else (file,))
        self._headers: dict[str, str] = {}
        self.credentials = Credentials(self._headers)
        self._take(checked_secrets(text))

    def _take(self, tokens: tuple[str, ...]) -> None:
        # Change the dictionary in place, since sessions refer to this object.
        self._headers.update(headers_of(tokens[0]))
        self._tokens = tuple(token.encode() for token in tokens)

    def identify(self, request: web.BaseRequest) -> Identity:
        """The one identity of all services of the cluster. Raises: Unauthenticated."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                "the cluster's secret is required on this listener: send it as"
                " Authorization: Bearer (CLUSTER_SECRET_FILE, or --secret-file of the command line)"
            )
        given = token.encode("utf-8", "surrogateescape")
        # Compare in constant time, so that response times reveal nothing about the secret.
        if not any(hmac.compare_digest(given, token) for token in self._tokens):
            raise Unauthenticated("wrong secret: send this cluster's (CLUSTER_SECRET_FILE)")
        return _OF_THE_CLUSTER

    def reload(self) -> None:
        """Load the current file, or log why it can't be used."""
        try:
            self._take(read_secrets(self._paths[0]))
        except SecretUnusable as error:
            log.error("secret-unusable", extra={"why": str(error)})  # noqa: TRY400  (the error says all)
        else:
            log.info("secret-loaded", extra={"accepted": len(self._tokens)})
