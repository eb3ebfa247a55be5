"""The processes of an explored rewrite: each one is a program that asks questions, and what it was answered so far.

The programs are the machines and the coroutines that ship: `Rewrite`, `Indexing` and `PassState` as `logs/rewrites.py` drives
them, and `Orphans`, which deletes the ledgers that no log names. A process is copied by running its program again.
"""

import contextlib
import types
from collections.abc import Coroutine, Generator, Iterator
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log import LogItem, LogMetadata
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.compaction import Compaction, PassState, next_pass
from quorumlog.protocol.log.indexing import Indexing
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BeginRewrite,
    ReadBatches,
    ReadLedger,
    ReadLog,
    ReleaseLedgers,
    RewriteDone,
)
from quorumlog.protocol.log.rewrite import Rewrite
from services.gateway.logs.store import MetadataLogs, Orphans

Program = Generator[Any, tuple[Any, bool], Any]
"""Yields questions, and gets each answer with whether it is late."""

EARLY_MS: Final = 10_000
LATE_MS: Final = 3_610_000
"""The database's time before and after time passes."""

MERGE, PASS, INDEX, DROP, SWEEP = "merge", "pass", "index", "drop", "sweep"

FIXED: Final = (ReadLedger, ReadBatches)
"""Questions about what never changes, as long as it exists."""


class Start(NamedTuple):
    """What a process begins with. `ids`: the ledgers to work on; for a merge: how many, from the first one on."""

    kind: str
    row: LogMetadata | None
    late: bool = False
    ids: tuple[int, ...] = ()


def now_at(late: bool) -> Now:
    """The time of a process."""
    return Now(0, LATE_MS if late else EARLY_MS)


def program(start: Start) -> Program:
    """Work from its beginning."""
    row, now = start.row, now_at(start.late)
    match start.kind:
        case "merge":
            assert row is not None
            found = merged(row, start.ids[0])
            merge = Compaction(now_ms=now.sealed_ms())
            return _run(Rewrite(row, found, merge), now) if found else _nothing()
        case "pass":
            assert row is not None
            return _pass(row, now)
        case "index":
            assert row is not None
            item = next((i for i in row.items if _may_index(row, i)), None)
            return _nothing() if item is None else _run(Indexing(row, item), now)
        case "drop":
            return _awaited(orphans().drop(start.ids))
        case _:
            return _awaited(orphans().delete(start.ids[0]))


def merged(row: LogMetadata, count: int) -> tuple[LogItem, ...]:
    """The first ledgers that may be rewritten, at most `count`."""
    may = [item for item in row.items if row.names_sealed((item,))]
    return tuple(may[:count])


def _may_index(row: LogMetadata, item: LogItem) -> bool:
    return row.names_sealed((item,)) and item.index is None


def _nothing() -> Program:
    yield from ()


def _run(machine: Rewrite | Indexing, now: Now, *, releases: bool = False) -> Program:
    """Drive a machine, as `_RewriteDriver` does. `releases`: whether the program goes on after it has deleted ledgers."""
    (effect,) = machine.step(BeginRewrite(), now)
    while isinstance(effect, Ask):
        asked = effect.question
        if releases and isinstance(asked, ReleaseLedgers):
            answer, late = (yield from _awaited(orphans().drop(asked.ledger_ids))), False
        else:
            answer, late = yield asked
        (effect,) = machine.step(Answered(effect.number, answer), now_at(late))
    assert isinstance(effect, RewriteDone)
    return effect


def _pass(row: LogMetadata, now: Now) -> Program:
    """A compaction pass, as `Rewrites._merge` and `Rewrites.step` carry it out."""
    due = next_pass(row, now.sealed_ms())
    if due is None:
        return
    state = PassState(due)
    while not state.is_over:
        if state.to_learn is not None:
            yield from _learn(state, state.to_learn)
        elif (found := state.group(row)) is not None:
            done = yield from _run(Rewrite(row, *found), now, releases=True)
            state.rewritten(done.log if isinstance(done.log, LogMetadata) else None)
        row, _ = yield ReadLog("log")
        if not isinstance(row, LogMetadata):
            return


def _learn(state: PassState, item: LogItem) -> Program:
    found, _ = yield ReadBatches(item.ledger_id, 0, 99)
    is_readable = not isinstance(found, QuorumLogError)
    for _, data in found.entries if is_readable else ():
        columns = batch.opened(packed.unpack(data))
        if not state.learn((item.first_offset or 0) + columns.head.records_before, columns):
            break
    state.learned(is_readable=is_readable)


# --- coroutines ------------------------------------------------------------------------------------


class Asks:
    """A part of a gateway whose methods ask questions: (name, arguments)."""

    def __getattr__(self, name: str) -> Any:
        @types.coroutine
        def ask(*given: Any) -> Iterator[Any]:
            return (yield (name, *(tuple(g) if isinstance(g, list) else g for g in given)))

        return ask


def orphans() -> Orphans:
    """What deletes ledgers that no log names, at a gateway."""
    asks: Any = Asks()
    index: Any = SimpleNamespace(drop=lambda _ledger_id: None)
    return Orphans(asks, MetadataLogs(asks, asks), index)


def _awaited(work: Coroutine[Any, Any, Any]) -> Program:
    """Carry out a coroutine. Returns its error, if it raises one."""
    value: Any = None
    try:
        while True:
            failed = isinstance(value, QuorumLogError)
            question = work.throw(value) if failed else work.send(value)
            value, _ = yield question
    except StopIteration as ended:
        return ended.value
    except QuorumLogError as error:
        return error


# --- processes ---------------------------------------------------------------------------------------


class Process(NamedTuple):
    """A process by its start and its answers. `question`: the one that waits; None: it has ended."""

    start: Start
    answers: tuple[tuple[Any, bool], ...]
    question: Any

    @classmethod
    def begun(cls, start: Start, answers: tuple[tuple[Any, bool], ...] = ()) -> "Process":
        """A process that was answered so often. A rewrite that only deletes from now on is a process of its own, to
        which its past means nothing.
        """
        running, question = program(start), None
        with contextlib.suppress(StopIteration):
            question = next(running)
            for answer in answers:
                question = running.send(answer)
            if isinstance(question, ReleaseLedgers):
                return cls.begun(Start(DROP, None, ids=question.ledger_ids))
            return cls(start, answers, question)
        return cls(start, answers, None)

    def after(self, answer: Any, *, late: bool) -> "Process":
        """The process after an answer."""
        return self.begun(self.start, (*self.answers, (answer, late)))
