"""Orphans: ledgers that were created for a log, and that neither a log nor a fork names (rule 22)."""

import contextlib
import logging
import random
from collections.abc import Sequence
from typing import Final

from quorumlog.errors import NoSuchLedger, QuorumLogError
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.gateway.engine import Engine
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.store import MetadataLogs

log = logging.getLogger(__name__)

ORPHANS_PER_ROUND_MAX: Final = 100
"""Orphans that one round deletes: each may take until a timeout. Chosen by judgement."""
_PAGE: Final = 1000
"""Orphans that one round reads: so many that two gateways seldom choose the same ones to delete."""


class Orphans:
    """Deletes orphans. The metadata service refuses to delete a ledger that a log or a fork names."""

    def __init__(self, engine: Engine, store: MetadataLogs, index: OffsetIndex) -> None:
        """`index` forgets the offsets of ledgers that are dropped."""
        self._engine, self._store, self._index = engine, store, index
        self._after: int | None = None
        """The next round reads the orphans behind this ledger; None: from the first one on."""

    async def of_log(self, name: str) -> Sequence[LedgerMetadata]:
        """The orphans that were created for logs of this name."""
        found: list[LedgerMetadata] = []
        after: int | None = None
        while ids := await self._store.orphans(older_than_s=0, after=after, log=name):
            after = ids[-1]
            found += await self._engine.existing(ids)
        return found

    async def drop(self, ledger_ids: Sequence[int]) -> None:
        """Delete those of these ledgers that no log or fork names any more. A later round deletes what can't be deleted now."""
        for ledger_id in ledger_ids:
            self._index.drop(ledger_id)
        with contextlib.suppress(QuorumLogError):
            for ledger in await self._store.unshared(await self._engine.existing(ledger_ids)):
                with contextlib.suppress(QuorumLogError):
                    await self.delete(ledger.ledger_id)

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger if it still exists (rule 22). An open ledger is recovered first (rule 27), because its writer must not
        go on.

        Raises: OwnedByLog, NoSuchLedger if another gateway deletes it at this moment, and what a recovery raises.
        """
        for ledger in await self._engine.existing([ledger_id]):
            is_closed = ledger.state is State.CLOSED
            closed = ledger if is_closed else await self._engine.recover(ledger_id)
            await self._store.delete_unnamed(ledger_id)
            await self._engine.tell_deleted([closed])
            log.info("orphan-deleted", extra={"ledger": ledger_id})

    async def delete_some(self, *, older_than_s: float) -> bool:
        """One round: delete some ledgers that have been orphans for this long, or that a transaction did not publish.
        Returns whether more may be left.

        A round reads a page, deletes a random ORPHANS_PER_ROUND_MAX of it, and the next round begins behind the page. So gateways
        that do this at once delete different orphans, and those that can't be deleted now hold up no others.
        """
        began = self._after
        found = await self._store.orphans(older_than_s=older_than_s, after=began, limit=_PAGE)
        self._after = found[-1] if len(found) == _PAGE else None
        taken = random.sample(found, min(len(found), ORPHANS_PER_ROUND_MAX))
        for ledger_id in taken:
            try:
                await self.delete(ledger_id)
            except NoSuchLedger:
                continue  # another gateway deleted it
            except QuorumLogError as error:
                log.warning("orphan-kept", extra={"ledger": ledger_id, "error": repr(error)})
        return began is not None or len(found) > len(taken)
