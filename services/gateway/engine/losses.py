"""Accepting a proven loss of a CLOSED ledger's entries (rule 31): an operator decides."""

import logging
from typing import Final

from quorumlog.errors import InvalidRequest, LossNotProven, MetadataUnavailable, NoSuchLedger
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.net.ports import MetadataPort
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LOST_RANGES_MAX, LedgerMetadata
from services.gateway.engine.rows import LedgerRows, is_closed

log = logging.getLogger(__name__)

_REFUSED_RANGES_MAX: Final = 100
"""How many ranges a refusal names (taste)."""


class LossAcceptance:
    """Accepts losses. Invariant: an entry is declared lost only while all possible
    holders deny it or are declared gone for ever.
    """

    def __init__(self, rows: LedgerRows, metadata: MetadataPort, holdings: HoldingsClient) -> None:
        """Keeps no state."""
        self._rows = rows
        self._metadata = metadata
        self._holdings = holdings

    async def accept(
        self, row: LedgerMetadata, first: int, last: int, declared: tuple[str, ...]
    ) -> LedgerMetadata:
        """Declare entries first..last lost, of a ledger whose row was just read; returns the new
        row.

        Raises: InvalidRequest, LossNotProven, NoSuchLedger, MetadataUnavailable.
        """
        while True:
            if not is_closed(row) or row.last_entry is None:
                raise LossNotProven(
                    "the ledger is not CLOSED: recover it first", ledger_id=row.ledger_id
                )
            if last > row.last_entry:
                raise InvalidRequest(
                    f"the ledger ends at {row.last_entry}", ledger_id=row.ledger_id
                )
            kept = row.kept(first, last)
            if not kept:
                return row  # a repeat
            await self._prove(row, kept, declared)
            changed = row.given_up(first, last, declared)
            if len(changed.lost_entries) > LOST_RANGES_MAX:
                raise InvalidRequest(
                    f"at most {LOST_RANGES_MAX} ranges of a ledger are given up",
                    ledger_id=row.ledger_id,
                )
            # The proof holds for this row only: after a change by a repair or another operator,
            # others may have the entries.
            status, now = await self._metadata.cas(changed, (), attempt=new_attempt())
            if status is CasStatus.MISSING:
                raise NoSuchLedger("it is deleted", ledger_id=row.ledger_id)
            if now is None:
                raise MetadataUnavailable(ledger_id=row.ledger_id)
            self._rows.put(now)
            if status is CasStatus.OK:
                log.warning(
                    "loss-accepted",
                    extra={
                        "ledger": row.ledger_id,
                        "first": first,
                        "last": last,
                        "declared": declared,
                    },
                )
                return now
            row = now

    async def _prove(
        self, row: LedgerMetadata, ranges: tuple[tuple[int, int], ...], declared: tuple[str, ...]
    ) -> None:
        """Raise LossNotProven unless nobody can serve any of these entries."""
        against: list[Answers] = []
        async for found in self._holdings.answers(row, ranges):
            if not found.is_lost(declared):
                against.append(found)
                if len(against) >= _REFUSED_RANGES_MAX:
                    break
        if against:
            raise LossNotProven(
                str(against[0]),
                ledger_id=row.ledger_id,
                entry_id=against[0].first,
                answers=[answers_json(found) for found in against],
            )


def answers_json(found: Answers) -> dict[str, object]:
    """The form in a problem document."""
    return {"first": found.first, "last": found.last, "answers": dict(found.words)}
