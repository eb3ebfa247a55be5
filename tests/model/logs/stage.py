"""A stage for the rules of logs (22 to 29): gateways on the model of ledgers, moved by a script.

After each line a virtual second passes: long enough for everything that waits for no later line. The
judge of the simulation watches; its violations are printed as VIOLATION.
"""

import asyncio
import logging
import random
import re
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

from quorumlog.errors import QuorumLogError, SequenceGap
from quorumlog.net.directory import Directory
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogMetadata, LogSettings, producers
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Sealed
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from services.gateway.engine.ledger_writes import Appends
from services.gateway.interface import LedgerOptions
from services.gateway.logs.values import Since
from tests.model.logs.attempts import write
from tests.model.logs.judge import LOG, Alarms, Judge, Violation, values_of
from tests.model.logs.model import Cluster, Gateway, Ledger
from tests.model.scenarios.stage import Wrong
from tests.support.virtual import VirtualLoop
from tests.support.waiting import turns

NAME: Final = "log"
SETTLE_S: Final = 1.0

Say = Callable[[str], None]


class HandGateway(Gateway):
    """A gateway whose adds, and all of it, can be held."""

    def __init__(self, cluster: "HandCluster", name: str) -> None:
        super().__init__(cluster, name)
        self.say = cluster.say
        self.adds = _open()
        self.made = _open()
        self.closed = _open()

    async def _pump(self, ledger: Ledger) -> None:
        await self.adds.wait()
        await super()._pump(ledger)

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        row = await super().create(options)
        self.say(f"{self.writer.id} makes ledger {row.ledger_id}")
        await self.made.wait()
        return row

    async def close_for_log(self, ledger_id: int) -> LedgerMetadata:
        row = await super().close_for_log(ledger_id)
        await self.closed.wait()
        return row

    def _closed(self, ledger: Ledger) -> LedgerMetadata:
        how = "closes" if ledger.row.state is State.OPEN else "recovers"
        row = super()._closed(ledger)
        self.say(f"{self.writer.id} {how} ledger {row.ledger_id}: {row.last_entry}")
        return row


class HandCluster(Cluster):
    """Nothing is drawn: the script says what a recovery finds."""

    def __init__(self, say: Say) -> None:
        super().__init__(seed=0)
        self.say = say
        self.kept = 0
        self.answers = _open()
        self.is_next_late = False

    async def late_answer(self) -> None:
        if self.is_next_late:
            self.is_next_late = False
            await self.answers.wait()

    def gateway(self) -> Gateway:
        gateway = HandGateway(self, f"g{next(self.names)}")
        self.gateways[gateway.writer.id] = gateway
        return gateway

    async def delay(self) -> None:
        await turns()

    def kept_of(self, in_flight: int) -> int:
        return min(self.kept, in_flight)

    def knows_end(self) -> bool:
        return True

    def lac_of(self, lac: int) -> int:
        return min(lac, -1)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class LogStage:
    """Plays one line of a script at a time; see the patterns at the end of this class."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        self._dice = random.Random(0).getstate()
        self.cluster = HandCluster(self._said.append)
        self.judge = Judge(self.cluster, NAME)
        self._places: dict[int, tuple[int, int]] = {}
        """The ledger and entry that an append was told, by its first offset."""
        self.cluster.watch = self
        self._violations: list[str] = []
        self._acknowledged: dict[str, int] = {}
        self._requests: dict[tuple[str, int], int] = {}
        self._sealed: dict[str, list[Sealed]] = {}
        self._commits: dict[str, tuple[int, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept_room: list[Any] = []
        self._alarms = Alarms()
        self._log = logging.getLogger("services.gateway.logs")
        self._kept = self._log.propagate, self._log.level
        self._log.propagate = False
        self._log.setLevel(logging.ERROR)
        self._log.addHandler(self._alarms)
        self._directory: Directory | None = None

    def close(self) -> None:
        """Let go of the loop."""
        for room in self._kept_room:
            room.stop()
        self._log.removeHandler(self._alarms)
        self._log.propagate, level = self._kept
        self._log.setLevel(level)
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gateway in self.cluster.gateways.values():
            await gateway.end()

    def play(self, line: str) -> list[str]:
        """What happens after one line."""
        for pattern, act in self._patterns.items():
            found = re.fullmatch(pattern, line)
            if found is not None:
                outside = random.getstate()
                random.setstate(self._dice)
                try:
                    self._runner.run(self._acted(act, found.groups()))
                finally:
                    self._dice = random.getstate()
                    random.setstate(outside)
                said = list(self._said)
                self._said.clear()
                return said
        raise Wrong(line)

    async def _acted(self, act: Callable[..., Any], words: Sequence[str]) -> None:
        act(self, *words)
        await asyncio.sleep(SETTLE_S)
        for alarm in self._alarms.found:
            self.violated(alarm)
        self._alarms.found.clear()

    # --- the judge -------------------------------------------------------------------------------

    def violated(self, what: object) -> None:
        """Print a violation, once."""
        if str(what) not in self._violations:
            self._violations.append(str(what))
            self._said.append(f"VIOLATION {what}")

    def _judged(self, judge: Callable[[], Any]) -> Any:
        try:
            return judge()
        except Violation as violation:
            self.violated(violation)

    def submitted(self, ledger: Ledger) -> None:
        """An append to an open ledger begins."""
        entry_id = len(ledger.entries) + len(ledger.in_flight)
        assert ledger.row.writer is not None
        self._said.append(f"{ledger.row.writer.id} -> ledger {ledger.row.ledger_id}: {entry_id}")
        self._judged(lambda: self.judge.submitted(ledger))

    def replaced(self, before: LogMetadata, now: LogMetadata) -> None:
        """The row was changed."""
        self._said.append(_reported(now))
        self._judged(lambda: self.judge.replaced(before, now))

    def _begin(self, who: str, what: str, work: Coroutine[Any, Any, str]) -> None:
        """A client sends a request, and prints the answer unless its gateway dies."""

        async def reported() -> None:
            try:
                answer = await work
            except QuorumLogError as error:
                answer = f"{error.code}, {error.outcome}"
            except (AssertionError, Violation) as error:
                self.violated(str(error) or type(error).__name__)
                return
            if not self.cluster.gateways[who].is_dead:
                self._said.append(f"{who}: {what}{answer}")

        task = asyncio.get_running_loop().create_task(reported())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what a script can say -------------------------------------------------------------------

    def _of(self, name: str) -> HandGateway:
        return cast(HandGateway, self.cluster.gateways[name])

    def _gateways(self, names: str) -> None:
        for name in names.split():
            assert self.cluster.gateway().writer.id == name
        first = self._of("g1").logs
        settings = LogSettings(Quorum(3, 3, 2), roll_bytes=0, roll_entries=0)
        self._begin("g1", "", _quiet(first.put(NAME, settings), "the log is made"))

    def _remember(self, count: str) -> None:
        room = mock.patch.object(producers, "PRODUCERS_MAX", int(count))
        room.start()
        self._kept_room.append(room)

    def _append(
        self, who: str, records: str, producer: str | None, seq: str | None, since: str | None
    ) -> None:
        values = [value.encode() for value in records.split()]
        id_, number = producer or "", int(seq or 0)
        op = self._requests.get((id_, number)) if producer else None
        if op is None:
            named = (id_, 0) if producer else None
            op = self.judge.produce(LOG, *values, producer=named, seq=number)
            self._requests[id_, number] = op
        named_seq = ProducerSeq(id_, 0, number) if producer else None
        call = Append.of(tuple(map(Record, values)), named_seq, since=int(since or 0))
        asked = op

        async def append() -> str:
            try:
                done = await self._of(who).logs.append(NAME, call)
            except SequenceGap:
                if number == self._acknowledged.get(id_, -1) + 1:
                    self.violated(f"rule 26: {id_}/{number} follows what was acknowledged")
                raise
            self._acknowledged[id_] = number
            self._judged(lambda: self.judge.produced(asked, done.first_offset))
            self._places[done.first_offset] = (done.ledger_id, done.entry_id)
            return f"at {done.first_offset}" + (", as before" if done.is_duplicate else "")

        self._begin(who, f"{records} ", append())

    def _read(self, who: str, offset: str) -> None:
        first, acknowledged = int(offset), self.judge.acknowledged(LOG)

        async def read() -> str:
            found = await self._of(who).logs.reader.read(NAME, first)
            records = [(record.offset, record.record.value) for record in found.records]
            self._judged(
                lambda: self.judge.fetched(LOG, first, *records, acknowledged=acknowledged)
            )
            return ", ".join(f"{at} {value.decode()}" for at, value in records) or "nothing"

        self._begin(who, "reads ", read())

    def _roll(self, who: str) -> None:
        self._begin(who, "", _quiet(self._of(who).logs.roll(NAME), "has rolled"))

    def _take(self, who: str) -> None:
        work = self._of(who).take_over(NAME)
        self._begin(who, "", _quiet(work, "owns the log"))

    def _die(self, who: str) -> None:
        self._of(who).kill()

    def _stand(self, who: str) -> None:
        self._of(who).goes.clear()

    def _hang(self, who: str, done: str) -> None:
        gateway = self._of(who)
        (gateway.made if done == "made" else gateway.closed).clear()

    def _go_on(self, who: str) -> None:
        gateway = self._of(who)
        for gate in (gateway.goes, gateway.made, gateway.closed):
            gate.set()

    def _next_late(self) -> None:
        self.cluster.is_next_late = True
        self.cluster.answers.clear()

    def _answers(self) -> None:
        self.cluster.answers.set()

    def _hold(self, who: str) -> None:
        self._of(who).adds.clear()

    def _release(self, who: str) -> None:
        self._of(who).adds.set()

    def _keep(self, count: str) -> None:
        self.cluster.kept = int(count)

    def _ledger_api(self, who: str, records: str, ledger_id: str) -> None:
        """The gateway's own guard of rule 27, over the model's handle."""
        number, gateway = int(ledger_id), self._of(who)
        row = self.cluster.ledgers[number].row

        def handed(payloads: Sequence[bytes], expect: int | None) -> Any:
            ledger = self.cluster.ledgers[number]
            at = len(ledger.entries) + len(ledger.in_flight) if expect is None else expect
            return gateway.submit(number, payloads, expect=at)

        handle = SimpleNamespace(access_row=row, row=row, records=0, append=handed)
        handles = SimpleNamespace(get={number: handle}.get, rows=None, gatekeeper=None)
        appends = Appends(cast(Any, handles), cast(Any, None))

        async def append() -> str:
            data = batch.encode([Record(value.encode()) for value in records.split()])
            done = await appends.append_batch(number, data)
            return f"entry {done.first}"

        self._begin(who, f"{records} to ledger {number}: ", append())

    def _writes(self, transaction: str, entries: str) -> None:
        if transaction not in self._sealed:
            self._sealed[transaction] = []
            assert self.cluster.begin(NAME) == transaction
        values = [entry.split("+") for entry in entries.split()]
        sealed = write(self.cluster, transaction, values)
        self._sealed[transaction].append(sealed)
        self._said.append(f"{transaction} has ledger {sealed.ledger_id}")

    def _commit(self, who: str, transaction: str, over: str | None) -> None:
        gateway, sealed = self._of(who), tuple(self._sealed[transaction])
        if transaction not in self._commits:
            values = [
                value
                for part in sealed
                for value in _records(self.cluster.ledgers[part.ledger_id].entries)
            ]
            op = self.judge.produce(LOG, *values)
            self._commits[transaction] = op, len(values)
        op = self._commits[transaction][0]

        async def commit() -> str:
            done = await gateway.transactions.commit(transaction, sealed, overwrite=bool(over))
            assert done.first_offset is not None
            self._judged(lambda: self.judge.produced(op, done.first_offset or 0))
            return f"at {done.first_offset} to {done.last_offset}"

        self._begin(who, f"{transaction} is ", commit())

    def _bookies(self, described: str) -> None:
        bookies = []
        for part in described.split(", "):
            name, state = part.split()
            bookies.append(BookieInfo(id=f"{name}@1", state=cast(BookieState, state), url=""))

        async def fetch() -> BookieList:
            return BookieList(bookies=tuple(bookies))

        self._directory = Directory(fetch, chance=random.Random(0))
        self._live = {bookie.id for bookie in bookies if bookie.state == "writable"}
        self._begin("g1", "", _quiet(self._directory.refresh(), "knows the bookies"))

    def _ensemble(self, size: str, write_quorum: str, ack_quorum: str) -> None:
        assert self._directory is not None
        quorum = Quorum(int(size), int(write_quorum), int(ack_quorum))
        found = self._directory.new_ensemble(
            quorum.ensemble_size, degraded_ack=(quorum.write_quorum, quorum.ack_quorum)
        )
        if found is None:
            self._said.append("not-enough-bookies")
            return
        members, is_degraded = found
        alive = sorted(member for member in members if member in self._live)
        self._said.append(f"{len(members)} members, {', '.join(alive)} live, {is_degraded=}")
        for start in range(quorum.ensemble_size):
            live = sum(members[p] in self._live for p in quorum.write_set(start))
            if live < quorum.ack_quorum:
                self.violated(f"rule 29: {live} live of write set {start}")

    def _whole(self, who: str) -> None:
        async def judge() -> str:
            found = await self._of(who).contents(NAME)
            for record in found:
                place = (record.ledger_id, record.entry_id)
                if self._places.get(record.offset, place) != place:
                    self.violated(f"rule 24: {record.offset} was told to be elsewhere")
            self._judged(lambda: self.judge.whole(found))
            return ", ".join(f"{each.offset} {each.record.value.decode()}" for each in found)

        self._begin(who, "the log is ", judge())

    def _seek(self, who: str, at: str) -> None:
        async def sought() -> str:
            log = self._of(who)
            asked = (await log.logs.reader.read(NAME, int(at), limit=1)).records[0]
            found = await log.logs.reader.read(NAME, Since(asked.timestamp_ms), limit=1)
            return str(found.records[0].offset)

        self._begin(who, f"the first one of the time of {at} or later is ", sought())

    def _set_clock(self, who: str, seconds: str, way: str) -> None:
        self._of(who).skew_ms = int(seconds) * (1000 if way == "ahead" else -1000)

    _patterns: Final[dict[str, Callable[..., None]]] = {
        r"gateways (.+)": _gateways,
        r"a log remembers (\d+) producers?": _remember,
        r"(g\d) appends ([\w ]+?)(?: as (\w+)/(\d+)(?: since (\d+))?)?": _append,
        r"(g\d) reads from (\d+)": _read,
        r"(g\d) rolls": _roll,
        r"(g\d) takes the log over": _take,
        r"(g\d) dies": _die,
        r"(g\d) stands still": _stand,
        r"(g\d) hangs when it has (made|closed) a ledger": _hang,
        r"(g\d) goes on": _go_on,
        r"the next answer to a row's change is late": _next_late,
        r"the late answer arrives": _answers,
        r"adds of (g\d) wait": _hold,
        r"adds of (g\d) arrive": _release,
        r"a recovery finds (\d+) of what is in flight": _keep,
        r"the ledger API of (g\d) appends ([\w ]+) to ledger (\d+)": _ledger_api,
        r"(t\d) writes (.+)": _writes,
        r"(g\d) commits (t\d)( over all)?": _commit,
        r"bookies (.+)": _bookies,
        r"an ensemble of E=(\d) Qw=(\d) Qa=(\d)": _ensemble,
        r"(g\d) reads it all": _whole,
        r"(g\d) reads from the time of (\d+)": _seek,
        r"the clock of (g\d) is (\d+) s (ahead|behind)": _set_clock,
    }


async def _quiet(work: Coroutine[Any, Any, Any], answer: str) -> str:
    await work
    return answer


def _records(entries: Sequence[bytes]) -> list[bytes]:
    return [value.encode() for value in values_of(entries)]


def _reported(row: LogMetadata) -> str:
    """`log v4: 1 at 0..1, 3 at 2.., 4 ahead`, and the producers that its last known start knows; then what
    is forgotten.
    """
    parts = []
    for item in row.items:
        if item.first_offset is None:
            parts.append(f"{item.ledger_id} ahead")
        else:
            end = "" if item.last_offset is None else item.last_offset
            parts.append(f"{item.ledger_id} at {item.first_offset}..{end}")
    known = [f"{p.id}/{p.next_seq - 1}" for p in (row.base.producers if row.base else ())]
    if row.forgotten_end:
        known.append(f"forgotten below {row.forgotten_end}")
    return f"log v{row.version}: {', '.join(parts)}" + (f" ({' '.join(known)})" if known else "")
