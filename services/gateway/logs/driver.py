"""Runs one machine of a log (`protocol/log`) on a gateway.

The driver passes events to its machine one at a time, in the order of arrival. Like
`net/driver.py`, the driver of a ledger's machine, it has no task of its own. Each question, an
effect that needs an answer, runs in its own task. Appends to the ledger use callbacks.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from quorumlog import errors
from quorumlog.protocol.log import LogMetadata, messages
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.metadata import Deletion, Writer
from quorumlog.wire.log_bodies import DELETED_WITH_LOG_MAX, PACKED_TAG
from services.gateway.engine import Engine
from services.gateway.interface import EntriesAppended, LedgerOptions
from services.gateway.logs.offsets import OffsetIndex, end_of
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.store import MetadataLogs

log = logging.getLogger(__name__)

_REPLAY_BYTES: Final = 4 << 20
"""Bytes per read while a takeover replays a ledger."""

_ROLL_AGAIN_S: Final = 2.0
"""Pause before an automatic roll that failed is retried."""

SUBMIT_BYTES: Final = 1 << 20
"""Bytes submitted and acknowledged as one group: as many as the ledger's handle sends at once."""


@dataclass(frozen=True, slots=True)
class Broke:
    """The machine raised an exception and is stopped. The handle answers the machine's waiters."""

    error: errors.QuorumLogError


LogOutcome = (
    messages.Resolve
    | messages.Relay
    | messages.OwnerEnded
    | messages.TakeoverDone
    | messages.RewriteDone
    | messages.LogGone
    | Broke
)
"""Reports of a machine, or of a broken machine's driver, to the log's handle."""


class Machine(Protocol):
    """A machine of a log: `LogRoute`, a `Rewrite` or an `Indexing`."""

    def step(self, event: messages.Event, now: Now) -> Sequence[messages.Effect]:
        """Take an event and return the effects."""


@dataclass(frozen=True, slots=True)
class LogPorts:
    """The dependencies with which the drivers of a gateway's logs perform effects."""

    engine: Engine
    store: MetadataLogs
    peers: LogPeers
    is_alive: Callable[[Writer], Awaitable[bool]]
    """Checks that a process is alive, by two requests a jittered time apart."""
    now: Callable[[], Now]
    index: OffsetIndex
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs a task until the gateway stops."""
    jitter_s: float
    """The longest pause before a machine repeats a question."""
    probe_every_s: float
    """Interval at which the sender of a forwarded request checks whether the owner is alive."""


class LogDriver:
    """One machine of a log and its serial executor. Invariants:

    - `step` is never reentered.
    - Each question gets one answer, or the machine gets `Stopped`.
    - A machine that raised an exception gets no more events.
    - The owner acknowledges a ledger's entries only after a read of the log's metadata that names
      the ledger. This read begins once the ledger's first entry is on disk (rule 18f).
    """

    def __init__(
        self, machine: Machine, name: str, ports: LogPorts, report: Callable[[LogOutcome], None]
    ) -> None:
        """`name` is the log's name. `report` must not raise."""
        self._machine, self._name, self._ports, self._report = machine, name, ports, report
        self._inbox: deque[messages.Event] = deque()
        self._is_stepping = self._is_broken = False

    def post(self, event: messages.Event) -> None:
        """Step the machine with an event, now or after the events that are already queued."""
        if self._is_broken:
            return
        inbox = self._inbox
        inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while inbox:
                for effect in self._machine.step(inbox.popleft(), self._ports.now()):
                    self._perform(effect)
        except Exception:
            # After a defect in the machine, its state is no longer reliable.
            log.exception("log-machine-broke", extra={"log": self._name})
            self._break()
        finally:
            self._is_stepping = False

    def _break(self) -> None:
        """Stop the machine and report the failure. The handle answers all remaining requests."""
        self._is_broken = True
        self._inbox.clear()
        try:
            for effect in self._machine.step(messages.Stopped(), self._ports.now()):
                self._perform(effect)
        except Exception:
            log.exception("log-machine-broke", extra={"log": self._name})
        detail = "the log's owner failed with an internal error: see the gateway's log"
        self._report(Broke(errors.QuorumLogError(detail, log=self._name)))

    def _perform(self, effect: messages.Effect) -> None:
        match effect:
            case messages.Submit():
                self._submit(effect)
            case messages.Ask(number, question):
                asked = self._ports.start(self._answer(number, question))
                asked.add_done_callback(self._asked)
            case messages.PlaceKnown(ledger_id, records, entry_id):
                self._ports.index.points(ledger_id).add(records, entry_id)
            case (
                messages.Resolve()
                | messages.Relay()
                | messages.OwnerEnded()
                | messages.TakeoverDone()
                | messages.RewriteDone()
                | messages.LogGone()
            ):
                self._report(effect)
            case _:
                raise AssertionError(f"a log driver can't perform this effect: {effect}")

    # Appends.

    def _submit(self, effect: messages.Submit) -> None:
        first = effect.first_entry
        for payloads in cut(effect.payloads, 0 if effect.one_by_one else SUBMIT_BYTES):
            count = len(payloads)
            error = self._send(effect.ledger_id, first, payloads)
            if error is not None:
                self.post(
                    messages.SubmitRefused(effect.ledger_id, first, count, error, effect.number)
                )
                return
            first += count

    def _send(
        self, ledger_id: int, first: int, payloads: Sequence[bytes]
    ) -> errors.QuorumLogError | None:
        """Begin an append. Returns the error if the append can't begin."""
        try:
            handle = self._ports.engine.handles.get(ledger_id)
            submitted = handle.append(payloads, first)
        except errors.QuorumLogError as error:
            return error
        submitted.add_done_callback(
            partial(self._submitted, ledger_id, first, first + len(payloads) - 1)
        )
        return None

    def _submitted(
        self, ledger_id: int, first: int, last: int, done: asyncio.Future[EntriesAppended]
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, errors.QuorumLogError):
            self.post(messages.SubmitFailed(ledger_id, error))
        elif done.cancelled() or error is not None:
            failed = errors.WriterLost(f"the append to the log's ledger failed: {error!r}")
            self.post(messages.SubmitFailed(ledger_id, failed))
        elif done.result().first != first:
            detail = f"the log's ledger stored entry {first} as entry {done.result().first}"
            self.post(messages.SubmitFailed(ledger_id, errors.WriterLost(detail)))
        else:
            self.post(messages.EntriesDurable(ledger_id, last))

    # Questions.

    async def _answer(self, number: messages.QuestionNumber, question: messages.Question) -> None:
        value: Any
        try:
            value = await self._ask(question)
        except errors.QuorumLogError as error:
            value = error
        except Exception as error:
            log.exception("log-question-broke", extra={"log": self._name})
            value = errors.QuorumLogError(repr(error), log=self._name)
        self.post(messages.Answered(number, value))

    def _asked(self, task: asyncio.Task[None]) -> None:
        """Stop the machine if a question's task was cancelled, even before its first step."""
        if task.cancelled():
            self.post(messages.Stopped())

    async def _ask(self, question: messages.Question) -> Any:
        ports, engine, store = self._ports, self._ports.engine, self._ports.store
        match question:
            case messages.ReadLog(name):
                return await store.get(name)
            case messages.SwapLog(row, once):
                swapped = await store.cas(row, once)
                if isinstance(swapped, LogMetadata):
                    self._place_last(swapped)
                return swapped
            case messages.DeleteLog(row):
                return await self._delete(row)
            case messages.ReadTransaction(transaction):
                return await store.transaction(transaction)
            case messages.Commit(transaction, ledgers, row):
                committed = await store.commit(transaction, ledgers, row)
                if isinstance(committed, messages.Committed) and committed.log is not None:
                    self._place_last(committed.log)
                return committed
            case messages.CreateLedger(row):
                return await engine.create(options_of(row))
            case messages.ReadLedger(ledger_id):
                return await engine.get(ledger_id)
            case messages.RecoverLedger(ledger_id):
                return await engine.recover(ledger_id)
            case messages.CloseLedger(ledger_id):
                return await engine.close_for_log(ledger_id)
            case messages.DeleteLedger(ledger_id):
                return await store.delete_unnamed(ledger_id)
            case messages.MeasureLedger(row):
                return await end_of(row, engine)
            case messages.ReadBatches():
                return await read_batches(engine, question)
            case messages.CountBookies():
                states = [bookie.state for bookie in (await engine.directory.refresh()).bookies]
                return states.count("writable")
            case messages.Forward():
                return await self._forward(question)
            case messages.IsAlive(writer):
                return await ports.is_alive(writer)
            case messages.Wait(pause):
                jitter_s = ports.jitter_s * random.uniform(0.1, 1.0)  # noqa: S311
                return await asyncio.sleep(
                    _ROLL_AGAIN_S if pause is messages.Pause.ROLL else jitter_s
                )
            case messages.WriteBatches() | messages.ReleaseLedgers():
                raise AssertionError(f"only a rewrite may ask this question: {question}")

    async def _delete(self, row: LogMetadata) -> messages.RowChanged | None:
        """Delete the log's metadata, and send the bookies of its ledgers a copy of the deletion
        (rule 18e). For ledgers that forks name, the copy marks only the log as deleted (rule 27a).
        If the bookies or the database can't confirm the deletion, the outcome is unknown.
        """
        engine, store = self._ports.engine, self._ports.store
        deleted = {*(i.ledger_id for i in row.own), *(await store.placed_orphans(row.name))}
        ledgers = await engine.existing(sorted(deleted)[-DELETED_WITH_LOG_MAX:])
        other = await store.delete(row)
        if other is None:
            gone = await store.unshared(ledgers)
            gone_ids = {ledger.ledger_id for ledger in gone}
            forked = [ledger for ledger in ledgers if ledger.ledger_id not in gone_ids]
            await engine.notify_deleted(gone, Deletion.WITH_LOG)
            await engine.notify_deleted(forked, Deletion.OF_LOG)
            await store.require(
                row.name, lambda now: now is None or now.created_at != row.created_at
            )
        return other

    def _place_last(self, row: LogMetadata) -> None:
        """Pass the last ledger's first offset to the ledger's writer, before the machine appends."""
        last = row.last_item
        if last is not None and last.first_offset is not None:
            lineage = row.lineages({last.ledger_id})[last.ledger_id]
            self._ports.engine.handles.place_in_log(last.ledger_id, last.first_offset, lineage)

    async def _forward(self, asked: messages.Forward) -> Any:
        """Return the owner's answer, or OwnerLost once the owner is no longer alive (rule 11)."""
        owner = asked.owner
        task = asyncio.create_task(self._ports.peers.forward(owner, asked.log, asked.call))
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._ports.probe_every_s)
                if done:
                    return task.result()
                if not await self._ports.is_alive(owner):
                    return messages.OwnerLost("the log's owner is not alive", sent=True)
        finally:
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)


async def read_batches(
    engine: Engine, asked: messages.ReadBatches, max_bytes: int = _REPLAY_BYTES
) -> messages.BatchesRead:
    """Read entries of a CLOSED ledger, about `max_bytes` at most. Raises: EntryUnavailable."""
    try:
        found = await engine.reads.read(
            asked.ledger_id, asked.first, last=asked.last, limit=10_000, max_bytes=max_bytes
        )
    except errors.EntryLost as error:
        return messages.BatchesRead((), error.members["next"], is_lost=True)
    if found.next <= asked.first:
        raise errors.EntryUnavailable(
            f"entry {asked.first} of a closed ledger can't be read now: retry later",
            ledger_id=asked.ledger_id,
            entry_id=asked.first,
        )
    entries = tuple(
        (entry_id, bytes(run.payload(index)))
        for run in found.runs
        for index, entry_id in enumerate(run.ids)
    )
    return messages.BatchesRead(entries, found.next)


def cut(payloads: Sequence[bytes], bytes_max: int) -> list[Sequence[bytes]]:
    """Split payloads, in order, into groups of at most `bytes_max`; with 0, one by one."""
    if sum(map(len, payloads)) <= bytes_max:
        return [payloads]
    groups: list[Sequence[bytes]] = []
    begin = size = 0
    for index, payload in enumerate(payloads):
        if index > begin and size + len(payload) > bytes_max:
            groups.append(payloads[begin:index])
            begin, size = index, 0
        size += len(payload)
    return [*groups, payloads[begin:]]


def options_of(log: LogMetadata) -> LedgerOptions:
    """The options of a log's ledgers, from which a rebuild restores the log's settings (rule 18f)."""
    packs = log.settings.batch_compression != "none"
    return LedgerOptions(
        quorum=log.settings.quorum,
        digest=log.settings.digest,
        custom=log.settings.custom,
        allow_degraded=True,
        tags=((PACKED_TAG, "true"),) if packs else (),
        log=log.name,
    )
