"""Mutants of positions: the guards of ADR 37, which seeds of their simulation must miss."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol import positions
from quorumlog.protocol.offset_store import (
    BatchesRead,
    OffsetStore,
    Phase,
    Reported,
    Truncated,
)
from quorumlog.protocol.positions import Draft, Position, Positions
from quorumlog.protocol.rows import Batch, RowDraft, Rows
from tests.model.positions.simulation import run
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import Histories, Patch, stand_in

POSITIONS: Final = Histories("positions", run, range(1, 101))


@stand_in
def told_at_once(original: Any, self: OffsetStore, *args: Any) -> None:
    original(self, *args)
    self._out.extend(Reported(waiting.key, answer) for waiting, answer in self._decided)
    self._decided = []


@stand_in
def taken_for_done(original: Any, self: OffsetStore, error: Any) -> None:
    if self.phase is Phase.APPENDING:
        self._appended()
    else:
        original(self, error)


@stand_in
def _without_a_token(original: Any, self: Draft, row: Position, request: Any) -> Position:
    if isinstance(request, positions.Reset):
        return self._put(
            replace(row, created=request.created, offset=request.offset, token=row.token)
        )
    done: Position = original(self, row, request)
    return done


@stand_in
def by_the_wall(
    original: Any, self: OffsetStore, event: Any, now_s: float, wall_ms: int, *more: int
) -> Any:
    del now_s
    return original(self, event, wall_ms / 1000, wall_ms, *more)


@stand_in
def _of_the_last_row(_original: Any, self: Positions, end: int) -> int:
    del self
    return max(end - 1, 0)


@stand_in
def _with_what_it_had(original: Any, self: OffsetStore, event: Any, *args: Any) -> Any:
    if isinstance(event, Truncated):
        state = self.state
        effects = original(self, event, *args)
        self.state = state
        return effects
    return original(self, event, *args)


@stand_in
def _unread(original: Any, self: OffsetStore, event: Any, *args: Any) -> Any:
    if isinstance(event, BatchesRead) and event.batches:
        event = BatchesRead((), event.next)
    return original(self, event, *args)


def _from_one(_original: Any) -> Any:
    def version(self: Draft) -> int:
        rows = self._state.rows.values()
        return max((row.version for row in rows), default=0) + self._asked

    return property(version)


@stand_in
def _any_offset(original: Any, self: Draft, request: Any) -> Position:
    row = self._row((request.log, request.consumer))
    if row is not None and row.offset > request.offset and request.token == row.token:
        return self._put(replace(row, offset=request.offset))
    done: Position = original(self, request)
    return done


@stand_in
def _of_what_was_done(original: Any, self: Positions, offset: int, batch: Batch[Position]) -> None:
    done = tuple(one for one in batch.decided if isinstance(one.answer, Position))
    original(self, offset, replace(batch, decided=done))


@stand_in
def _of_all_time(original: Any, self: Positions, offset: int, batch: Batch[Position]) -> None:
    known_from = self.known_from
    original(self, offset, batch)
    self.known_from = known_from


@stand_in
def _from_the_beginning(original: Any, self: Positions, offset: int) -> None:
    original(self, offset)
    self.known_from = 0


def _for_ever_the_owner(original: Any) -> Any:
    return lambda self, *, is_owner: original(self, is_owner=True)  # noqa: ARG005


@stand_in
def _whoever_holds_it(_original: Any, self: Draft, request: positions.Expire) -> None:
    row = self._row((request.log, request.consumer))
    if row is not None and self._database_ms - row.used_ms >= self._expiry_ms:
        self._forget(row)


@stand_in
def _whenever_it_was_used(original: Any, self: Draft, request: positions.Expire) -> None:
    row = self._row((request.log, request.consumer))
    if row is not None and row.used_ms:
        self._changed[row.key] = replace(row, used_ms=1)
    original(self, request)


@stand_in
def _whoever_was_started_later(original: Any, self: Draft, request: positions.Acquire) -> Position:
    row = self._row((request.log, request.consumer))
    if row is not None and row.created == request.created and row.holder == request.holder:
        self._changed[row.key] = replace(row, started=0)
    done: Position = original(self, request)
    return done


@stand_in
def _of_any_creation(_original: Any, self: Draft, log: str, created: str) -> None:
    del created
    for row in self._of_log(log).values():
        self._forget(row)


POSITION_MUTANTS: Final = (
    Patch(Rows, "decided", always(None)).mutant(
        "a copy of a decided change is decided again", "32"
    ),
    Patch(RowDraft, "_is_remembered", always(True)).mutant(
        "a change is done although an earlier copy's result may be forgotten", "32"
    ),
    Patch(Rows, "_remember", _of_what_was_done).mutant("a refused change is not remembered", "32"),
    Patch(Rows, "_remember", _of_all_time).mutant("forgotten tokens count as remembered", "32"),
    Patch(Rows, "reach", _from_the_beginning).mutant(
        "tokens of records that were never read count as remembered", "32"
    ),
    Patch(OffsetStore, "_overtaken", _for_ever_the_owner).mutant(
        "an overtaken gateway decides again although it is not the owner", "32"
    ),
    Patch(Draft, "_expire", _whoever_holds_it).mutant(
        "a consumer expires while its lease is held", "32a"
    ),
    Patch(Draft, "_expire", _whenever_it_was_used).mutant(
        "a consumer expires that was just used", "32a"
    ),
    Patch(RowDraft, "_free", _of_any_creation).mutant(
        "the deletion of a namesake frees a log's consumers", "32a"
    ),
    Patch(Rows, "learned", always(None)).mutant(
        "a new owner grants a lease at once that may be held", "ADR 37"
    ),
    Patch(positions, "_check_token", always(None)).mutant(
        "a fencing token is not compared", "ADR 37"
    ),
    Patch(Draft, "_check_free", always(None)).mutant(
        "a lease is granted while another worker holds it", "ADR 37"
    ),
    Patch(OffsetStore, "_append", told_at_once).mutant(
        "a change is reported before it is in the log", "ADR 37"
    ),
    Patch(OffsetStore, "_failed", taken_for_done).mutant(
        "an append with an unknown outcome counts as done", "ADR 37"
    ),
    Patch(Draft, "_acquire", _whoever_was_started_later).mutant(
        "the older of two workers with one name takes the lease", "ADR 37"
    ),
    Patch(Draft, "_decide", _without_a_token).mutant(
        "a reset does not change the fencing token", "ADR 37"
    ),
    Patch(OffsetStore, "step", by_the_wall).mutant("a lease ends by the wall clock", "ADR 37"),
    Patch(Rows, "begin", _of_the_last_row).mutant(
        "a truncation drops records that are still needed", "ADR 37"
    ),
    Patch(OffsetStore, "step", _with_what_it_had).mutant(
        "a store keeps its old state after its log is truncated", "ADR 37"
    ),
    Patch(OffsetStore, "step", _unread).mutant(
        "an overtaken gateway does not read the newer records", "ADR 37"
    ),
    Patch(RowDraft, "_version", _from_one).mutant(
        "versions begin again after a deletion", "ADR 37"
    ),
    Patch(Draft, "_commit", _any_offset).mutant(
        "a commit moves the committed offset back", "ADR 37"
    ),
)
