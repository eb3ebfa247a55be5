"""Missed entries that only a writer knew when somebody else ended its ledger (rule 8).

A writer normally queues missed entries with its own changes of the row. A recovery writes back
entries above the LAC that it found, and knows nothing of an older entry that reached only an ack
quorum. Without this module only the next check of all copies would find that entry, a day later.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from quorumlog.errors import MetadataUnavailable, QuorumLogError
from quorumlog.net.repair_client import RepairClient
from quorumlog.protocol.messages import MissedRange
from quorumlog.wire.repair_bodies import RepairAdd

log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


async def queue_missed(
    repairs: RepairClient, ledger_id: int, missed: Iterable[MissedRange]
) -> None:
    """Add the ranges to the repair queue, once metadata is available. Repair checks before it
    copies, so a range that is queued twice, or repaired since, costs only a check.
    """
    ranges = defaultdict(list)
    for item in missed:
        ranges[item.member].append((item.first, item.last))
    items = [
        RepairAdd(ledger_id=ledger_id, member=member, ranges=tuple(found))
        for member, found in ranges.items()
    ]
    while True:
        try:
            await repairs.add(items)
        except MetadataUnavailable:
            await asyncio.sleep(_RETRY_S)
        except QuorumLogError as error:
            log.warning("missed-not-queued", extra={"ledger": ledger_id, "error": repr(error)})
            return
        else:
            return
