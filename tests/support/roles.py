"""`python -m tests.support.roles`: the tables of docs/reference/security.md, read off the routes of the services.

Without an argument the program prints the tables, `--write` puts them into the page.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from quorumlog.net.identity import Role
from quorumlog.net.operations import Route
from services.autorecovery.handlers import ROUTES as AUTORECOVERY
from services.bookie.handlers import ROUTES as BOOKIE
from services.gateway.internal import FORWARDED, ledger_routes, log_routes, rate_routes
from services.metadata.app import ROUTES as METADATA

Table = Mapping[str, frozenset[Role]]
"""The roles that may call a route, by the route's method and path: `GET /v1/info`."""
_NOTHING: Final = cast("Any", None)
"""In place of what handlers work on: no handler is called here."""


def _table(*routes: Route) -> Table:
    return {route.operation.key: route.operation.roles for route in routes}


PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "security.md"
TABLES: Final[dict[str, Table]] = {
    "gateway": _table(
        *ledger_routes(_NOTHING, "", [Route(each, _NOTHING) for each in FORWARDED]),
        *log_routes(_NOTHING, "", _NOTHING),
        *rate_routes(_NOTHING, ""),
    ),
    "bookie": _table(*BOOKIE),
    "metadata": _table(*METADATA),
    "autorecovery": _table(*AUTORECOVERY),
}
"""By the service whose internal listener has the routes."""

_PLACE: Final = re.compile(
    r"(<!-- roles; `make docs` writes them -->\n).*?(<!-- end of the roles -->)", re.DOTALL
)


def table(roles: Table) -> str:
    """A row for each route, a column for each role that may do anything."""
    head = f"| route | {' | '.join(Role)} |\n|---|{'---|' * len(Role)}\n"
    rows = (
        f"| `{route}` | {' | '.join('✓' if role in allowed else '' for role in Role)} |\n"
        for route, allowed in roles.items()
    )
    return head + "".join(rows)


def with_tables(page: str) -> str:
    """The page with the current tables."""
    tables = "".join(f"\n### {name}\n\n{table(roles)}" for name, roles in TABLES.items())
    return _PLACE.sub(lambda found: f"{found[1]}{tables}\n{found[2]}", page)


def main() -> int:
    """Print the tables, or write the page."""
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_tables(page), encoding="utf-8")
    else:
        sys.stdout.write(with_tables(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
