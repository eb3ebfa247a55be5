"""Lost entries found by this process (rule 31), until a loss is accepted or a copy turns up."""

import logging
from collections import OrderedDict
from itertools import islice
from typing import Any, Final

from quorumlog.net.holdings import HoldingsClient
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, union

log = logging.getLogger(__name__)

_RECHECKS_AT_ONCE: Final = 10
"""How many ledgers are checked again per round (taste)."""
_LEDGERS_MAX: Final = 1000
"""How many ledgers are remembered; the one checked longest ago is dropped first (taste)."""


class KnownLosses:
    """Lost entries by ledger. Invariant: all possible holders have denied each of them."""

    def __init__(self, holdings: HoldingsClient) -> None:
        """No loss is known yet."""
        self._holdings = holdings
        self._found: OrderedDict[int, tuple[Answers, ...]] = OrderedDict()

    @property
    def entries(self) -> int:
        """How many entries are known to be lost."""
        return sum(f.last - f.first + 1 for found in self._found.values() for f in found)

    @property
    def oldest(self) -> list[int]:
        """The ledgers checked longest ago, to be checked again."""
        return list(islice(self._found, _RECHECKS_AT_ONCE))

    async def recheck(self, row: LedgerMetadata, suspects: Ranges) -> tuple[Answers, ...]:
        """Which of these entries, and of those lost at the last check, are lost."""
        known = {(found.first, found.last) for found in self._found.get(row.ledger_id, ())}
        found = await self._holdings.lost(row, union((*suspects, *known)))
        self.forget(row.ledger_id)
        if found:
            self._found[row.ledger_id] = found
            if len(self._found) > _LEDGERS_MAX:
                self._found.popitem(last=False)
        for lost in found:
            if (lost.first, lost.last) not in known:
                extra = {"ledger": row.ledger_id, "first": lost.first, "last": lost.last}
                log.error("entries-lost", extra={**extra, "answers": dict(lost.words)})
        return found

    def forget(self, ledger_id: int) -> None:
        """The ledger has all its entries, or is deleted."""
        self._found.pop(ledger_id, None)

    def json(self) -> list[dict[str, Any]]:
        """The losses as JSON for operators."""
        return [
            {"ledger_id": ledger_id, **answers_json(lost)}
            for ledger_id, found in self._found.items()
            for lost in found
        ]


def answers_json(found: Answers) -> dict[str, Any]:
    """A range, and the answer of each possible holder."""
    return {"first": found.first, "last": found.last, "answers": dict(found.words)}
