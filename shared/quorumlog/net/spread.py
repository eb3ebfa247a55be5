"""Sends copies of a ledger's row to its members after a change that no append follows (rule 18b)."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from quorumlog.net.ports import Ports
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata, State

log = logging.getLogger(__name__)


def spread(row: LedgerMetadata, ports: Ports) -> asyncio.Future[int]:
    """Send copies of a committed row. The future's result is the number of bookies that have confirmed a copy. It has no
    error, and ends when enough bookies have one, or at the latest after twice the deadline of an add.
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
    autorecovery's check sends again. Where too few members have a copy of an end by then, other bookies get one, since
    a rebuild asks all: an ack quorum of copies anywhere keeps an end.

    Invariant: `end` gets its result, whatever fails.
    """

    __slots__ = ("_are_others_asked", "_awaited", "_kept", "_lacking", "_ports", "_row", "end")

    def __init__(self, row: LedgerMetadata, ports: Ports) -> None:
        """Nothing is sent yet."""
        quorum = row.quorum
        self._row, self._ports = row, ports
        self._awaited = set(row.last_fragment.bookies)
        self._lacking = quorum.ensemble_size - quorum.write_quorum + quorum.ack_quorum
        """Copies that are needed yet: `write_quorum` - `ack_quorum` members may be without one."""
        self._kept = 0
        """Copies at any bookie."""
        self._are_others_asked = False
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send(self) -> None:
        """Send the copies."""
        row, ports = self._row, self._ports
        try:
            ports.clock.after(ports.times.add_s, self._ask_others)
            self._awaited -= {m for m in self._awaited if ports.placement.is_down(m)}
            self._send_to(sorted(row.all_members))
        except Exception:
            # A defect. The row is changed all the same, and who changed it must hear of that.
            log.exception("row-spread-broke", extra={"ledger": row.ledger_id})
            self._settle()
        if not self._awaited:
            self._ask_others()

    def _send_to(self, members: Iterable[str]) -> None:
        for member in members:
            answered = partial(self._answered, member)
            self._ports.bookies.keep_row(member, self._row.ledger_key, self._row, answered)

    def _answered(self, member: str, status: Status) -> None:
        if status is not Status.OK:
            extra = {"ledger": self._row.ledger_id, "bookie": member, "status": status}
            log.debug("row-not-kept", extra=extra)
        else:
            self._kept += 1
            self._lacking -= member in self._row.last_fragment.bookies
        self._awaited.discard(member)
        is_over = not self._awaited or self._lacking_anywhere <= 0
        if self._lacking <= 0 or (self._are_others_asked and is_over):
            self._settle()
        elif not self._awaited:
            self._ask_others()

    @property
    def _lacking_anywhere(self) -> int:
        return self._row.quorum.ack_quorum - self._kept

    def _ask_others(self) -> None:
        """No member more is waited for: ask others, once, who have a deadline of their own."""
        row, placement = self._row, self._ports.placement
        if self.end.done() or self._are_others_asked:
            return
        if row.state is State.OPEN:
            self._settle()
            return
        self._are_others_asked = True
        try:
            others = placement.candidates(row.last_fragment.bookies, tuple(row.all_members))
            self._awaited = set(others[: max(self._lacking_anywhere, 0)])
            self._ports.clock.after(self._ports.times.add_s, self._settle)
            self._send_to(sorted(self._awaited))
        except Exception:
            log.exception("row-spread-broke", extra={"ledger": row.ledger_id})
            self._settle()
        if not self._awaited:
            self._settle()

    def _settle(self) -> None:
        if not self.end.done():
            self.end.set_result(self._kept)
