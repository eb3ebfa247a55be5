"""`python -m tests.support.scopes --write`: the table of operations and scopes in docs/reference/security.md, from the code."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from services.gateway.edge.cluster import SHARED, ClusterRoutes
from services.gateway.edge.console import ConsoleRoutes
from services.gateway.edge.consumers import ConsumerRoutes
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.ledgers import LedgerRoutes
from services.gateway.edge.log_keys import KeyRoutes
from services.gateway.edge.log_records import RecordRoutes
from services.gateway.edge.logs import LogRoutes
from services.gateway.edge.operations import PublicOperation
from services.gateway.edge.operators import OperatorRoutes
from services.gateway.edge.queues import QueueRoutes
from services.gateway.edge.tokens import TokenRoutes
from services.gateway.edge.transactions import TransactionRoutes
from services.gateway.streams import operations as stream_operations
from services.gateway.streams.subscriptions import SubscriptionRoutes

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "security.md"
_STREAMS: Final = {
    name: one for name, one in vars(stream_operations).items() if isinstance(one, PublicOperation)
}
_RESOURCES: Final = (
    LedgerRoutes.operations,
    EntryRoutes.operations,
    LogRoutes.operations,
    ConsumerRoutes.operations,
    QueueRoutes.operations,
    RecordRoutes.operations,
    KeyRoutes.operations,
    _STREAMS,
    SubscriptionRoutes.operations,
    TransactionRoutes.operations,
    TokenRoutes.operations,
    ClusterRoutes.operations,
    OperatorRoutes.operations,
    ConsoleRoutes.operations,
)
_TABLE: Final = re.compile(
    r"(<!-- scopes; `make docs` writes them -->\n).*?(<!-- end of the scopes -->)", re.DOTALL
)


def operations() -> Iterable[PublicOperation]:
    """All public operations, by resource."""
    for resource in _RESOURCES:
        yield from resource.values()
    yield from SHARED


def with_table(page: str) -> str:
    """The page with the table as the code has it."""
    rows = [f"| `{one.key}` | {one.scope} |" for one in operations()]
    table = "\n".join(("| operation | needs |", "|---|---|", *rows))
    written, count = _TABLE.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page)
    assert count == 1, "docs/reference/security.md has no place for the table"
    return written


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"]
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
