"""Expiry: transactions that were not ended in time are aborted, and old rows of the audit log deleted.

All metadata services take turns by a lease, which only saves work; row locks decide.
"""

import asyncio
import logging
import uuid
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.wire.repair_bodies import LeaseTake
from services.metadata.audit_store import AuditStore
from services.metadata.inquiry import Inquiry
from services.metadata.repairs import LeaseStore
from services.metadata.transactions import TransactionStore

log = logging.getLogger(__name__)

_LEASE: Final = "transactions"
_PER_ROUND: Final = 100
"""Transactions per round: each may have thousands of ledgers."""


class Expiry:
    """The expiry task of one service."""

    def __init__(
        self,
        transactions: TransactionStore,
        leases: LeaseStore,
        audit: AuditStore,
        inquiry: Inquiry,
        *,
        every_s: float,
    ) -> None:
        self._transactions, self._leases, self._inquiry = transactions, leases, inquiry
        self._audit = audit
        self._every_s = every_s
        self._holder = str(uuid.uuid4())
        self.open = self.orphans = 0
        """The last counts of OPEN transactions and of ledgers that wait for their deletion."""

    async def run(self) -> None:
        """Run rounds for ever; the next round retries failures."""
        while True:
            await asyncio.sleep(self._every_s)
            await self._inquiry.is_over.wait()
            try:
                await self.round()
            except QuorumLogError as error:
                log.warning("expiry-put-off", extra={"why": error.detail})
            except Exception:
                # A bug in one round must not end later rounds, nor the stream of changes.
                log.exception("expiry-failed")

    async def round(self) -> None:
        """Abort expired transactions if this service has the lease, and update the counts."""
        lease = await self._leases.take(
            _LEASE, LeaseTake(holder=self._holder, ttl_s=3 * self._every_s)
        )
        if lease.holder == self._holder:
            ended = await self._transactions.expire(_PER_ROUND)
            if ended:
                log.info("transactions-expired", extra={"count": ended})
            await self._audit.trim()
        self.open, self.orphans = await self._transactions.counts()
