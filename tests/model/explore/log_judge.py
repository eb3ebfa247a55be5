"""What must hold of an explored log after each transition."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from quorumlog.errors import (
    NOT_DONE,
    ExpiredProducer,
    NoSuchLedger,
    NoSuchLog,
    QuorumLogError,
    SequenceGap,
)
from quorumlog.protocol import batch
from quorumlog.protocol.log import PRODUCERS_MAX, LogItem, LogMetadata
from quorumlog.protocol.log.messages import NOT_OWNER, AppendsAsked, Event, Relay, Resolve
from quorumlog.protocol.log.route import LogRoute
from quorumlog.protocol.transaction import Transaction
from tests.model.explore.log_world import Ledger, Stored, World, call_of
from tests.model.explore.parts import Broken, Interned
from tests.model.explore.scope import LogScope


class LogJudge:
    """Rules over rows, ledgers and answers."""

    def __init__(self, scope: LogScope, rows: Interned, ledgers: Interned) -> None:
        self._scope = scope
        self._rows, self._ledgers = rows, ledgers
        self._present: dict[tuple[int, int, tuple[int, ...]], tuple[Stored, ...]] = {}
        self._names: dict[bytes, str] = {}

    # --- the log -----------------------------------------------------------------------------------

    def log(self, before: World, after: World) -> None:
        """Rules 24, 26 and 28, I32, I33: the log as a reader finds it, now or before a truncation."""
        # The fields of a world that say what is in the log, and what was said of it.
        if (before.row, before.ledgers, before.acked, before.refused, before.stored) == (
            after.row,
            after.ledgers,
            after.acked,
            after.refused,
            after.stored,
        ):
            return
        found = self.records(after)
        at = {(one.ledger_id, one.entry_id): one for one in found}
        for name, answer in after.acked:
            there = at.get((answer.ledger_id, answer.entry_id))
            if there is None or (there.name, there.offset) != (name, answer.first_offset):
                raise Broken(f"I32, I33: {name} was acknowledged at {answer}, there is {found}")
        named = {(one.generation, one.name) for one in found}
        if len(named) < len(found):
            raise Broken(f"rules 24 and 26: a record is in the log twice: {found}")
        for _, name in named:
            if name in after.refused:
                raise Broken(f"rule 24: {name} is in the log, and was refused: {found}")
        if after.is_committed and (0, "t") not in named:
            raise Broken("rule 28: what was committed is not on the log")
        for generation in range(after.generation + 1):
            offsets = sorted(one.offset for one in found if one.generation == generation)
            if offsets != list(range(len(offsets))):
                raise Broken(f"rule 25, I33: offsets are given twice, or not dense: {offsets}")

    def records(self, world: World) -> tuple[Stored, ...]:
        """All records that the log holds, or held in ledgers that it has dropped."""
        return (*world.stored, *self.present(world))

    def present(self, world: World) -> tuple[Stored, ...]:
        """The records that a reader finds now."""
        if world.is_deleted:
            return ()
        place = world.generation, world.row, world.ledgers
        known = self._present.get(place)
        if known is None:
            row: LogMetadata = self._rows.values[world.row]
            known = self._present[place] = tuple(
                one for item in row.items for one in self.records_of(world, item)
            )
        return known

    def records_of(self, world: World, item: LogItem) -> tuple[Stored, ...]:
        """Rule 23, I33: the records in one ledger of the log."""
        ledger: Ledger = self._ledgers.values[world.ledgers[item.ledger_id - 1]]
        self._item(item, ledger)
        if not ledger.entries:
            return ()
        if item.first_offset is None:
            raise Broken(f"rule 23: ledger {item.ledger_id} has entries, and no start")
        found = []
        for entry, data in enumerate(ledger.entries):
            name = self._names.setdefault(data, batch.decode(data)[1][0].value.decode())
            offset = item.first_offset + batch.decode_head(data).records_before
            found.append(Stored(world.generation, offset, name, item.ledger_id, entry))
        return tuple(found)

    def _item(self, item: LogItem, ledger: Ledger) -> None:
        if item.last_offset is None:
            return
        if not ledger.is_closed:
            raise Broken(f"rules 23 and 28: ledger {item.ledger_id} is open, and has an end")
        if item.last_offset - (item.first_offset or 0) + 1 != len(ledger.entries):
            raise Broken(f"I33: the row says that ledger {item.ledger_id} ends elsewhere")

    # --- answers -----------------------------------------------------------------------------------

    def answer(self, world: World, request: Any, answer: Any) -> None:
        """Rules 26, 26a, 27b and 28: what no client may be told."""
        if isinstance(answer, NoSuchLedger):
            raise Broken(f"{request} is told of a ledger, of which no client of a log knows")
        is_record = request in self._scope.requests
        if isinstance(answer, NoSuchLog) and is_record and request not in world.absent:
            raise Broken(f"rule 27b: {request} came after the log was created, and found none")
        if isinstance(answer, Transaction) and not world.is_committed:
            raise Broken("rule 28: a commit is acknowledged that was not done")
        if answer is NOT_OWNER:
            raise Broken("a client is told what only machines tell each other")
        # Every request but the first follows one that was acknowledged, in the same log.
        is_known = self._scope.deletions == 0
        if isinstance(answer, SequenceGap) and is_known:
            raise Broken(f"rule 26: a producer is told of a gap that is none: {answer!r}")
        is_full = self._scope.remembers < PRODUCERS_MAX
        if isinstance(answer, ExpiredProducer) and is_known and not is_full:
            raise Broken(f"rule 26a: a producer was forgotten while there was room: {answer!r}")

    def is_refused(self, request: Any, answer: Any) -> bool:
        """Whether a client of a plain record is told that certainly nothing was done."""
        return (
            isinstance(answer, QuorumLogError)
            and answer.outcome == NOT_DONE
            and request in self._scope.requests
            and call_of(request).producer is None
        )


def check_none_is_forgotten(
    before: LogRoute, after: LogRoute, event: Event, effects: Iterable[Any]
) -> None:
    """Rule 24a: each request that a machine was asked is answered once, or the machine still has it."""
    if isinstance(event, AppendsAsked):
        asked = [request for request, _ in event.requests]
    else:
        asked = [getattr(event, "request", None)]
    answered = [one.request for one in effects if isinstance(one, Resolve | Relay)]
    had, has = Counter([*_held(before), *asked]), Counter([*_held(after), *answered])
    del had[None], has[None]
    if had != has:
        raise Broken(f"rule 24a: forgotten {dict(had - has)}, answered twice {dict(has - had)}")


def _held(route: LogRoute) -> Iterable[Any]:
    """The requests that a machine has not answered."""
    for handover in (route._handover, *route._handovers):
        yield handover and handover.request
    for asked in (
        *route._again,
        *route._waiting,
        *route._late,
        *route._asked.values(),
        *route._jobs.values(),
    ):
        yield asked and asked.request
    for owner in (route.owner, *route._former.values()):
        if owner is not None:
            jobs = (owner._job, *owner._jobs)
            doubted = (*owner._doubted, *(one for job in jobs if job for one in job.doubted))
            for pending in (*owner._pipe.in_flight, *owner._waiting, *(one for one, _ in doubted)):
                yield from (each.request for each in pending.with_repeats)
