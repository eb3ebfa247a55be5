"""Runs one machine of a log (`protocol/log`) in the world of a gateway.

The driver is the machine's serial executor, as `net/driver.py` is of a ledger's machine: events are
stepped one at a time, in the order in which they came, without a task. Each question takes a task of
its own; appends to the ledger are callbacks.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from quorumlog.errors import (
    EntryLost,
    EntryUnavailable,
    InvalidRequest,
    Overloaded,
    QuorumLogError,
    TooLarge,
    WriterLost,
)
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BatchesRead,
    CloseLedger,
    Commit,
    Committed,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    DeleteLog,
    Effect,
    EntriesDurable,
    Event,
    Forward,
    IsAlive,
    LogGone,
    MeasureLedger,
    Number,
    OwnerEnded,
    OwnerLost,
    Pause,
    PlaceKnown,
    Question,
    ReadBatches,
    ReadLedger,
    ReadLog,
    ReadTransaction,
    RecoverLedger,
    Relay,
    Resolve,
    RowChanged,
    Stopped,
    Submit,
    SubmitFailed,
    SubmitRefused,
    SwapLog,
    TakeoverDone,
    Wait,
)
from quorumlog.protocol.metadata import DigestKind, Writer
from services.gateway.interface import Appended, LedgerOptions
from services.gateway.logs.ends import end_of
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.ports import LogChanged, LogEngine, LogStore, PeerLost, Peers, Publish

log = logging.getLogger(__name__)

_REPLAY_BYTES: Final = 4 << 20
"""What a replay reads at once."""

_ROLL_AGAIN_S: Final = 2.0
"""After a roll by itself failed, the next one waits for so long."""

_SUBMIT_BYTES: Final = 1 << 20
"""What is submitted together is acknowledged together: no more than the ledger's handle sends at once."""


@dataclass(frozen=True, slots=True)
class Broke:
    """The machine had a defect: it says nothing any more, and whoever still waits for it must be
    answered without it.
    """

    error: QuorumLogError


Told = Resolve | Relay | OwnerEnded | TakeoverDone | LogGone | Broke
"""What a machine says to those whom it works for, or the driver in its place."""


class Machine(Protocol):
    """Anything that steps."""

    def step(self, event: Event, now: Now) -> list[Effect]:
        """What to do now that this has happened."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """What drivers of a gateway's logs stand on."""

    engine: LogEngine
    store: LogStore
    peers: Peers
    is_alive: Callable[[Writer], Awaitable[bool]]
    """Asked twice, a jittered time apart."""
    now: Callable[[], Now]
    index: OffsetIndex
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs a task until the gateway stops."""
    jitter_s: float
    """Before a machine asks again, at most."""
    probe_every_s: float
    """A forwarded request that takes longer makes its sender ask whether the owner lives."""


class LogDriver:
    """One machine of a log and its serial executor.

    Invariants: `step` is never entered twice at a time; each question is answered once, or the
    machine hears that the process stops; a machine that broke hears nothing more.
    """

    __slots__ = ("_inbox", "_is_broken", "_is_stepping", "_machine", "_name", "_tell", "_world")

    def __init__(
        self, machine: Machine, name: str, world: World, tell: Callable[[Told], None]
    ) -> None:
        """`name` is the log's; `tell` must not raise."""
        self._machine, self._name, self._world, self._tell = machine, name, world, tell
        self._inbox: deque[Event] = deque()
        self._is_stepping = self._is_broken = False

    def post(self, event: Event) -> None:
        """Let the machine hear of an event: now, or after those that it hears of at present."""
        if self._is_broken:
            return
        inbox = self._inbox
        inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while inbox:
                for effect in self._machine.step(inbox.popleft(), self._world.now()):
                    self._perform(effect)
        except Exception:
            # A defect of ours: the machine's state can't be believed any more.
            log.exception("log-machine-broke", extra={"log": self._name})
            self._break()
        finally:
            self._is_stepping = False

    def _break(self) -> None:
        """The machine may say what it still can; what it has lost sight of is answered without it."""
        self._is_broken = True
        self._inbox.clear()
        try:
            for effect in self._machine.step(Stopped(), self._world.now()):
                self._perform(effect)
        except Exception:
            log.exception("log-machine-broke", extra={"log": self._name})
        self._tell(Broke(QuorumLogError("the log's machine broke", log=self._name)))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Submit():
                self._submit(effect)
            case Ask(number, question):
                asked = self._world.start(self._answer(number, question))
                asked.add_done_callback(self._asked)
            case PlaceKnown(ledger_id, records, entry_id):
                self._world.index.points(ledger_id).add(records, entry_id)
            case Resolve() | Relay() | OwnerEnded() | TakeoverDone() | LogGone():
                self._tell(effect)
            case _:
                raise AssertionError(f"{effect} is for the machine around this one")

    # --- appends ---------------------------------------------------------------------------------

    def _submit(self, effect: Submit) -> None:
        first, error = effect.first_entry, None
        for payloads in _cut(effect.payloads):
            error = self._send(effect.ledger_id, first, payloads)
            if isinstance(error, Overloaded) and len(payloads) > 1:
                # There may be room for some of them.
                for payload in payloads:
                    error = self._send(effect.ledger_id, first, (payload,))
                    if error is not None:
                        break
                    first += 1
            else:
                first += len(payloads) if error is None else 0
            if error is not None:
                is_over = not isinstance(error, Overloaded | InvalidRequest | TooLarge)
                self.post(SubmitRefused(first, error, is_over))
                return

    def _send(self, ledger_id: int, first: int, payloads: Sequence[bytes]) -> QuorumLogError | None:
        """Begin an append, or say why it does not begin."""
        try:
            submitted = self._world.engine.submit(ledger_id, payloads, expect=first)
        except QuorumLogError as error:
            return error
        submitted.add_done_callback(
            partial(self._submitted, ledger_id, first, first + len(payloads) - 1)
        )
        return None

    def _submitted(
        self, ledger_id: int, first: int, last: int, done: asyncio.Future[Appended]
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, QuorumLogError):
            self.post(SubmitFailed(ledger_id, error))
        elif done.cancelled() or error is not None:
            self.post(SubmitFailed(ledger_id, WriterLost(f"the append has ended: {error!r}")))
        elif done.result().first != first:
            wrong = WriterLost("an entry got another id than the one it was encoded for")
            self.post(SubmitFailed(ledger_id, wrong))
        else:
            self.post(EntriesDurable(ledger_id, last))

    # --- questions -------------------------------------------------------------------------------

    async def _answer(self, number: Number, question: Question) -> None:
        value: Any
        try:
            value = await self._ask(question)
        except LogChanged as changed:
            value = RowChanged(changed.current)
        except PeerLost as lost:
            value = OwnerLost(str(lost), lost.sent)
        except QuorumLogError as error:
            value = error
        except Exception as error:
            log.exception("log-question-broke", extra={"log": self._name})
            value = QuorumLogError(repr(error), log=self._name)
        self.post(Answered(number, value))

    def _asked(self, task: asyncio.Task[None]) -> None:
        """A question that is cut off, maybe before its task's first step, gets no answer."""
        if task.cancelled():
            self.post(Stopped())

    async def _ask(self, question: Question) -> Any:
        engine, store = self._world.engine, self._world.store
        match question:
            case ReadLog(name):
                return await store.get(name)
            case SwapLog(row):
                return await store.cas(row)
            case ReadTransaction(transaction):
                return await store.transaction(transaction)
            case Commit(transaction, ledgers, row):
                return Committed(*await store.commit(transaction, ledgers, row))
            case CreateLedger(row):
                return await engine.create(options_of(row))
            case ReadLedger(ledger_id):
                return await engine.get(ledger_id)
            case RecoverLedger(ledger_id):
                return await engine.recover(ledger_id)
            case CloseLedger(ledger_id):
                return await engine.close(ledger_id)
            case MeasureLedger(row):
                return await end_of(row, engine)
            case ReadBatches():
                return await self._read(question)
            case DeleteLedger(ledger_id):
                return await store.delete_unnamed(ledger_id)
            case CountBookies():
                states = [bookie.state for bookie in (await engine.bookies()).bookies]
                return states.count("writable")
            case Forward():
                return await self._forward(question)
            case IsAlive(writer):
                return await self._world.is_alive(writer)
            case DeleteLog(row):
                return await store.delete(row)
            case Wait(pause):
                jitter_s = self._world.jitter_s * random.uniform(0.1, 1.0)  # noqa: S311
                return await asyncio.sleep(_ROLL_AGAIN_S if pause is Pause.ROLL else jitter_s)

    async def _forward(self, asked: Forward) -> Any:
        """What the owner answers; give up when it does not live any more (rule 11)."""
        peers, call = self._world.peers, asked.call
        answer: Awaitable[Any]
        if call is None:
            answer = peers.roll(asked.owner, asked.log)
        elif isinstance(call, Publish):
            answer = peers.publish(asked.owner, asked.log, call)
        else:
            answer = peers.append(asked.owner, asked.log, call)
        task = asyncio.ensure_future(answer)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._world.probe_every_s)
                if done:
                    return task.result()
                if not await self._world.is_alive(asked.owner):
                    raise PeerLost("it does not answer", sent=True)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuorumLogError, PeerLost):
                await task

    async def _read(self, asked: ReadBatches) -> BatchesRead:
        try:
            found = await self._world.engine.read(
                asked.ledger_id,
                asked.first,
                last=asked.last,
                limit=10_000,
                max_bytes=_REPLAY_BYTES,
            )
        except EntryLost as error:
            return BatchesRead((), error.members["next"], is_lost=True)
        if found.next <= asked.first:
            raise EntryUnavailable(
                "an entry of a closed ledger", ledger_id=asked.ledger_id, entry_id=asked.first
            )
        entries = tuple(
            (entry_id, bytes(run.payload(index)))
            for run in found.runs
            for index, entry_id in enumerate(run.ids)
        )
        return BatchesRead(entries, found.next)


def _cut(payloads: Sequence[bytes]) -> list[Sequence[bytes]]:
    """The payloads in groups of a bounded size, in order."""
    if sum(map(len, payloads)) <= _SUBMIT_BYTES:
        return [payloads]
    groups: list[Sequence[bytes]] = []
    begin = size = 0
    for index, payload in enumerate(payloads):
        if index > begin and size + len(payload) > _SUBMIT_BYTES:
            groups.append(payloads[begin:index])
            begin, size = index, 0
        size += len(payload)
    return [*groups, payloads[begin:]]


def options_of(log: LogMetadata) -> LedgerOptions:
    """How a log's ledgers are created."""
    quorum = log.settings.quorum
    return LedgerOptions(
        ensemble_size=quorum.ensemble_size,
        write_quorum=quorum.write_quorum,
        ack_quorum=quorum.ack_quorum,
        digest=DigestKind(log.settings.digest),
        custom=log.settings.custom,
        allow_degraded=True,
        log=log.name,
    )
