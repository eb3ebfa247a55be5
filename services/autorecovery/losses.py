"""What nobody can serve any more, as this process has found it (rule 31): told until an operator accepts
it, or somebody has it after all.
"""

import logging
from collections import OrderedDict
from itertools import islice
from typing import Any, Final

from quorumlog.net.holdings import HoldingsClient
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, union

log = logging.getLogger(__name__)

_AGAIN: Final = 10
"""Looked at again at a time (taste)."""
_LEDGERS_MAX: Final = 1000
"""Ledgers that are remembered; the one that was looked at longest ago goes first (taste)."""


class Losses:
    """Entries that are lost, by ledger. Invariant: each was proven by the word of all who could
    hold it.
    """

    def __init__(self, holdings: HoldingsClient) -> None:
        """Nothing is known to be lost."""
        self._holdings = holdings
        self._found: OrderedDict[int, tuple[Answers, ...]] = OrderedDict()

    @property
    def entries(self) -> int:
        """How many are known to be lost."""
        return sum(f.last - f.first + 1 for found in self._found.values() for f in found)

    @property
    def oldest(self) -> list[int]:
        """The ledgers that were looked at longest ago, to be looked at again."""
        return list(islice(self._found, _AGAIN))

    async def look(self, row: LedgerMetadata, suspects: Ranges) -> tuple[Answers, ...]:
        """Which of these entries, and of those that were lost at the last look, are lost."""
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
        """The ledger is whole, or gone."""
        self._found.pop(ledger_id, None)

    def json(self) -> list[dict[str, Any]]:
        """For operators."""
        return [
            {"ledger_id": ledger_id, **answers_json(lost)}
            for ledger_id, found in self._found.items()
            for lost in found
        ]


def answers_json(found: Answers) -> dict[str, Any]:
    """A range, and what each who could hold it answered."""
    return {"first": found.first, "last": found.last, "answers": dict(found.words)}
