"""Runs a protocol machine on real connections and timers, through ports. Spreads copies of ledger
metadata after a change that no append follows (rule 18b).

The driver passes events to its machine one at a time, in order of arrival, on the event loop,
without a task. Answers of bookies and timers are callbacks; only metadata requests, which are rare,
use a task. The machine's reports to its owner (confirmed, failed, closed, ...) are passed to
`notify`, also one at a time and in order.
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from quorumlog import errors
from quorumlog.net.ports import Ports
from quorumlog.protocol import messages
from quorumlog.protocol.ends import RowSpread, Spreading
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.recovery import Recovery

log = logging.getLogger(__name__)

Row = tuple[messages.CasStatus, LedgerMetadata | None]

Reported = (
    messages.Confirmed
    | messages.Failed
    | messages.Closed
    | messages.Repaired
    | messages.RecoveryNeeded
    | messages.EntriesRead
)
"""The effects that report to the machine's owner."""


class LedgerMachine(Protocol):
    """A protocol machine."""

    def step(self, event: messages.Event) -> list[messages.Effect]:
        """Process an event and return the effects to perform."""


@dataclass(eq=False, slots=True)
class Driver:
    """Executes one machine's steps and effects, serially.

    Invariants: `step` is not reentered; each effect that is a request is answered once; after
    `stop` the machine gets no event and its owner no effect.
    """

    _machine: LedgerMachine
    _ledger_id: int
    _ports: Ports
    _notify: Callable[[Reported], None]
    """Must not raise."""
    _inbox: deque[messages.Event] = field(default_factory=deque)
    _is_stepping: bool = False
    is_stopped: bool = False
    """Whether the machine gets no further events, after `stop` or an exception."""
    _token: tuple[int, str] = (-1, "")

    def post(self, event: messages.Event) -> None:
        """Step the machine with an event, at once or after the events that are already queued."""
        if self.is_stopped:
            return
        inbox = self._inbox
        inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while inbox and not self.is_stopped:
                for effect in self._machine.step(inbox.popleft()):
                    self._perform(effect)
        except Exception:
            # After a bug, the machine's state can't be trusted. Pending appends have an unknown
            # outcome, and nothing more is sent.
            log.exception("machine-broke", extra={"ledger": self._ledger_id})
            self.stop()
            self._notify(
                messages.Failed(
                    "internal-error",
                    detail="an internal error stopped the ledger's state machine: see the log",
                )
            )
        finally:
            self._is_stepping = False

    def stop(self) -> None:
        """Stop the machine, and ignore later answers and timers."""
        self.is_stopped = True
        self._inbox.clear()

    def _perform(self, effect: messages.Effect) -> None:
        match effect:
            case messages.SendAdd():
                run, answered = effect.run, messages.AddAnswered
                head = (effect.position, effect.member, effect.generation, run.first, run.last)
                done = partial(self._answered, answered, *head)
                self._ports.bookies.add(
                    effect.member,
                    effect.ledger_key,
                    run,
                    done,
                    recovery=effect.recovery,
                    row=effect.row,
                )
            case messages.StartTimer(timer, tag):
                delay_s = self._ports.times.of(timer)
                self._ports.clock.after(delay_s, self.post, messages.TimerFired(timer, tag))
            case messages.SendRead():
                entries = (effect.first, effect.last)
                at = (effect.position, effect.member)
                self._ports.bookies.read(
                    effect.member,
                    effect.ledger_id,
                    *entries,
                    partial(self._answered, messages.ReadAnswered, *at, *entries),
                    bytes_max=self._ports.read_bytes_max,
                    fence_key=effect.ledger_key if effect.fence else None,
                    from_disk=effect.from_disk,
                )
            case messages.SendFence():
                at, key = (effect.position, effect.member), effect.ledger_key
                done = partial(self._answered, messages.FenceAnswered, *at)
                self._ports.bookies.fence(effect.member, effect.ledger_id, key, done)
            case messages.SendRow(member, row):
                done = partial(self._answered, messages.RowAnswered, member, row.version)
                self._ports.bookies.keep_row(member, row.ledger_key, row, done)
            case messages.FindBookies(attempt, ensemble, exclude):
                members = self._ports.placement.candidates(ensemble, exclude)
                self.post(messages.BookiesFound(attempt, members))
            case messages.UpdateMetadata():
                self._update(effect)
            case messages.ReadMetadata(attempt):
                read = partial(self._ports.metadata.read, self._ledger_id)
                self._ports.tasks.start(self._ask_metadata(attempt, read))
            case _:
                if not self.is_stopped:
                    self._notify(effect)

    def _answered(self, event: Callable[..., messages.Event], *parts: Any) -> None:
        """Step the machine with an event, built from the fields of a request and its answer."""
        self.post(event(*parts))

    def _update(self, effect: messages.UpdateMetadata) -> None:
        # A machine that repeats an attempt number repeats the same change, with the same token.
        if self._token[0] != effect.attempt:
            self._token = (effect.attempt, str(uuid.uuid4()))
        swap = partial(self._swap, effect, self._token[1])
        self._ports.tasks.start(self._ask_metadata(effect.attempt, swap))

    async def _swap(self, effect: messages.UpdateMetadata, token: str) -> Row:
        metadata = self._ports.metadata
        try:
            return await metadata.cas(effect.metadata, effect.missed, attempt=token)
        except errors.StaleMember as error:
            return await self._refused(error)

    async def _ask_metadata(self, attempt: int, ask: Callable[[], Awaitable[Row]]) -> None:
        try:
            status, row = await ask()
        except errors.CopyLost as error:
            # Rule 18d: continuing might lose entries, so the machine ends, and an operator decides.
            if not self.is_stopped:
                self.stop()
                self._notify(messages.Failed(error.code, detail=error.detail))
            return
        except Exception:
            log.exception("metadata-client-broke", extra={"ledger": self._ledger_id})
            status, row = messages.CasStatus.UNKNOWN, None
        self.post(messages.MetadataAnswered(attempt, status, row))

    async def _refused(self, error: errors.StaleMember) -> Row:
        """Make the machine choose members again from a newer list of bookies, since its list was
        outdated. A change that may become legal later stays unsettled (rules 6 and 15b).
        """
        try:
            await self._ports.placement.refresh()
        except errors.QuorumLogError as unavailable:
            log.info("bookies-unknown", extra={"why": unavailable.detail})
            return messages.CasStatus.UNKNOWN, None
        if not error.members.get("is_final"):
            return messages.CasStatus.UNKNOWN, None
        status, row = await self._ports.metadata.read(self._ledger_id)
        return messages.CasStatus.CONFLICT if status is messages.CasStatus.OK else status, row


async def conclude(
    machine: LedgerMachine,
    ledger_id: int,
    ports: Ports,
    first: messages.Event,
    *,
    deadline_s: float,
) -> LedgerMetadata:
    """Run a recovery or a repair until it ends, and return the ledger's metadata.

    Raises: the machine's error; RecoveryBlocked if `deadline_s` passes first.
    """
    end: asyncio.Future[LedgerMetadata] = asyncio.get_running_loop().create_future()

    def reported(news: Reported) -> None:
        if end.done():
            return
        if isinstance(news, messages.Closed | messages.Repaired):
            end.set_result(news.metadata)
        elif isinstance(news, messages.Failed):
            end.set_exception(error_of(news, ledger_id))

    driver = Driver(machine, ledger_id, ports, reported)
    try:
        driver.post(first)
        async with asyncio.timeout(deadline_s):
            return await end
    except TimeoutError as error:
        raise errors.RecoveryBlocked(
            "the recovery or repair did not end in time: retry",
            ledger_id=ledger_id,
            outcome=errors.UNKNOWN,
        ) from error
    finally:
        driver.stop()
        if end.done() and not end.cancelled():
            end.exception()


def spread(row: LedgerMetadata, ports: Ports) -> asyncio.Future[int]:
    """Send bookies copies of the committed metadata `row`. The future never fails; its result is
    the number of bookies that confirmed a copy. The future is done when enough bookies have
    confirmed, or after twice the deadline of an add.
    """
    sending = _Spread(row, ports)
    sending.begin()
    return sending.end


class _Spread:
    """Drives a machine `RowSpread`. Invariant: `end` always gets its result."""

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
            # The change of the metadata is committed despite this error, so the caller must get a result.
            log.exception("row-spread-broke", extra={"ledger": row.ledger_id})
            self._settle()

    def _send_to(self, members: Iterable[str]) -> None:
        row = self._machine.row
        for member in members:
            answered = partial(self._answered, member)
            self._ports.bookies.keep_row(member, row.ledger_key, row, answered)

    def _answered(self, member: str, status: messages.Status) -> None:
        if status is not messages.Status.OK:
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


async def recover(
    row: LedgerMetadata, ports: Ports, *, deadline_s: float, declare_lost: tuple[str, ...] = ()
) -> tuple[LedgerMetadata, int]:
    """Recover a ledger from metadata that the caller has just read, and send copies of the closed
    metadata to bookies (rule 18b). A CLOSED ledger does not change. If the metadata has changed
    since, the machine reads it again. Returns: the closed metadata, and the number of bookies that
    confirmed a copy. Raises: as `conclude`.
    """
    extra = {"ledger": row.ledger_id, "state": row.state, "version": row.version}
    log.info("recovery-begun", extra=extra)
    closed = await conclude(
        Recovery(declare_lost=declare_lost),
        row.ledger_id,
        ports,
        messages.RecoverRequested(row),
        deadline_s=deadline_s,
    )
    copies = await spread(closed, ports)
    log.info("recovered", extra={"ledger": row.ledger_id, "last_entry": closed.last_entry})
    return closed, copies


def error_of(failed: messages.Failed, ledger_id: int) -> errors.QuorumLogError:
    """The error for a machine's failure."""
    return errors.by_code(failed.code)(
        failed.detail, ledger_id=ledger_id, entry_id=failed.entry_id, bookie=failed.bookie
    )
