"""Rule 25b under everything at once: requests that end a log, beside appends, rolls and gateways that die.

Each seed is one schedule on the model of `model.py`, in virtual time.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final

from quorumlog.errors import LogClosed, QuorumLogError, StreamSeqRegression
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.messages import Append, RecordsAppended
from quorumlog.protocol.quorum import Quorum
from tests.model.logs.judge import Violation
from tests.model.logs.model import Cluster, Gateway, Ledger

NAME: Final = "log"
PATIENCE_S: Final = 20.0
TRIES_MAX: Final = 300
END: Final = b"end"
SEEDS: Final = range(40)


@dataclass(slots=True)
class _Watch:
    cluster: Cluster
    found: list[str] = field(default_factory=list)
    """Violations: a gateway in which one was raised would take it for a defect of its own."""

    def submitted(self, ledger: Ledger) -> None:
        """Nothing is written once an entry of the log has ended it."""
        row = self.cluster.logs[NAME]
        for item in row.items:
            for data in self.cluster.ledgers[item.ledger_id].entries:
                if batch.decode_head(data).is_end and item.ledger_id != ledger.row.ledger_id:
                    self.found.append(f"rule 25b: written behind ledger {item.ledger_id}")

    def replaced(self, before: LogMetadata, now: LogMetadata) -> None:
        """Nothing to see."""

    def violated(self, what: str) -> None:
        """Something happened that must never happen."""
        self.found.append(what)


@dataclass(slots=True)
class Ending:
    """One seed."""

    seed: int
    cluster: Cluster = field(init=False)
    rng: random.Random = field(init=False)
    watch: _Watch = field(init=False)
    gateways: list[Gateway] = field(default_factory=list)
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    seqs: list[tuple[int, str]] = field(default_factory=list)
    """Acknowledged stream sequences, by offset."""
    ended_at: int | None = None
    """The end that a client was told."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.cluster = Cluster(self.seed, hitches=0.002, lost_answers=self.rng.choice((0.0, 0.3)))
        self.cluster.watch = self.watch = _Watch(self.cluster)
        self.gateways = [self.cluster.gateway() for _ in range(3)]

    def alive(self) -> Gateway:
        return self.rng.choice([gateway for gateway in self.gateways if not gateway.is_dead])

    async def main(self) -> None:
        settings = LogSettings(
            Quorum(3, 3, 2), roll_bytes=0, roll_entries=self.rng.choice((0, 1, 3))
        )
        await self.gateways[0].logs.put(NAME, settings)
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in ("a", "b"):
                    tasks.create_task(self.append(name))
                tasks.create_task(self.sequence())
                for name in ("x", "y"):
                    tasks.create_task(self.end(name))
                tasks.create_task(self.kill())
            if self.watch.found:
                raise Violation(self.watch.found[0])
            await self.judge()
        finally:
            for gateway in self.gateways:
                await gateway.end()

    async def send(self, call: Append) -> RecordsAppended | None:
        """Append through any gateway; None where the client does not know what became of it."""
        gateway = self.alive()
        is_over = self.ended_at is not None
        work: Awaitable[RecordsAppended] = gateway.logs.append(NAME, call)
        try:
            done: RecordsAppended = await gateway.while_it_lives(work, PATIENCE_S)
        except ConnectionResetError:
            return None
        except (LogClosed, StreamSeqRegression):
            raise
        except QuorumLogError:
            return None
        if is_over and not done.is_duplicate:
            raise Violation(f"rule 25b: appended at {done.first_offset} after {self.ended_at}")
        return done

    async def append(self, name: str) -> None:
        with contextlib.suppress(LogClosed):
            for n in range(TRIES_MAX):
                value = f"{name}-{n}".encode()
                if (done := await self.send(Append.of([Record(value)]))) is not None:
                    self.acknowledged[done.first_offset] = value
                await asyncio.sleep(self.rng.random() * 0.01)

    async def sequence(self) -> None:
        """A client that sends a stream sequence with each request, and now and then one that is too low."""
        with contextlib.suppress(LogClosed):
            for n in range(1, TRIES_MAX):
                value = f"s-{n}".encode()
                try:
                    done = await self.send(Append.of([Record(value)], seq=f"{n:04d}"))
                except StreamSeqRegression:
                    done = None  # an earlier one of this number was appended, and nobody told
                if done is not None:
                    self.acknowledged[done.first_offset] = value
                    self.seqs.append((done.first_offset, f"{n:04d}"))
                    low = f"{self.rng.randint(0, n):04d}"
                    with contextlib.suppress(StreamSeqRegression):
                        if await self.send(Append.of([Record(b"low")], seq=low)) is not None:
                            raise Violation(f"rule 25a: {low} was appended after {n:04d}")
                await asyncio.sleep(self.rng.random() * 0.02)

    async def end(self, name: str) -> None:
        """End the log, with a last record or without one, as the gateway's streams do."""
        await asyncio.sleep(self.rng.random() * 0.3)
        records = [Record(END)] if self.rng.random() < 0.6 else []
        call = Append.of(records, ProducerSeq(name, 0, 0), is_end=True, is_by_numbers=True)
        for _ in range(TRIES_MAX):
            try:
                done = await self.send(call)
            except LogClosed:
                return
            if done is not None:
                self.reported(done)
                gateway = self.alive()
                with contextlib.suppress(ConnectionResetError, QuorumLogError):
                    await gateway.while_it_lives(gateway.logs.finish(NAME, None), PATIENCE_S)
                if self.rng.random() < 0.5:
                    return
            await asyncio.sleep(self.rng.random() * 0.01)

    def reported(self, done: RecordsAppended) -> None:
        end = done.last_offset + 1
        if self.ended_at not in (None, end):
            raise Violation(f"rule 25b: the log ended at {self.ended_at}, and at {end}")
        self.ended_at = end
        if done.last_offset >= done.first_offset:
            self.acknowledged[done.first_offset] = END

    async def kill(self) -> None:
        for _ in range(self.rng.choice((0, 2, 4))):
            await asyncio.sleep(self.rng.random() * 0.15)
            self.alive().kill()
            self.gateways.append(self.cluster.gateway())

    async def judge(self) -> None:
        """The log as a fresh gateway finds it."""
        gateway = self.cluster.gateway()
        self.gateways.append(gateway)
        with contextlib.suppress(LogClosed):
            await gateway.logs.append(NAME, Append.of([Record(b"after")]))
            raise Violation("rule 25b: a gateway that knows nothing goes on")
        row: LogMetadata = (await gateway.logs.get(NAME)).log
        if row.state is not LogState.CLOSED:
            raise Violation(f"rule 25b: the log is {row.state}")
        found = {each.offset: each.record.value for each in await gateway.contents(NAME)}
        ends = [offset for offset, value in found.items() if value == END]
        if ends not in ([], [max(found, default=0)]):
            raise Violation(f"rule 25b: ends at {ends}, records to {max(found)}")
        if self.ended_at is not None and self.ended_at != row.end_offset:
            raise Violation(
                f"rule 25b: ended at {self.ended_at}, and is closed at {row.end_offset}"
            )
        for offset, value in self.acknowledged.items():
            if found.get(offset) != value:
                raise Violation(f"I1: {value!r} at {offset} is {found.get(offset)!r}")
        sequenced = [seq for _, seq in sorted(self.seqs)]
        if sequenced != sorted(set(sequenced)):
            raise Violation(f"rule 25a: {sequenced}")


async def no_seed_goes_on() -> str | None:
    """Rules 25a and 25b: what the first seed that breaks one says."""
    for seed in SEEDS:
        try:
            await Ending(seed).main()
        except Violation as error:
            return f"seed {seed}: {error}"
        except BaseExceptionGroup as group:
            return f"seed {seed}: {_first(group)}"
    return None


def _first(error: BaseException) -> Any:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, Violation | AssertionError):
        raise error
    return repr(error)
