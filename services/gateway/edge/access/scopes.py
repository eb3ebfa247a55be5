"""Who may do what: the scopes that public operations declare (`edge/operations.py`), and what a caller's grants allow.

docs/security.md shows the scopes of all operations. A ledger of a log is judged by the log, any other ledger by its namespace, which is what its maker
put into its metadata under `namespace` (docs/adr/0021-access-tokens.md).
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aiohttp import web

from quorumlog.errors import Forbidden, NoSuchTransaction, QuorumLogError
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.position_bodies import POSITIONS_LOG
from quorumlog.wire.token_bodies import NAMESPACE, IssuedToken
from services.gateway.edge.access.quotas import Usage


class Scope(StrEnum):
    """What a grant allows on what it names."""

    READ = "read"
    APPEND = "append"
    MANAGE = "manage"
    ADMIN = "admin"
    """All of the above, and to give up entries and bookies."""


class Kind(StrEnum):
    """What grants name."""

    LOGS = "logs"
    LEDGERS = "ledgers"
    CLUSTER = "cluster"


class Named(StrEnum):
    """What an operation needs its scope on."""

    NOTHING = "nothing"
    """Answered without a token."""
    LOG = "the log"
    STREAM = "the stream's log"
    LEDGER = "the ledger"
    TRANSACTION = "the transaction's log"
    SOME = "what is named or listed"
    """The handler judges what the body names, or leaves out of a list what the caller may not read."""
    CLUSTER = "the cluster"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Access:
    """What an operation needs: one of the scopes, on what it names."""

    named: Named
    scopes: frozenset[Scope] = frozenset()

    def __str__(self) -> str:
        """For people."""
        if self.named is Named.NOTHING:
            return "no token"
        scopes = [scope for scope in Scope if scope in self.scopes]
        return f"{' or '.join(f'`{scope}`' for scope in scopes)} on {self.named}"


def on(named: Named, *scopes: Scope) -> Access:
    """What an operation needs: one of the scopes on what it names."""
    return Access(named, frozenset(scopes))


OPEN: Final = Access(Named.NOTHING)
"""Anybody may."""
LOOK: Final = frozenset((Scope.READ, Scope.APPEND, Scope.MANAGE))
"""Any of them lets a caller look at something."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Scopes on everything (no kind), on the cluster, or on the logs and namespaces of a name or a prefix."""

    scopes: frozenset[Scope]
    kind: Kind | None
    name: str = ""
    is_prefix: bool = False

    @classmethod
    def parsed(cls, text: str) -> "Grant":
        """A grant as it is written (`wire/token_bodies.py`, GRANT)."""
        scope, _, where = text.partition(":")
        scopes = frozenset(Scope) if scope == Scope.ADMIN else frozenset((Scope(scope),))
        if where == "*":
            return cls(scopes, None)
        kind, _, name = where.partition("/")
        return cls(scopes, Kind(kind), name.removesuffix("*"), name.endswith("*"))

    def covers(self, kind: Kind, name: str) -> bool:
        """Whether the grant is for something."""
        if self.kind is None:
            return True
        if self.kind is not kind:
            return False
        return name.startswith(self.name) if self.is_prefix else name == self.name


def _union(grants: Iterable[Grant]) -> frozenset[Scope]:
    return frozenset(scope for grant in grants for scope in grant.scopes)


class Caller:
    """Who sends a request, and what they may do."""

    __slots__ = (
        *("connections", "ends_at", "everywhere", "grants", "id"),
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
        """`who`: for messages; it is no secret. `ends_at`: when the token expires, in seconds since 1970. `issued`:
        what the caller's JWT says; such a caller has no `token_id`.
        """
        self.who, self.id, self.ends_at, self.issued = who, token_id, ends_at, issued
        self.grants = tuple(map(Grant.parsed, grants))
        self.everywhere = _union(grant for grant in self.grants if grant.kind is None)
        """The scopes on everything."""
        self.somewhere = _union(self.grants)
        self.usage: Usage | None = None
        """Where the token has quotas."""
        self.connections: set[asyncio.Transport] = set()
        """Those of the requests that are under way."""

    @property
    def identity(self) -> str:
        """The same for all requests of one caller, and for no other caller's. A JWT is one of many of its subject."""
        return f"jwt:{self.issued.subject}" if self.issued is not None else f"token:{self.id}"

    def scopes(self, kind: Kind, name: str) -> frozenset[Scope]:
        """The scopes on a log, a namespace, or the cluster. The log of positions is the cluster's own: no name of a grant
        stands for it.
        """
        if kind is Kind.LOGS and name == POSITIONS_LOG:
            return self.everywhere
        return _union(grant for grant in self.grants if grant.covers(kind, name))

    def check(self, scope: Scope, kind: Kind, name: str) -> None:
        """Raises: Forbidden unless the caller has a scope on something that it has named."""
        self.check_found((scope,), kind, name, None)

    def check_found(
        self, needed: Iterable[Scope], kind: Kind, name: str, absent: QuorumLogError | None
    ) -> frozenset[Scope]:
        """The caller's scopes on a log or namespace, with at least one of `needed`. `absent`: the answer for an id that does not
        exist. A caller without any scope gets it too, because it has named an id, and must not learn that it exists.

        Raises: Forbidden, `absent`.
        """
        scopes = self.scopes(kind, name)
        if scopes.isdisjoint(needed):
            raise (
                absent
                if absent is not None and not scopes
                else self.lacks(needed, told(kind, name))
            )
        return scopes

    def listed(self, scope: Scope) -> tuple[str, ...] | None:
        """The logs and namespaces on which the caller has a scope, as lists take them (`wire/bodies.py`, SHOWN); None: all."""
        if scope in self.everywhere:
            return None
        return tuple(
            f"{grant.kind}/{grant.name}{'*' * grant.is_prefix}"
            for grant in self.grants
            if scope in grant.scopes and grant.kind in (Kind.LOGS, Kind.LEDGERS)
        )

    def lacks(self, scopes: Iterable[Scope], where: str) -> Forbidden:
        """The refusal of a caller without any of some scopes."""
        return Forbidden(f"{self.who} has no grant of {' or '.join(sorted(scopes))} on {where}")

    def end(self) -> None:
        """Cut the requests that are under way: the caller is not known any more."""
        for connection in self.connections:
            connection.abort()


EVERYONE: Final = Caller("everyone", ("admin:*",))
"""Any caller of a gateway that needs no tokens."""

CALLER: Final = web.RequestKey("caller", Caller)
SCOPES: Final = web.RequestKey("scopes", frozenset[Scope])
"""The caller's scopes on what the request names."""


def caller_of(request: web.Request) -> Caller:
    """Who sends a request."""
    caller: Caller = request.get(CALLER, EVERYONE)
    return caller


def check_scope(request: web.Request, scope: Scope) -> None:
    """Raises: Forbidden unless the caller has a scope on what the request's path names."""
    if scope not in request.get(SCOPES, caller_of(request).everywhere):
        raise caller_of(request).lacks((scope,), "what the request names")


def place_of(row: LedgerMetadata) -> tuple[Kind, str]:
    """What grants name a ledger by: its log, else its namespace."""
    if row.log is not None:
        return Kind.LOGS, row.log
    return Kind.LEDGERS, dict(row.custom).get(NAMESPACE, "")


def no_transaction(transaction: str) -> NoSuchTransaction:
    """The answer to a caller without any grant on the transaction's log. It does not show whether the transaction exists."""
    return NoSuchTransaction(f"there is no transaction {transaction} for this token")


def told(kind: Kind, name: str) -> str:
    """A place, for people."""
    if kind is Kind.CLUSTER:
        return "the cluster"
    if kind is Kind.LOGS:
        return f"the log {name}"
    return f"ledgers of the namespace {name}" if name else "ledgers without a namespace"
