"""Who calls a service, and what a service shows to say who it is (docs/security.md).

The internal listener of every service asks an authenticator about each request before anything is done with
it. A `ClusterSecret` knows one caller, "of this cluster": whoever has the secret is every service and the
operator too.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, Self

from aiohttp import hdrs, web

from quorumlog.errors import Unauthenticated

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{32,1024}")
"""What a bearer token may consist of (RFC 6750), and at least 128 bits of it if each is a hexadecimal digit."""


class Role(StrEnum):
    """What a caller of an internal route is."""

    GATEWAY = "gateway"
    BOOKIE = "bookie"
    METADATA = "metadata"
    AUTORECOVERY = "autorecovery"
    OPERATOR = "operator"
    """A person with the command line."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that is known."""

    role: Role | None
    """None: any service of this cluster, or its operator."""
    name: str


class Authenticator(Protocol):
    """Knows callers by what they show."""

    def identify(self, request: web.BaseRequest) -> Identity:
        """Who sends a request. Raises: Unauthenticated, Forbidden."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a service shows to others with each request and each handshake."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


ANONYMOUS: Final = Credentials()
"""Shows nothing: enough where nothing but loopback can reach the services, and nobody has set a secret."""

_OF_THE_CLUSTER: Final = Identity(None, "cluster")


class SecretUnusable(Exception):
    """The file of a secret can't be used; says why, and nothing of what is in it."""


class ClusterSecret:
    """A secret that all services of a cluster share, sent as `Authorization: Bearer`.

    Invariant: no text of an object or of an error has the secret.
    """

    def __init__(self, token: str) -> None:
        """Raises: SecretUnusable."""
        if not _TOKEN.fullmatch(token):
            raise SecretUnusable(
                "a secret is one line of 32 to 1024 letters, digits or ._~+/=-, as of `openssl rand -hex 32`"
            )
        self.credentials = Credentials({hdrs.AUTHORIZATION: f"Bearer {token}"})
        self._token = token.encode()

    @classmethod
    def read(cls, file: Path) -> Self:
        """The secret in a file. Raises: SecretUnusable."""
        try:
            return cls(file.read_text("ascii").strip())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not ASCII"
            raise SecretUnusable(f"{file}: {why}") from None
        except SecretUnusable as error:
            raise SecretUnusable(f"{file}: {error}") from None

    def identify(self, request: web.BaseRequest) -> Identity:
        """Any service of the cluster. Raises: Unauthenticated."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if not token or scheme.lower() != "bearer":
            raise Unauthenticated("this listener needs the cluster's secret: Authorization: Bearer")
        # Constant time: the time of an answer says nothing of the secret.
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token):
            raise Unauthenticated("this is not the cluster's secret")
        return _OF_THE_CLUSTER
