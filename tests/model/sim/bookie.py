"""A simulated bookie: the replica that ships, on a disk that forgets what was not synced.

The log is a list of records; `synced` of them survive a power cut, of the others any prefix. A
killed process keeps all (the page cache lives). A wiped one comes back as its next incarnation
with nothing. Answers wait for the disk as the replica's verdict says (rule 3).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, assert_never

from quorumlog.protocol.ids import member_of
from quorumlog.protocol.messages import (
    AddAnswered,
    Event,
    FenceAnswered,
    ReadAnswered,
    RowAnswered,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
    Status,
)
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.record import Entry, Run, pack
from quorumlog.protocol.replica import (
    EntriesDropped,
    FenceAsked,
    FenceSet,
    LacReported,
    LedgerDeleted,
    ReadAsked,
    Replica,
    ReplicaRecord,
    RowKept,
    RowReported,
    RunStored,
    Verdict,
)
from quorumlog.protocol.row_copy import RowName
from tests.support import invariants
from tests.support.invariants import Wrong
from tests.support.replicas import HeldEntries, add_asked, memory_replica, replay, row_told

Answer = Callable[[Event], None]

READ_CUT: Final = 0.1
"""The share of reads that are cut short, as by a size limit."""


class BookieFault(AssertionError):
    """A bookie broke one of its own rules (I12, I13, I15, I17, I27)."""


def faultless(*found: Wrong) -> None:
    """Raise BookieFault where a check says what is wrong."""
    for wrong in found:
        if wrong is not None:
            raise BookieFault(wrong)


class Watcher(Protocol):
    """Who is told what became durable."""

    def stored(self, member: str, entries: Sequence[Entry]) -> None: ...

    def copied(self, member: str, name: RowName) -> None: ...


class Surroundings(Protocol):
    """What a bookie needs of its world."""

    rng: random.Random

    @property
    def is_healed(self) -> bool: ...

    @property
    def now(self) -> int: ...

    @property
    def sync(self) -> tuple[int, int]: ...

    @property
    def watcher(self) -> Watcher | None: ...

    def after(self, delay: int, action: Callable[..., object], *args: Any) -> None: ...

    def note(self, *parts: object) -> None: ...

    def may_lose_a_copy(self) -> bool: ...


def stored_in(log: Sequence[ReplicaRecord]) -> set[int]:
    """The entries that a log holds, damaged or not."""
    ids: set[int] = set()
    for record in log:
        if isinstance(record, RunStored):
            ids.update(record.run.ids)
        elif isinstance(record, EntriesDropped):
            ids.clear()
    return ids


class SimBookie:
    """One bookie's process, disk and ledger."""

    def __init__(self, name: str, world: Surroundings) -> None:
        self.name = name
        self.world = world
        self.incarnation = 1
        self.is_up = True
        self.slow_until = 0
        self.full_until = 0
        self.flips_until = 0
        """Until then bits flip on the way from the disk to the wire."""
        self.log: list[ReplicaRecord] = []
        self.synced = 0
        self.damaged: set[int] = set()
        self.wipes = 0
        """How often the disk was lost."""
        self.replica: Replica = memory_replica(self.member)
        self._boot = 0
        """Counts restarts: what was under way before is forgotten."""
        self._is_syncing = False
        self._base = 0
        """Records of the log that were there at the last start; the replica counts from here."""
        self._waiting: list[tuple[int, Answer, Event, tuple[int, ...], bool]] = []
        self._has_fenced = False
        self._is_deleted = False
        """Its log says so, on disk."""
        self._denied: set[tuple[int, int]] = set()
        """Ranges that a recovery was told are not here."""

    @property
    def member(self) -> str:
        """The bookie in its present incarnation."""
        return member_of(self.name, self.incarnation)

    @property
    def is_full(self) -> bool:
        """The disk takes no normal adds."""
        return self.full_until > self.world.now

    def be(self, incarnation: int) -> None:
        """The ledger is new to a bookie that is at this incarnation."""
        self.incarnation = incarnation
        self.replica = memory_replica(self.member)

    @property
    def highest(self) -> int:
        """The highest entry that is held."""
        return self.replica.holdings.highest

    # --- requests -----------------------------------------------------------------------------

    def receive(self, asked: SendAdd | SendFence | SendRead | SendRow, answer: Answer) -> None:
        """Judge a request; the answer leaves when the disk says so."""
        was_fenced = self.replica.is_fenced
        match asked:
            case SendAdd(position, member, generation, run):
                verdict = self._add(asked)
                reported: Event = AddAnswered(
                    position, member, generation, run.first, run.last, verdict.status
                )
                self._check_add(asked, verdict, was_fenced=was_fenced)
            case SendFence(position, member):
                verdict = self.replica.step(FenceAsked(member, asked.ledger_key))
                reported = FenceAnswered(
                    position, member, verdict.status, verdict.last_add_confirmed
                )
            case SendRead(position, member, _, first, last):
                verdict = self.replica.step(
                    ReadAsked(member, first, last, asked.fence, asked.ledger_key, asked.from_disk)
                )
                reported = ReadAnswered(
                    position,
                    member,
                    first,
                    last,
                    verdict.status,
                    self._read(verdict),
                    verdict.absent,
                )
                if verdict.absent:
                    is_limbo = self.replica.is_limbo
                    faultless(
                        invariants.limbo_denies_nothing(self.member, member, is_limbo=is_limbo)
                    )
            case SendRow(member, row):
                verdict = self.replica.step(row_told(asked))
                reported = RowAnswered(member, row.version, verdict.status)
            case _:
                assert_never(asked)
        is_promise = isinstance(asked, SendRead) and asked.fence
        ids = tuple(asked.run.ids) if isinstance(asked, SendAdd) else ()
        self._take(verdict, answer, reported, ids=ids, is_promise=is_promise)

    def keep(self, asked: LacReported | RowReported, answer: Answer) -> None:
        """The explicit LAC of an idle writer, or a copy of the row."""
        verdict = self.replica.step(asked)
        reported = FenceAnswered(-1, asked.member, verdict.status, verdict.last_add_confirmed)
        self._take(verdict, answer, reported)

    def _take(
        self,
        verdict: Verdict,
        answer: Answer,
        reported: Event,
        *,
        ids: tuple[int, ...] = (),
        is_promise: bool = False,
    ) -> None:
        self.replica.check()
        self._check_deleted(
            says=bool(verdict.records or verdict.absent or verdict.status is Status.OK)
        )
        self.log.extend(verdict.records)
        self._waiting.append((verdict.after, answer, reported, ids, is_promise))
        self._release()
        self._sync()

    def _add(self, asked: SendAdd) -> Verdict:
        request = replace(add_asked(asked), read_only=self.is_full)
        verdict = self.replica.step(request)
        if not verdict.compare:
            return verdict
        held = self._held.run(verdict.compare)
        assert held is not None
        return self.replica.step(
            replace(
                request,
                stored=held.where(lambda entry_id: entry_id not in self.damaged),
                damaged=ranges_of(e for e in held.ids if e in self.damaged),
            )
        )

    def _read(self, verdict: Verdict) -> Run | None:
        """What can be read of the entries that are present: damaged ones are not named."""
        run = self._held.run(verdict.present)
        if run is not None:
            run = run.where(lambda entry_id: entry_id not in self.damaged)
        rng = self.world.rng
        if run is not None and self.flips_until > self.world.now:
            flipped = [replace(e, payload=e.payload + b"!") for e in run.entries()]
            run = pack(flipped, run.kind)
        if run is not None and not self.world.is_healed and rng.random() < READ_CUT:
            cut = run.ids[rng.randrange(run.count)]
            run = run.where(lambda entry_id: entry_id <= cut)
        return run

    @property
    def row_names(self) -> tuple[RowName, ...]:
        """The copies of rows that are held."""
        return self.replica.holdings.row_names

    @property
    def _held(self) -> HeldEntries:
        holdings = self.replica.holdings
        assert isinstance(holdings, HeldEntries)
        return holdings

    @property
    def copies_on_disk(self) -> list[RowName]:
        """The copies of rows that are on the disk."""
        synced = self.log[: self.synced]
        return [record.row.name for record in synced if isinstance(record, RowKept)]

    def has_copy(self, version: int) -> bool:
        """Whether a copy of the row of this version, or of a later one, is on the disk."""
        return any(name.version >= version for name in self.copies_on_disk)

    def peek(self, entry_id: int) -> bytes | None:
        """The payload of an entry that is durable and whole here."""
        entry = self._held.entries.get(entry_id)
        return None if entry is None or entry_id in self.damaged else entry.payload

    # --- the disk -----------------------------------------------------------------------------

    def _sync(self) -> None:
        """One sync at a time; what comes meanwhile goes into the next (group commit)."""
        if self._is_syncing or self.synced == len(self.log):
            return
        self._is_syncing = True
        world = self.world
        low, high = (100, 3_000) if world.is_healed else world.sync
        time = world.rng.randint(low, high)
        if self.slow_until > world.now:
            time += world.rng.randint(0, self.slow_until - world.now)
        world.after(time, self._synced, len(self.log), self._boot)

    def _synced(self, count: int, boot: int) -> None:
        if boot != self._boot:
            return
        self._is_syncing = False
        fresh = self.log[self.synced : count]
        self.synced = count
        self._report(fresh)
        self.replica.synced(count - self._base)
        self._release()
        self._sync()

    def _report(self, records: list[ReplicaRecord]) -> None:
        entries: list[Entry] = []
        for record in records:
            if isinstance(record, RunStored):
                entries.extend(record.run.entries())
                # What is written anew is whole, whatever the disk did to an earlier copy.
                self.damaged.difference_update(record.run.ids)
            elif isinstance(record, RowKept) and self.world.watcher is not None:
                self.world.watcher.copied(self.member, record.row.name)
            self._is_deleted |= isinstance(record, LedgerDeleted)
        if entries and self.world.watcher is not None:
            self.world.watcher.stored(self.member, entries)

    def _release(self) -> None:
        """Send what no longer waits for the disk."""
        count = self.synced - self._base
        due = [waiting for waiting in self._waiting if waiting[0] <= count]
        if due:
            self._waiting = [waiting for waiting in self._waiting if waiting[0] > count]
        for _, answer, event, ids, is_promise in due:
            if is_promise and isinstance(event, ReadAnswered):
                self._denied.update(event.absent)
                if event.status is Status.OK:
                    is_fenced = self._is_fence_on_disk()
                    faultless(invariants.reads_fence(self.member, is_fenced=is_fenced))
            self._check_answer(event, ids)
            self.world.note(
                self.name, "answers", type(event).__name__, getattr(event, "status", "")
            )
            answer(event)

    # --- faults -------------------------------------------------------------------------------

    def crash(self, kind: str) -> None:
        """End the process: killed, without power, or with the loss of the disk."""
        if kind == "wipe" and not self.world.may_lose_a_copy():
            kind = "power-cut"
        self.fall(kind)

    def fall(self, kind: str) -> None:
        """The same, whoever may lose what."""
        world = self.world
        if kind == "wipe":
            self.log, self.synced = [], 0
            self.wipes += 1
            self.incarnation += 1
            self._has_fenced = self._is_deleted = False
            self._denied.clear()
            self.damaged.clear()
        elif not self.is_up:
            return
        elif kind == "power-cut":
            del self.log[world.rng.randint(self.synced, len(self.log)) :]
        self.is_up = False
        self._boot += 1
        self._is_syncing = False
        self._waiting.clear()

    def restart(self) -> None:
        """Start again with what the disk holds; all of it is synced before anything is served."""
        if self.is_up:
            return
        self.is_up = True
        self._boot += 1
        fresh = self.log[self.synced :]
        self._base = self.synced = len(self.log)
        self._report(fresh)
        self.replica = replay(self.member, self.log)
        self.world.note(self.member, "starts")
        self._check_deleted()
        self._check_fence()

    def keep_stub(self) -> None:
        """Give the entries up; that the ledger is fenced stays (rule 16). Answers that wait told of
        what is given up with them.
        """
        self.log.extend(self.replica.drop().records)
        self._waiting = [(*waiting[:3], (), waiting[4]) for waiting in self._waiting]
        self.damaged.clear()
        self._check_fence()
        self._sync()

    def delete(self) -> None:
        """Give all up but the id, which is deleted for ever (rule 16a)."""
        self.log.extend(self.replica.delete().records)
        self.damaged.clear()
        self._sync()

    def corrupt(self) -> None:
        """Damage one stored copy: its checksum fails from now on."""
        durable = sorted(self._held.entries.keys() - self.damaged)
        if durable and self.world.may_lose_a_copy():
            self.damaged.add(durable[self.world.rng.randrange(len(durable))])

    # --- a bookie's own rules -------------------------------------------------------------------

    def _check_add(self, asked: SendAdd, verdict: Verdict, *, was_fenced: bool) -> None:
        stored = [record for record in verdict.records if isinstance(record, RunStored)]
        if not stored or asked.recovery:
            return
        ids = [entry_id for record in stored for entry_id in record.run.ids]
        faultless(
            invariants.fenced_rejects(self.member, was_fenced=was_fenced),
            invariants.limbo_takes_no_adds(self.member, asked.member),
            invariants.negative_sticks(self.member, ids, self._denied),
        )

    def _check_fence(self) -> None:
        """The fence is kept, or more than it: what is deleted takes nothing at all (rule 16a)."""
        reported, replica = self._has_fenced, self.replica
        is_kept = replica.is_fenced or replica.is_deleted
        faultless(invariants.fence_is_kept(self.member, reported=reported, is_kept=is_kept))

    def _check_deleted(self, *, says: bool = False) -> None:
        reported, is_kept = self._is_deleted, self.replica.is_deleted
        faultless(
            invariants.deleted_is_for_ever(
                self.member, reported=reported, is_kept=is_kept, says=says
            )
        )

    def _is_fence_on_disk(self) -> bool:
        fences = (FenceSet, EntriesDropped)
        return any(isinstance(record, fences) for record in self.log[: self.synced])

    def _check_answer(self, event: Event, ids: tuple[int, ...]) -> None:
        match event:
            case FenceAnswered(position=-1):
                pass  # a LAC, or that a row is kept
            case FenceAnswered(_, _, Status.OK):
                self._has_fenced = True
                is_kept = self._is_fence_on_disk()
                faultless(invariants.fence_is_kept(self.member, reported=True, is_kept=is_kept))
            case AddAnswered(status=Status.OK):
                if missing := sorted(set(ids) - stored_in(self.log[: self.synced])):
                    raise BookieFault(f"rule 3: {self.member} said ok, {missing} are not on disk")
            case _:
                pass
