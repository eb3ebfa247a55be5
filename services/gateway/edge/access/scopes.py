"""The scopes that public operations declare (`edge/operations.py`), and the grants of callers.

docs/reference/security.md lists the scopes of all operations. Access to a log's ledger depends on
grants for the log. Access to any other ledger depends on grants for the ledger's namespace, which is
`namespace` in the ledger's custom metadata (docs/adr/0021-access-tokens.md).
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aiohttp import web

from quorumlog.errors import Forbidden, NoSuchTransaction, QuorumLogError
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.position_bodies import OWN_LOGS
from quorumlog.wire.token_bodies import NAMESPACE, IssuedToken
from services.gateway.edge.access.quotas import Usage


class Scope(StrEnum):
    """The kind of access that a grant allows on its resource."""

    READ = "read"
    APPEND = "append"
    WORK = "work"
    """Claiming and settling records of a log's queues."""
    MANAGE = "manage"
    ADMIN = "admin"
    """Includes all other scopes, and permits accepting the loss of entries and bookies."""


class Kind(StrEnum):
    """The kind of resource that a grant names."""

    LOGS = "logs"
    LEDGERS = "ledgers"
    CLUSTER = "cluster"


class Named(StrEnum):
    """The resource on which an operation requires its scope."""

    NOTHING = "nothing"
    """The operation needs no token."""
    LOG = "the log"
    STREAM = "the stream's log"
    LEDGER = "the ledger"
    TRANSACTION = "the transaction's log"
    SOME = "each named or listed resource"
    """The handler checks the resources in the body, or lists only resources that the caller may read."""
    CLUSTER = "the cluster"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Access:
    """The access that an operation requires: one of `scopes` on the resource `named`."""

    named: Named
    scopes: frozenset[Scope] = frozenset()

    def __str__(self) -> str:
        """Text for documentation, such as "`read` or `append` on the log"."""
        if self.named is Named.NOTHING:
            return "no token"
        scopes = [scope for scope in Scope if scope in self.scopes]
        return f"{' or '.join(f'`{scope}`' for scope in scopes)} on {self.named}"


def on(named: Named, *scopes: Scope) -> Access:
    """Declare that an operation requires one of `scopes` on the resource `named`."""
    return Access(named, frozenset(scopes))


OPEN: Final = Access(Named.NOTHING)
"""Access without a token."""
LOOK: Final = frozenset((Scope.READ, Scope.APPEND, Scope.MANAGE))
"""Scopes that each allow a caller to get a resource's metadata."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Scopes on all resources (no kind), on the cluster, or on logs or namespaces by name or prefix."""

    scopes: frozenset[Scope]
    kind: Kind | None
    name: str = ""
    is_prefix: bool = False

    @classmethod
    def parsed(cls, text: str) -> "Grant":
        """Parse the text of a grant (`wire/token_bodies.py`, GRANT)."""
        scope, _, where = text.partition(":")
        scopes = frozenset(Scope) if scope == Scope.ADMIN else frozenset((Scope(scope),))
        if where == "*":
            return cls(scopes, None)
        kind, _, name = where.partition("/")
        return cls(scopes, Kind(kind), name.removesuffix("*"), name.endswith("*"))

    def covers(self, kind: Kind, name: str) -> bool:
        """Whether the grant applies to a resource."""
        if self.kind is None:
            return True
        if self.kind is not kind:
            return False
        return name.startswith(self.name) if self.is_prefix else name == self.name


def _union(grants: Iterable[Grant]) -> frozenset[Scope]:
    return frozenset(scope for grant in grants for scope in grant.scopes)


class Caller:
    """The sender of a request, with its grants."""

    __slots__ = (
        *("connections", "ends_at", "everywhere", "granted", "grants", "id"),
        *("issued", "somewhere", "usage", "who"),
    )

    def __init__(
        self,
        who: str,
        grants: Iterable[str],
        token_id: str = "",
        *,
        ends_at: float | None = None,
        issued: IssuedToken | None = None,
    ) -> None:
        """`who` is a name for messages, not secret. `ends_at` is the token's expiry in seconds since
        1970. `issued` has the claims of the caller's JWT; a caller with a JWT has no `token_id`.
        """
        self.who, self.id, self.ends_at, self.issued = who, token_id, ends_at, issued
        self.granted = tuple(grants)
        """The grants as text."""
        self.grants = tuple(map(Grant.parsed, self.granted))
        self.everywhere = _union(grant for grant in self.grants if grant.kind is None)
        """The caller's scopes on everything."""
        self.somewhere = _union(self.grants)
        self.usage: Usage | None = None
        """The use of the token's quotas; None if the token has no quotas."""
        self.connections: set[asyncio.Transport] = set()
        """Connections of the caller's requests in progress."""

    @property
    def identity(self) -> str:
        """Unique id of the caller. All JWTs of one subject have the same identity."""
        return f"jwt:{self.issued.subject}" if self.issued is not None else f"token:{self.id}"

    def scopes(self, kind: Kind, name: str) -> frozenset[Scope]:
        """The caller's scopes on a log, a namespace, or the cluster. Only a caller with `admin` on
        everything has scopes on the cluster's own logs, which contain secrets.
        """
        if kind is Kind.LOGS and name in OWN_LOGS:
            return self.everywhere if Scope.ADMIN in self.everywhere else frozenset()
        return _union(grant for grant in self.grants if grant.covers(kind, name))

    def check(self, scope: Scope, kind: Kind, name: str) -> None:
        """Raise Forbidden unless the caller has `scope` on a resource that the request names."""
        self.check_found((scope,), kind, name, None)

    def check_found(
        self, needed: Iterable[Scope], kind: Kind, name: str, absent: QuorumLogError | None
    ) -> frozenset[Scope]:
        """Return the caller's scopes on a log or namespace if they include one of `needed`.

        `absent` is the error for an id that doesn't exist. A caller without any scope gets the same
        error, so that the caller can't find out whether the id exists. Raises: Forbidden, `absent`.
        """
        scopes = self.scopes(kind, name)
        if scopes.isdisjoint(needed):
            raise (
                absent
                if absent is not None and not scopes
                else self.lacks(needed, reported(kind, name))
            )
        return scopes

    def listed(self, scope: Scope) -> tuple[str, ...] | None:
        """Names and prefixes that lists may return (SHOWN in `wire/bodies.py`). None means all."""
        if scope in self.everywhere:
            return None
        return tuple(
            f"{grant.kind}/{grant.name}{'*' * grant.is_prefix}"
            for grant in self.grants
            if scope in grant.scopes and grant.kind in (Kind.LOGS, Kind.LEDGERS)
        )

    def lacks(self, scopes: Iterable[Scope], where: str) -> Forbidden:
        """Create the error for a caller that has none of `scopes`."""
        return Forbidden(f"{self.who} has no grant of {' or '.join(sorted(scopes))} on {where}")

    def end(self) -> None:
        """Abort the connections of the caller's requests, because its token is no longer valid."""
        for connection in self.connections:
            connection.abort()


EVERYONE: Final = Caller("everyone", ("admin:*",))
"""The caller of every request to a gateway that requires no tokens."""

CALLER: Final = web.RequestKey("caller", Caller)
SCOPES: Final = web.RequestKey("scopes", frozenset[Scope])
"""Request key: the caller's scopes on the resource that the request names."""


def caller_of(request: web.Request) -> Caller:
    """Return the caller of a request; EVERYONE if no tokens are required."""
    caller: Caller = request.get(CALLER, EVERYONE)
    return caller


def check_scope(request: web.Request, scope: Scope) -> None:
    """Raise Forbidden unless the caller has `scope` on the resource in the request's path."""
    if scope not in request.get(SCOPES, caller_of(request).everywhere):
        raise caller_of(request).lacks((scope,), "the resource in the request's path")


def place_of(row: LedgerMetadata) -> tuple[Kind, str]:
    """The resource whose grants apply to a ledger: the ledger's log, otherwise its namespace."""
    if row.log is not None:
        return Kind.LOGS, row.log
    return Kind.LEDGERS, dict(row.custom).get(NAMESPACE, "")


def no_transaction(transaction: str) -> NoSuchTransaction:
    """Create the error that hides from a caller without a grant whether the transaction exists."""
    return NoSuchTransaction(f"there is no transaction {transaction} for this token")


def reported(kind: Kind, name: str) -> str:
    """Describe a resource for an error message."""
    if kind is Kind.CLUSTER:
        return "the cluster"
    if kind is Kind.LOGS:
        return f"the log {name}"
    return f"ledgers of the namespace {name}" if name else "ledgers without a namespace"
