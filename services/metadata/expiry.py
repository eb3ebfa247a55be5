"""What happens to transactions though nobody asks: those that nobody ended in time are aborted.

Every metadata service does this by turns; a lease spares the others the work, and row locks decide.
"""

import asyncio
import logging
import uuid
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.wire.repair_bodies import LeaseTake
from services.metadata.leases import LeaseStore
from services.metadata.transactions import TransactionStore

log = logging.getLogger(__name__)

_LEASE: Final = "transactions"
_AT_ONCE: Final = 100
"""Transactions of one round: each may take thousands of ledgers along."""


class Expiry:
    """The background work of one service."""

    def __init__(
        self, transactions: TransactionStore, leases: LeaseStore, *, every_s: float
    ) -> None:
        self._transactions, self._leases = transactions, leases
        self._every_s = every_s
        self._holder = str(uuid.uuid4())
        self.open = self.orphans = 0
        """Transactions that are OPEN and ledgers that wait for their deletion, as last counted."""

    async def run(self) -> None:
        """For ever; failures are tried again with the next round."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.round()
            except QuorumLogError as error:
                log.warning("expiry-put-off", extra={"why": error.detail})
            except Exception:
                # A defect in one round must not end all that come, nor the stream of changes.
                log.exception("expiry-failed")

    async def round(self) -> None:
        """End what has expired, if it is this service's turn, and count."""
        lease = await self._leases.take(
            _LEASE, LeaseTake(holder=self._holder, ttl_s=3 * self._every_s)
        )
        if lease.holder == self._holder:
            ended = await self._transactions.expire(_AT_ONCE)
            if ended:
                log.info("transactions-expired", extra={"count": ended})
        self.open, self.orphans = await self._transactions.counts()
