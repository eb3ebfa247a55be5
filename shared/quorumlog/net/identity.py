"""Who calls a service, and what a service shows to say who it is (docs/security.md).

The internal listener of every service asks an authenticator about each request before anything is done with
it. A `ClusterSecret` (`net/cluster_secret.py`) knows one caller, "of this cluster": whoever has the secret is every service and the
operator too.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from quorumlog.errors import CallerRefused


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
        """Refuse a server to which a connection was made unless it has this role, and this name where one is given.
        Raises: CertificateError.
        """

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
