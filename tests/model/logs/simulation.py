"""A log under everything at once, in virtual time: `make logsim`.

Several gateways; producers with retries and without, publishers whose commits race with aborts and
with each other, readers that follow; rolls, duels, truncation, sweeps; gateways that die or hang,
answers that come late; a log that is deleted and created again under its readers, writers and closers; changes that are
repeated elsewhere (`changes.py`). A seed is one schedule. What is judged
(I32 to I34, rules 22 to 28) is in `judge.py`, and here: every request comes to an end, no answer
contradicts its question, and in the end no ledger is left that no log names.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from quorumlog.errors import (
    UNKNOWN,
    ExpiredProducer,
    InvalidRequest,
    LogFenced,
    OffsetTruncated,
    QuorumLogError,
    SequenceGap,
    StaleProducer,
    TransactionAborted,
    TransactionCommitted,
)
from quorumlog.net.operations import Operation
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.log import PRODUCERS_MAX, LogSettings, compaction, producers
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import (
    Sealed,
    TransactionState,
)
from services.gateway.logs.sweep import Sweep
from services.gateway.logs.values import LogBatches, ReadRecord, Since
from tests.model.logs.attempts import write
from tests.model.logs.changes import Changes
from tests.model.logs.demands import (
    ABORT,
    APPEND,
    COMMIT,
    GET,
    LIST,
    OPEN,
    PATCH,
    READ,
    ROLL,
    TRUNCATE,
    Demands,
    Namesakes,
    insist,
    judge_error,
)
from tests.model.logs.forks import Forks
from tests.model.logs.judge import LOG, Alarms, Judge, Violation, told
from tests.model.logs.model import Cluster, Gateway, Store
from tests.model.logs.replaced import Replaced
from tests.model.logs.rewrites import Rewriting, look_up
from tests.support.virtual import Deadlock, run_virtual

NAME = "log"
END_S = 1800.0
"""Virtual time after which a run hangs."""
TRIES_MAX = 300
"""A client fails after so many tries: nothing here takes so long."""
PATIENCE_S = 20.0
"""How long a client waits before it asks another gateway. The first one may still do the request."""
DAY_MS = 24 * 3600 * 1000


@dataclass(slots=True)
class Outcome:
    """How a seed ended."""

    seed: int
    violation: str | None
    events: int
    digest: str
    virtual_s: float
    story: list[str] = field(default_factory=list)


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        rng = self.random
        self.cluster = Cluster(
            seed,
            hitches=rng.choice((0.0, 0.001, 0.004)),
            lost_answers=rng.choice((0.0, 0.1, 0.4)),
        )
        chance = random.Random(f"cuts-{seed}")
        self.cuts = chance.choice((0, 3, 8))
        """How often a gateway loses metadata, and nothing else."""
        self.cluster.collect_s = chance.choice((0.02, 0.2, 300.0))
        self.opens = chance.choice((0, 2))
        """How often the log is opened for one writer."""
        self.talks = asyncio.Event()
        """Unset while producers send nothing: an owner learns of a fence by its next append."""
        self.talks.set()
        self.may_be_open_for_one = False
        """Whether a client has asked to open the log, whatever it heard (seed 406686)."""
        self.tokens: dict[str, int | None] = {}
        """The writer token that each client knows."""
        self.changes = random.Random(f"changes-{seed}")
        self.sizes: set[int] = set()
        """What `roll_bytes` may be: the latest value that was answered, and later ones of which nothing is known."""
        self.judge = Judge(self.cluster, NAME)
        self.cluster.watch = self.judge
        self.losses = 2
        """Cuts from metadata that come just after a change."""
        self.cluster.on_freed = self.lose_deleter
        self.truncater: Gateway | None = None
        """Who is asked for a truncation that may fail."""
        self.cluster.on_let_go = self.lose_truncater
        self.settings = LogSettings(
            Quorum(3, 3, 2), roll_bytes=0, roll_entries=rng.choice((0, 0, 2, 5))
        )
        self.gateways: list[Gateway] = []
        self.namesakes = Namesakes(
            self.cluster, lambda: rng.choice(self.alive()), self.settings, count=4
        )
        self.replaced = Replaced(
            self.cluster,
            lambda: self.replaced.random.choice(self.alive()),
            self.settings,
            violated=self.judge.violated,
            seed=seed,
        )
        self.judge.on_row = self.replaced.saw
        self.forks = Forks(
            NAME,
            self.settings,
            pick=lambda: self.forks.random.choice(self.alive()),
            stored=self.judge.stored,
            may_lack=self.judge.may_lack,
            has_expired=self.judge.has_expired,
            seed=seed,
        )
        self.repeats = Changes(
            self.cluster,
            self.settings,
            alive=self.alive,
            stand_still=self.stand_still,
            seed=seed,
        )
        self.rewriting = Rewriting(NAME, alive=self.alive, seed=seed)
        self.kills = rng.choice((0, 1, 2, 4))
        self.table = rng.choice((PRODUCERS_MAX, PRODUCERS_MAX, 2, 3))
        """Producers that a log remembers; where that is a few, they are forgotten all the time."""
        self.sent: list[tuple[Append, int]] = []
        """Requests of producers that came to an end, which may come again."""
        self.acknowledged: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        self.story: list[str] = []
        self.trace = hashlib.sha256()
        self.events = 0

    def notify(self, what: str) -> None:
        at = asyncio.get_running_loop().time()
        line = f"{at:9.4f} {what}"
        self.events += 1
        self.trace.update(line.encode())
        self.story.append(line)

    def add_gateway(self) -> None:
        gateway = self.cluster.gateway()
        gateway.skew_ms = self.random.choice((0, 0, -30, 400)) * DAY_MS
        self.gateways.append(gateway)

    def lose_deleter(self, name: str, gateway: Gateway) -> None:
        """A gateway that deletes a namesake dies now and then before it deletes the ledgers."""
        if name == Namesakes.NAME and self.kills and self.random.random() < 0.5:
            self.kills -= 1
            self.notify(f"{gateway.writer.id} dies as it deletes")
            gateway.kill()
            self.add_gateway()
        elif name == Namesakes.NAME:
            self.lose_metadata(gateway)

    def lose_truncater(self, gateway: Gateway) -> None:
        if gateway is self.truncater:
            self.lose_metadata(gateway)

    def lose_metadata(self, gateway: Gateway) -> None:
        """A gateway that deletes a log or truncates one can ask nothing for a while, before members are told."""
        if self.losses and self.random.random() < 0.3:
            self.losses -= 1
            for_s = 2 * self.random.random()
            self.notify(f"{gateway.writer.id} can ask metadata nothing for {for_s:.3f} s")
            gateway.cut_off(for_s, asks=False, hears=True)

    def alive(self) -> list[Gateway]:
        return [gateway for gateway in self.gateways if not gateway.is_dead]

    async def through(self, gateway: Gateway, work: Any, asked: Operation | None = None) -> Any:
        """A gateway's answer to a client. Raises: QuorumLogError of unknown outcome if the gateway dies or
        hangs. The errors that an answer may be are those of `asked`.
        """
        try:
            return await gateway.while_it_lives(work, PATIENCE_S)
        except ConnectionResetError as error:
            broke = "the connection broke"
            raise QuorumLogError(broke, outcome=UNKNOWN, retryable=True) from error
        except QuorumLogError as error:
            if asked is not None:
                judge_error(asked, error)
            raise

    # --- writers ---

    async def produce(self, name: str, count: int, *, exactly_once: bool) -> None:
        epoch = seq = since = 0
        for number in range(count):
            await self.talks.wait()
            if exactly_once and seq == 0:
                since = await self.since()
            size = self.random.choice((1, 1, 1, 2, 3))
            values = [f"{name}-{number}.{n}" for n in range(size)]
            op = self.judge.produce(
                LOG, *encoded(values), producer=(name, epoch) if exactly_once else None, seq=seq
            )
            producer = ProducerSeq(name, epoch, seq) if exactly_once else None
            seq += 1
            for _ in range(TRIES_MAX):
                records = tuple(map(self.rewriting.record, values))
                token = self.tokens.get(name)
                call = Append.of(records, producer, token=token, since=since)
                try:
                    if await self.appended(name, call, values, op):
                        break
                except ExpiredProducer:
                    # Nobody knows whether it is there: give it up, and begin anew.
                    epoch, seq = epoch + 1, 0
                    break
                except InvalidRequest:
                    since = min(since, await self.since())  # it was too high; lower is safe
                await asyncio.sleep(self.random.random() * 0.01)
            else:
                raise Violation(f"rule 26: {values[0]} never comes to an end")
            if exactly_once:
                self.sent.append((call, op))
                if self.random.random() < 0.4:
                    await self.repeat(*self.random.choice(self.sent))
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.random() * 0.05)

    async def since(self) -> int:
        """The log's end as any gateway tells it; now and then 0, or what a client made up."""
        luck = self.random.random()
        if luck < 0.1:
            return 0
        while True:
            gateway = self.random.choice(self.alive())
            try:
                view = await self.through(gateway, gateway.logs.get(NAME), GET)
            except QuorumLogError:
                await asyncio.sleep(self.random.random() * 0.01)
                continue
            return int(view.next_offset) + (self.random.randint(1, 6) if luck < 0.2 else 0)

    async def repeat(self, call: Append, op: int) -> None:
        """Send a request again that its client no longer waits for, as a late copy of it."""
        gateway = self.random.choice(self.alive())
        try:
            done = await self.through(gateway, gateway.logs.append(NAME, call), APPEND)
        except (ExpiredProducer, SequenceGap, StaleProducer) as error:
            self.is_true(call, error)
        except QuorumLogError:
            return
        else:
            self.notify(f"{call.producer} again is at {done.first_offset}")
            self.acknowledge(op, done.first_offset, call.count)

    def is_true(self, call: Append, error: QuorumLogError) -> None:
        """Raise Violation where a producer is told what is not so: all its requests before this one
        were acknowledged, and nobody is forgotten by a table that has room, whatever clocks show.
        """
        is_small = self.table < PRODUCERS_MAX
        if isinstance(error, SequenceGap) or (isinstance(error, ExpiredProducer) and not is_small):
            raise Violation(f"rule 26a: {call.producer} is told {error!r}") from error

    async def appended(self, name: str, call: Append, values: list[str], op: int) -> bool:
        """Whether this request is over: acknowledged, or never repeated by its client."""
        gateway = self.random.choice(self.alive())
        sent = self.judge.sending(call.token)
        try:
            done = await self.through(gateway, gateway.logs.append(NAME, call), APPEND)
        except LogFenced as error:
            self.notify(f"{name} has the token {call.token}: {error.detail}")
            await self.learn_token(name)
            return False
        except QuorumLogError as error:
            if call.producer is None and error.outcome == UNKNOWN:
                self.notify(f"{name} does not know of {values[0]}: {error.code}")
                return True
            self.is_true(call, error)
            if isinstance(error, ExpiredProducer) or (
                isinstance(error, InvalidRequest) and call.since
            ):
                self.notify(f"{name} was refused {values[0]}: {error.code}")
                raise
            if call.producer is not None and not error.retryable and error.outcome != UNKNOWN:
                raise Violation(f"rule 26: {name} was refused {values[0]}: {error!r}") from error
            return False
        self.notify(f"{name} got {done.first_offset} for {values[0]} through {gateway.writer.id}")
        if done.last_offset - done.first_offset + 1 != len(values):
            raise Violation(f"rule 25: {values} are at {done}")
        self.judge.appended(sent, done)
        self.acknowledge(op, done.first_offset, len(values))
        if self.random.random() < 0.3:
            await self.read_back(done.first_offset)
        return True

    async def learn_token(self, name: str) -> None:
        """A client that was refused asks the others for their token, or opens the log itself."""
        known = self.judge.token
        if known and known != self.tokens.get(name):
            self.tokens[name] = known
        else:
            with contextlib.suppress(QuorumLogError):
                self.tokens[name], _ = await self.open(self.random.choice(self.alive()))

    async def open(self, gateway: Gateway) -> tuple[int, int]:
        """Open the log for one writer: from then on nobody appends without the token. The token, and
        the next offset.
        """
        self.may_be_open_for_one = True
        token, at = await self.through(gateway, gateway.logs.open(NAME, "who asks"), OPEN)
        self.notify(f"opened with the token {token} at {at} through {gateway.writer.id}")
        self.judge.opened(int(token))
        return int(token), int(at)

    def acknowledge(self, op: int, first: int, count: int) -> None:
        self.judge.produced(op, first)
        self.acknowledged.update(range(first, first + count))

    async def read_back(self, offset: int) -> None:
        """What was acknowledged before a read is seen by it, through any gateway."""
        for _ in range(200):
            gateway = self.random.choice(self.alive())
            try:
                found = await self.through(gateway, self.page(gateway, offset, limit=1), READ)
            except OffsetTruncated:
                return
            except QuorumLogError:
                await asyncio.sleep(0.01)
                continue
            self.fetched(offset, found, acknowledged=offset + 1)
            return
        raise Violation(f"offset {offset} stays unreadable")

    async def page(
        self, gateway: Gateway, at: int, *, limit: int, wait_s: float = 0.0
    ) -> LogBatches:
        """A page as clients of logs get it, or as those of streams do, who may have a recent row."""
        logs = gateway.logs
        if self.random.random() < 0.5:
            return await logs.reader.read(NAME, at, limit=limit, wait_s=wait_s)
        row = logs.rows.recent(NAME)
        if row is not None:
            full = await logs.reader.full_page(row, at, limit=limit, max_bytes=1 << 20)
            if full is not None:
                return full
        row = await logs.rows.row(NAME)
        return await logs.reader.read(NAME, at, limit=limit, wait_s=wait_s, row=row)

    def fetched(self, offset: int, found: LogBatches, *, acknowledged: int = 0) -> None:
        is_dense = not (self.rewriting.compacts or self.rewriting.ttl_s)
        if self.random.random() < 0.5 and is_dense:
            records = [(at, bytes(value)) for at, value in enumerate(found.values, found.first)]
        else:
            records = [(record.offset, told(record.record)) for record in found.records]
            self.judge.shown_in_time(at for at, _ in records)
            records = self.judge.filled(records, found.first, found.next)
        self.judge.fetched(LOG, offset, *records, acknowledged=acknowledged)

    # --- transactions ---

    async def publish(self, name: str, count: int) -> None:
        for version in range(count):
            rng = self.random
            is_app = rng.random() < 0.5
            transaction = self.cluster.begin(NAME, name if is_app else None, version)
            ledgers, values = [], []
            for part in range(rng.choice((0, 1, 1, 2, 3))):
                size = rng.choice((0, 1, 2))
                mine = [
                    [f"{transaction}/{part}.{n}", f"{transaction}/{part}.{n}+"] for n in range(size)
                ]
                ledgers.append(write(self.cluster, transaction, mine))
                values += [value for records in mine for value in records]
            write(self.cluster, transaction, [[f"{transaction}/loser"]])
            order = tuple(ledgers)
            overwrite = rng.random() < 0.1
            op = self.judge.produce(LOG, *encoded(values))
            asked = op, len(values)
            rivals = [self.commit(transaction, order, asked, overwrite=overwrite)]
            if rng.random() < 0.3:
                rivals.append(self.commit(transaction, order, asked, overwrite=overwrite))
            if rng.random() < 0.25:
                rivals.append(self.abort(transaction))
            await asyncio.gather(*rivals)
            if self.cluster.transactions[transaction].state is TransactionState.ABORTED:
                self.judge.refused(op)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.2)

    async def commit(
        self,
        transaction: str,
        ledgers: tuple[Sealed, ...],
        asked: tuple[int, int],
        *,
        overwrite: bool,
    ) -> None:
        op, count = asked
        await asyncio.sleep(self.random.random() * 0.02)
        for _ in range(TRIES_MAX):
            gateway = self.random.choice(self.alive())
            token = self.tokens.get(transaction)
            work = gateway.transactions.commit(
                transaction, ledgers, overwrite=overwrite, token=token
            )
            try:
                done = await self.through(gateway, work, COMMIT)
            except TransactionAborted:
                self.notify(f"{transaction} is aborted")
                return
            except LogFenced:
                await self.learn_token(transaction)
                continue
            except QuorumLogError as error:
                if not error.retryable and error.outcome != UNKNOWN:
                    raise Violation(f"rule 28: {transaction} was refused: {error!r}") from error
                await asyncio.sleep(self.random.random() * 0.01)
                continue
            break
        else:
            raise Violation(f"rule 28: {transaction} never comes to an end")
        if done.is_duplicate:
            raise Violation(f"rule 28: {transaction} is told to be a duplicate")
        self.notify(f"{transaction} is at {done.first_offset} to {done.last_offset}")
        if count:
            assert done.first_offset is not None
            self.acknowledge(op, done.first_offset, count)
            if done.last_offset != done.first_offset + count - 1:
                raise Violation(f"rule 28: {transaction} ends at {done.last_offset}")
            await self.read_back(done.first_offset)

    async def abort(self, transaction: str) -> None:
        await asyncio.sleep(self.random.random() * 0.05)
        while True:
            gateway = self.random.choice(self.alive())
            try:
                await self.through(gateway, gateway.transactions.abort(transaction), ABORT)
            except TransactionCommitted:
                return
            except QuorumLogError:
                continue
            self.notify(f"{transaction} was aborted")
            return

    # --- readers and mishaps ---

    async def set_limits(self) -> None:
        """Change a limit that matters to nobody here, one change after another."""
        self.sizes = {self.settings.roll_bytes}
        while not self.is_over:
            await asyncio.sleep(self.changes.random() * 0.5)
            gateway = self.changes.choice(self.alive())
            size = self.changes.randrange(1 << 40, 1 << 41)
            self.sizes.add(size)
            try:
                work = gateway.logs.change(NAME, {"roll_bytes": size})
                await self.through(gateway, work, PATCH)
            except QuorumLogError:
                continue
            self.sizes = {size}

    async def check_limits(self, gateway: Gateway) -> None:
        """A limit that was set stays, whoever changes the row."""
        size = (await gateway.logs.get(NAME)).log.settings.roll_bytes
        if size not in self.sizes:
            raise Violation(f"roll_bytes is {size}, and not one of {sorted(self.sizes)}")
        await gateway.logs.change(NAME, self.settings.limits)

    async def follow(self) -> None:
        """Follow the log from its first record on."""
        at = 0
        while not self.is_over:
            gateway = self.random.choice(self.alive())
            try:
                found = await self.through(gateway, self.page(gateway, at, limit=5, wait_s=1), READ)
            except OffsetTruncated as gone:
                at = int(gone.members["first_offset"])
                continue
            except QuorumLogError:
                await asyncio.sleep(0.05)
                continue
            self.fetched(at, found)
            at = found.next

    async def hurt(self) -> None:
        """Kill, duel, roll, truncate, sweep."""
        rng = self.random
        while not self.is_over:
            await asyncio.sleep(rng.random() * 0.06)
            gateway = rng.choice(self.alive())
            work: Any = None
            asked: Operation | None = None
            before = 0
            match rng.randrange(13 if not (self.cuts or self.opens) else 16):
                case 0 if self.kills:
                    self.kills -= 1
                    self.notify(f"{gateway.writer.id} dies")
                    gateway.kill()
                    self.add_gateway()
                case 1:
                    work = gateway.take_over(NAME)
                case 2 | 3:
                    work, asked = gateway.logs.roll(NAME), ROLL
                case 4 if rng.random() < 0.4 and self.acknowledged:
                    before = rng.choice(sorted(self.acknowledged))
                    self.truncater = gateway
                    work, asked = gateway.logs.truncate(NAME, before), TRUNCATE
                case 5:
                    work = self.sweep(gateway, older_than_s=300)
                case 6 if not gateway.is_silent:
                    self.stand_still(gateway, rng.random() * 3)
                case 7 if self.kills and rng.random() < 0.3:
                    self.kills -= 1
                    await self.leave(gateway)
                case 8:
                    work, asked = gateway.logs.views.page(after=None, limit=10), LIST
                case 9:
                    work, asked = gateway.logs.reader.read(NAME, "latest", wait_s=0.5), READ
                case 10:
                    gateway.skew_ms = rng.choice((0, 8, -8, 400)) * DAY_MS
                case 13 | 14 if self.cuts:
                    self.cuts -= 1
                    work = self.displace(gateway)
                case 15 if self.opens:
                    self.opens -= 1
                    work, asked = self.open(gateway), OPEN
                case _:
                    continue
            if work is not None:
                began = self.cluster.now()
                try:
                    done = await self.through(gateway, work, asked)
                except QuorumLogError as error:
                    if asked is TRUNCATE and error.outcome == UNKNOWN:
                        await self.truncate_again(before)
                    continue
                finally:
                    self.truncater = None
                if asked is TRUNCATE:
                    self.judge.members_know_of_truncation(done.log, began)

    async def truncate_again(self, before: int) -> None:
        """Ask another gateway for what may be done."""
        rival, began = self.random.choice(self.alive()), self.cluster.now()
        with contextlib.suppress(QuorumLogError):
            done = await self.through(rival, rival.logs.truncate(NAME, before), TRUNCATE)
            self.judge.members_know_of_truncation(done.log, began)

    async def displace(self, gateway: Gateway) -> None:
        """Cut a gateway, mostly the owner, off from metadata for a while. Meanwhile another gateway may take
        the log over, and truncate what the first one writes, which bookies then drop.
        """
        rng = self.random
        others = [other for other in self.alive() if other is not gateway]
        owners = [other for other in self.alive() if other.logs.ownership.owned]
        if owners and rng.random() < 0.7:
            gateway = rng.choice(owners)
            others = [other for other in self.alive() if other is not gateway]
        how, for_s = rng.choice(("all", "all", "asking", "hearing")), 2 * rng.random()
        self.notify(f"{gateway.writer.id} loses metadata ({how}) for {for_s:.3f} s")
        gateway.cut_off(for_s, asks=how == "hearing", hears=how == "asking")
        if not others or rng.random() < 0.3:
            return
        rival = rng.choice(others)
        if rng.random() < 0.6:
            self.talks.clear()
        try:
            at = await self.taken_over(rival)
            if rng.random() < 0.7:
                await self.through(rival, rival.logs.truncate(NAME, at))
                self.notify(f"{rival.writer.id} let go of what was before offset {at}")
                await asyncio.sleep(min(self.cluster.collect_s, 1.0) * 1.5)
        finally:
            self.talks.set()

    async def taken_over(self, rival: Gateway) -> int:
        """The offset at which a gateway goes on, with a writer token or without."""
        if self.opens and self.random.random() < 0.7:
            self.opens -= 1
            return (await self.open(rival))[1]
        work = rival.take_over(NAME)
        item = (await self.through(rival, work)).last_item
        return int(item.first_offset)

    def stand_still(self, gateway: Gateway, for_s: float) -> None:
        """A process is paused, and goes on as the owner of what others may have taken since."""
        self.notify(f"{gateway.writer.id} stands still for {for_s:.3f} s")
        gateway.goes.clear()
        asyncio.get_running_loop().call_later(for_s, gateway.goes.set)

    async def leave(self, gateway: Gateway) -> None:
        """Drain a process, which is asked on meanwhile, and end it."""
        self.notify(f"{gateway.writer.id} drains")
        task = asyncio.ensure_future(gateway.logs.ownership.drain())
        await asyncio.wait((task,), timeout=self.random.random() * 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.notify(f"{gateway.writer.id} ends")
        gateway.kill()
        self.add_gateway()

    async def sweep(self, gateway: Gateway, *, older_than_s: float) -> None:
        sweep = Sweep(gateway.logs, Store(gateway))
        await sweep.sweep_logs()
        await sweep._logs.orphans.delete_some(older_than_s=older_than_s)

    # --- the whole ---

    async def main(self) -> None:
        for _ in range(3):
            self.add_gateway()
        alarms = Alarms()
        logging.getLogger("services.gateway.logs").addHandler(alarms)
        try:
            async with asyncio.timeout(END_S):
                settings = self.settings.with_limits(self.rewriting.limits)
                await self.gateways[0].logs.put(NAME, settings)
                await self.everything()
                await self.check()
        except TimeoutError as error:
            raise Violation("it hangs") from error
        finally:
            logging.getLogger("services.gateway.logs").removeHandler(alarms)
            self.is_over = True
            for gateway in self.gateways:
                await gateway.end()
        if alarms.found:
            raise Violation(alarms.found[0])

    async def everything(self) -> None:
        async with asyncio.TaskGroup() as background:
            for _ in range(2):
                background.create_task(self.follow())
            background.create_task(self.hurt())
            background.create_task(self.set_limits())
            rewriting = background.create_task(self.rewriting.run())
            async with asyncio.TaskGroup() as writers:
                writers.create_task(self.produce("p1", 12, exactly_once=True))
                writers.create_task(self.produce("p2", 12, exactly_once=True))
                writers.create_task(self.produce("plain", 12, exactly_once=False))
                if self.table < PRODUCERS_MAX:
                    for n in range(3):
                        writers.create_task(self.produce(f"q{n}", 6, exactly_once=True))
                writers.create_task(self.publish("a1", 5))
                writers.create_task(self.publish("a2", 5))
                writers.create_task(self.namesakes.run())
                writers.create_task(self.replaced.run())
                writers.create_task(self.repeats.run())
                if self.forks.count:
                    writers.create_task(self.forks.run())
            self.is_over = True
            rewriting.cancel()

    async def lose_owner(self) -> None:
        """A gateway takes the log over from its owner, and dies."""
        owner = self.random.choice(self.alive())
        with contextlib.suppress(QuorumLogError):
            await owner.take_over(NAME)
        self.notify(f"{owner.writer.id} dies at the end")
        owner.kill()

    async def check(self) -> None:
        """Judge the final log, which every gateway must read alike, even if its owner has just died. Every
        gateway that lives must then do all that it is asked, and no ledger may be left over.
        """
        self.cluster.hitches = self.cluster.lost_answers = 0.0
        for gateway in self.alive():
            gateway.goes.set()
            gateway.unasked_until = gateway.unheard_until = 0.0
        if self.random.random() < 0.5:
            await self.lose_owner()
        alive = self.alive()
        self.random.shuffle(alive)
        gateway = alive[0]
        await asyncio.sleep(self.rewriting.ttl_s)  # what all read is the same from then on
        row = self.cluster.logs.get(NAME)
        whole = await self.contents(gateway)
        self.judge.whole(whole)
        while True:
            try:
                await self.check_readers(alive, whole)
                break
            except Violation:
                # A compaction that a gateway began before the check may end during the check.
                if not self.rewriting.compacts or self.cluster.logs.get(NAME) == row:
                    raise
            row, before = self.cluster.logs.get(NAME), {each.offset: each.record for each in whole}
            whole = await self.contents(gateway)
            if any(before.get(each.offset) != each.record for each in whole):
                raise Violation("rule 27d: a compaction changed a record")
        await self.forks.end()
        await self.repeats.end()
        await self.check_limits(gateway)
        self.cluster.watch = None  # from here on each record's place is known to who appends it
        limits = {name: self.settings.limits[name] for name in self.rewriting.limits}
        await insist(PATCH, lambda: gateway.logs.change(NAME, limits))
        token = None
        if self.may_be_open_for_one:
            token, _ = await insist(OPEN, lambda: gateway.logs.open(NAME, "the last one"))
        await Demands(NAME, self.settings).all_of(alive, token)
        await asyncio.sleep(400)
        await self.sweep(gateway, older_than_s=300)
        left = [number for number in self.cluster.ledgers if not self.cluster.is_named(number)]
        if left:
            raise Violation(f"rule 22: ledgers {left} are left over")

    async def check_readers(self, alive: Sequence[Gateway], whole: list[ReadRecord]) -> None:
        """Check that all gateways read the records `whole`, in order, by time and by key."""
        for gateway in alive[1:]:
            if await self.contents(gateway) != whole:
                raise Violation(f"{gateway.writer.id} reads another log")
        await self.seek(whole)
        for gateway in alive:
            await look_up(gateway, NAME, whole, self.judge.has_expired)

    async def contents(self, gateway: Gateway) -> list[ReadRecord]:
        """Every record that the log has now."""
        try:
            return await gateway.contents(NAME)
        except QuorumLogError as error:
            raise Violation(f"{gateway.writer.id} can't read the log: {error}") from error

    async def seek(self, whole: list[ReadRecord]) -> None:
        """A read from a time begins with the first record that was appended then or later, whoever is asked."""
        times = sorted({found.timestamp_ms for found in whole})
        for ms in self.random.sample(times, min(len(times), 5)):
            for at in (ms, ms + 1):
                wanted = next((each.offset for each in whole if each.timestamp_ms >= at), None)
                found = await self.random.choice(self.alive()).logs.reader.read(
                    NAME, Since(at), limit=1
                )
                first = found.records[0].offset if found.records else None
                if first != wanted:
                    raise Violation(f"rule 26b: {at} begins at {first}, and not at {wanted}")


def encoded(values: Sequence[str]) -> tuple[bytes, ...]:
    """Records as a history knows them."""
    return tuple(value.encode() for value in values)


def run_seed(seed: int) -> Outcome:
    """Simulate one seed."""
    run = Run(seed)
    violation = None
    end_s = 0.0

    async def main() -> None:
        nonlocal end_s
        try:
            await run.main()
        finally:
            end_s = asyncio.get_running_loop().time()

    logging.getLogger("services").setLevel(logging.ERROR)
    logging.getLogger("services.gateway.logs").propagate = False
    try:
        with (
            mock.patch.object(producers, "PRODUCERS_MAX", run.table),
            mock.patch.object(compaction, "KEYS_MAX", run.rewriting.keys_max),
        ):
            run_virtual(main, seed=seed)
    except BaseExceptionGroup as group:
        violation = _said(_first(group))
    except (Violation, AssertionError, Deadlock, QuorumLogError) as error:
        violation = _said(error)
    finally:
        logging.getLogger("services.gateway.logs").propagate = True
        logging.getLogger("services").setLevel(logging.NOTSET)
    if run.judge.found:
        violation = run.judge.found[0]
    return Outcome(seed, violation, run.events, run.trace.hexdigest()[:16], end_s, run.story)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return error


def _said(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, Violation) else f"{type(error).__name__}: {text}"
