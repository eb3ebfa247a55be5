"""Sends copies of a ledger's row to its members after a change that no append follows (rule 18b)."""

import asyncio
import logging
from functools import partial

from quorumlog.net.ports import Ports
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata

log = logging.getLogger(__name__)


def spread(row: LedgerMetadata, ports: Ports) -> asyncio.Future[None]:
    """Send copies of a committed row. The future has no error, and ends when enough members have a copy, or at
    the latest with the deadline of an add.
    """
    copies = RowSpread(row, ports)
    copies.send()
    return copies.end


class RowSpread:
    """The copies of one row on their way.

    Every member gets one, those of earlier fragments and targets of repairs too: it costs one message, and tells
    the end of a ledger whose last fragment is empty where that fragment's members are gone.

    Only members of the last fragment are waited for, and only until each write set has an ack quorum with a copy:
    the copy is then as safe as an entry, and a slow bookie delays no close where it delays no append. Members that
    are known to be down are not waited for, and nobody longer than for an add. What a member did not get,
    autorecovery's check sends again.

    Invariant: `end` gets its result, whatever fails.
    """

    __slots__ = ("_awaited", "_lacking", "_ports", "_row", "end")

    def __init__(self, row: LedgerMetadata, ports: Ports) -> None:
        """Nothing is sent yet."""
        quorum = row.quorum
        self._row, self._ports = row, ports
        self._awaited = set(row.last_fragment.bookies)
        self._lacking = quorum.ensemble_size - quorum.write_quorum + quorum.ack_quorum
        """Copies that are needed yet: `write_quorum` - `ack_quorum` members may be without one."""
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self) -> None:
        """Send the copies."""
        row, ports = self._row, self._ports
        try:
            ports.clock.after(ports.times.add_s, self._settle)
            self._awaited -= {m for m in self._awaited if ports.placement.is_down(m)}
            for member in row.all_members:
                ports.bookies.keep_row(member, row.ledger_key, row, partial(self._answered, member))
        except Exception:
            # A defect. The row is changed all the same, and who changed it must hear of that.
            log.exception("row-spread-broke", extra={"ledger": row.ledger_id})
            self._awaited.clear()
        if not self._awaited:
            self._settle()

    def _answered(self, member: str, status: Status) -> None:
        if status is not Status.OK:
            extra = {"ledger": self._row.ledger_id, "bookie": member, "status": status}
            log.debug("row-not-kept", extra=extra)
        elif member in self._row.last_fragment.bookies:
            self._lacking -= 1
        self._awaited.discard(member)
        if self._lacking <= 0 or not self._awaited:
            self._settle()

    def _settle(self) -> None:
        if not self.end.done():
            self.end.set_result(None)
