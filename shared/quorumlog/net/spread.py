"""Sends copies of ledger metadata to bookies after a change that no append follows (rule 18b)."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from quorumlog.net.ports import Ports
from quorumlog.protocol.ends import RowSpread, Spreading
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata

log = logging.getLogger(__name__)


def spread(row: LedgerMetadata, ports: Ports) -> asyncio.Future[int]:
    """Send bookies copies of the committed metadata `row`. The future never fails; its result is
    how many bookies confirmed a copy. The future is done when enough bookies did, or after twice
    the deadline of an add.
    """
    sending = _Spread(row, ports)
    sending.begin()
    return sending.end


class _Spread:
    """Performs what the machine `RowSpread` decides. Invariant: `end` always gets its result."""

    __slots__ = ("_machine", "_ports", "end")

    def __init__(self, row: LedgerMetadata, ports: Ports) -> None:
        self._machine, self._ports = RowSpread(row), ports
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Send copies to the members."""
        row, ports = self._machine.row, self._ports
        try:
            ports.clock.after(ports.times.add_s, self._members_overdue)
            members = row.last_fragment.bookies
            down = frozenset(member for member in members if ports.placement.is_down(member))
            self._send_to(self._machine.begin(down))
            self._go_on()
        except Exception:
            # A defect. The metadata was changed all the same, so its caller must get a result.
            log.exception("row-spread-broke", extra={"ledger": row.ledger_id})
            self._settle()

    def _send_to(self, members: Iterable[str]) -> None:
        row = self._machine.row
        for member in members:
            answered = partial(self._answered, member)
            self._ports.bookies.keep_row(member, row.ledger_key, row, answered)

    def _answered(self, member: str, status: Status) -> None:
        if status is not Status.OK:
            extra = {"ledger": self._machine.row.ledger_id, "bookie": member, "status": status}
            log.debug("row-not-kept", extra=extra)
        self._machine.answered(member, status)
        self._go_on()

    def _members_overdue(self) -> None:
        # `_ask_others` starts another timer for the other bookies.
        if self._machine.phase is Spreading.MEMBERS:
            self._overdue()

    def _overdue(self) -> None:
        self._machine.overdue()
        self._go_on()

    def _go_on(self) -> None:
        try:
            if self._machine.phase is Spreading.PLACING and not self.end.done():
                self._ask_others()
        except Exception:
            log.exception("row-spread-broke", extra={"ledger": self._machine.row.ledger_id})
            self._settle()
        if self._machine.phase is Spreading.OVER:
            self._settle()

    def _ask_others(self) -> None:
        row, ports = self._machine.row, self._ports
        found = ports.placement.candidates(row.last_fragment.bookies, tuple(row.all_members))
        ports.clock.after(ports.times.add_s, self._overdue)
        self._send_to(self._machine.others(found))

    def _settle(self) -> None:
        if not self.end.done():
            self.end.set_result(self._machine.kept)
