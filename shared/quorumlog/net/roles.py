"""Which role may call which internal route.

Each service has a table, `roles.py`, beside its routes: a row for each route. A route without a row, or a row without a
route, keeps the service from starting. docs/security.md shows all tables.

A caller whose role is None (the cluster's secret, or anybody where there are no credentials) may do everything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from aiohttp import web

from quorumlog.errors import CallerRefused, Forbidden
from quorumlog.net.identity import ANYBODY, CALLER, Identity, Role
from quorumlog.net.operations import Route

Table = Mapping[str, frozenset[Role]]
"""The roles that may call a route, by the route's method and path: `GET /v1/info`."""


def guarded(routes: Iterable[Route], table: Table) -> list[Route]:
    """Routes that only the roles of their rows may call. Raises: ValueError."""
    found = {key_of(route): route for route in routes}
    if missing := found.keys() - table.keys():
        raise ValueError(f"routes without a row in the table of roles: {sorted(missing)}")
    if superfluous := table.keys() - found.keys():
        raise ValueError(f"rows of the table of roles without a route: {sorted(superfluous)}")
    return [_guarded(route, table[key]) for key, route in found.items()]


def _guarded(route: Route, roles: frozenset[Role]) -> Route:
    def check(request: web.Request) -> None:
        caller = caller_of(request)
        if caller.role is not None and caller.role not in roles:
            raise Forbidden(
                f"the {caller.role} {caller.name} may not do this: {', '.join(sorted(roles))} may"
            )

    return replace(route, check=check)


def key_of(route: Route) -> str:
    """The key of a route's row."""
    return f"{route.operation.method} {route.operation.path}"


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
