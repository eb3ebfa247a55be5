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

from aiohttp import web


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
