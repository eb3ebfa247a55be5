"""Mutants of work queues: the guards of rule 33, which seeds of their simulation must miss."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol import queues
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.offset_store import OffsetStore
from quorumlog.protocol.queue_requests import Settle, Settlement, Take
from quorumlog.protocol.queue_state import Queue
from quorumlog.protocol.queues import QueueDraft, Queues
from quorumlog.protocol.rows import Rows
from tests.model.queues.simulation import run
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import Histories, Patch, stand_in
from tests.mutation.mutants.positions import by_the_wall, taken_for_done, told_at_once

QUEUES: Final = Histories("queues", run, range(1, 201))


@stand_in
def _of_whoever_has_them(original: Any, self: QueueDraft, row: Queue, request: Settle) -> Any:
    items = []
    for token, offsets in request.items:
        holder = (claim.token for claim in row.claims if claim.is_valid and claim.offsets & offsets)
        items.append((next(holder, token), offsets))
    return original(self, row, replace(request, items=tuple(items)))


@stand_in
def _of_any_offset(original: Any, self: QueueDraft, row: Queue, request: Settle) -> Any:
    if request.kind == Settlement.ACK:
        asked = NONE
        for _, offsets in request.items:
            asked |= offsets
        row = self._put(row.without(asked).acknowledged(asked), row)
    return original(self, row, request)


@stand_in
def _in_any_order(
    _original: Any, row: Queue, request: Take, busy: Offsets, limit: int, room: int
) -> Offsets:
    left = Offsets.span(row.floor, limit) - row.acked - busy
    known = Offsets.of(at for at, _ in request.keys)
    return (left & known).lowest(min(request.count, max(room, 0)))


@stand_in
def _one_of_those_that_wait(
    original: Any, row: Queue, request: Take, busy: Offsets, limit: int, room: int
) -> Offsets:
    """Records that another worker has do not keep later ones of their key back."""
    keys = tuple((at, 0 if at in busy else key) for at, key in request.keys)
    found: Offsets = original(row, replace(request, keys=keys), busy, limit, room)
    return found


@stand_in
def _up_to_the_last(original: Any, row: Queue, offsets: Offsets) -> Queue:
    done: Queue = original(row, offsets)
    return replace(done, floor=max(done.floor, done.acked.end), acked=NONE) if done.acked else done


@stand_in
def _without_a_hold(original: Any, self: QueueDraft, row: Queue, request: Settle) -> Any:
    before = {key: dict(ends) for key, ends in self.held_until.items()}
    answer = original(self, row, request)
    if request.kind == Settlement.EXTEND:
        self.held_until = before
    return answer


@stand_in
def _at_once(original: Any, self: QueueDraft, row: Queue, offsets: Any, request: Settle) -> Any:
    return original(self, row, offsets, replace(request, delay_ms=0))


@stand_in
def _split_again(_original: Any, self: QueueDraft, row: Queue, request: Any) -> Queue:
    moves = []
    for move in row.moves:
        kept = move.offsets & request.offsets if move.id == request.id else move.offsets
        moves.append(replace(move, offsets=kept, since=request.since))
        if rest := move.offsets - kept:
            moves.append(replace(move, id=self._version, offsets=rest, since=-1))
    return replace(row, moves=tuple(moves))


@stand_in
def _whatever_was_seen(original: Any, self: QueueDraft, row: Queue, request: Any) -> Queue:
    now = ((move.since, move.created) for move in row.moves if move.id == request.id)
    begun: Queue = original(self, row, replace(request, seen=next(now, request.seen)))
    return begun


@stand_in
def _while_it_is_held(original: Any, self: QueueDraft, row: Queue) -> Queue:
    held = self._held
    self._held = always(NONE)(None)  # type: ignore[method-assign]
    try:
        done: Queue = original(self, row)
    finally:
        self._held = held  # type: ignore[method-assign]
    return done


@stand_in
def _uncounted(original: Any, row: Queue, first_offset: int) -> Queue:
    done: Queue = original(row, first_offset)
    return replace(done, lost=row.lost)


def _dropped(_original: Any) -> Any:
    return lambda _self, row, offsets, _reason: row.without(offsets).acknowledged(offsets)


QUEUE_MUTANTS: Final = (
    Patch(QueueDraft, "_settle", _of_whoever_has_them).mutant(
        "a stale token settles a record of another claim", "33"
    ),
    Patch(QueueDraft, "_settle", _of_any_offset).mutant("an acknowledgement needs no claim", "33"),
    Patch(Queues, "held_until", always(0.0)).mutant("a claim does not hold its records", "33"),
    Patch(Rows, "learned", always(None)).mutant(
        "a new owner gives records at once that may be claimed", "33"
    ),
    Patch(Queue, "without", lambda _: lambda row, _offsets: row).mutant(
        "a record that is given again stays in its old claim", "33"
    ),
    Patch(queues, "_in_order", _in_any_order).mutant(
        "a queue does not keep the order by key", "33"
    ),
    Patch(queues, "_in_order", _one_of_those_that_wait).mutant(
        "a record does not wait for a claimed record of its key", "33"
    ),
    Patch(Queue, "acknowledged", _up_to_the_last).mutant(
        "a queue's floor passes records that are not done", "33"
    ),
    Patch(QueueDraft, "_settle", _without_a_hold).mutant(
        "an extension does not prolong its claim", "33"
    ),
    Patch(QueueDraft, "_given_back", _at_once).mutant(
        "a returned record is given before its delay is over", "33"
    ),
    Patch(QueueDraft, "_begun", _split_again).mutant(
        "a move is divided again after it was sent", "33"
    ),
    Patch(QueueDraft, "_begun", _whatever_was_seen).mutant(
        "a move starts again after it was sent", "33"
    ),
    Patch(QueueDraft, "_exhausted", _while_it_is_held).mutant(
        "a record becomes a dead letter while a worker holds it", "33"
    ),
    Patch(QueueDraft, "_exhausted", lambda _: lambda _self, row: row).mutant(
        "a record is given more often than the settings allow", "33"
    ),
    Patch(QueueDraft, "_doomed", _dropped).mutant(
        "a record is dropped after its last attempt", "33"
    ),
    Patch(Queue, "trimmed", _uncounted).mutant(
        "a queue does not count records that truncation removed", "33"
    ),
    Patch(QueueDraft, "_check_version", always(None)).mutant(
        "a late request deletes a later queue of the same name", "33"
    ),
    Patch(OffsetStore, "_append", told_at_once).mutant(
        "a claim is reported before it is in the log", "33"
    ),
    Patch(OffsetStore, "_failed", taken_for_done).mutant(
        "a claim counts although its append has an unknown outcome", "33"
    ),
    Patch(OffsetStore, "step", by_the_wall).mutant("a claim ends by the wall clock", "33"),
)
