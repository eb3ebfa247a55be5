"""Recovery, reader and writer in any order of answers, against models that are plain and slow."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    Begin,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    Effect,
    EntriesRead,
    Event,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    ReadAnswered,
    ReadMetadata,
    RecoverRequested,
    ReplaceRequested,
    SendAdd,
    SendFence,
    SendRead,
    StartTimer,
    Status,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Run, make, pack
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.writer import LedgerWriter, WriterState
from tests.unit.protocol.hands import CODEC, Machine

QUORUMS = [
    Quorum(1, 1, 1),
    Quorum(2, 2, 1),
    Quorum(3, 3, 2),
    Quorum(3, 2, 2),
    Quorum(3, 3, 1),
    Quorum(4, 3, 2),
    Quorum(5, 3, 3),
    Quorum(4, 2, 1),
]
ENTRIES = 6
WHOLE = make(
    ledger_id=7,
    first_entry=0,
    last_add_confirmed=-1,
    length_before=0,
    payloads=[b"%d" % n for n in range(ENTRIES)],
    codec=CODEC,
)
MEMBERS = tuple(f"b{n}@1" for n in range(1, 6))


def row_of(quorum: Quorum, state: State = State.OPEN) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=7,
        quorum=quorum,
        digest=DigestKind.CRC32C,
        fragments=(Fragment(0, MEMBERS[: quorum.ensemble_size]),),
        state=state,
    )


@dataclass
class Holder:
    """A bookie of a model: what it holds, and whether it answers."""

    held: dict[int, Run]
    is_dead: bool = False

    def read(self, asked: SendRead, limit: int) -> ReadAnswered:
        if self.is_dead:
            return ReadAnswered(
                asked.position, asked.member, asked.first, asked.last, Status.UNKNOWN
            )
        last = min(asked.last, ENTRIES + 2)
        ids = [e for e in sorted(self.held) if asked.first <= e <= last][:limit]
        end = ids[-1] if len(ids) == limit else asked.last
        absent = ranges_of(e for e in range(asked.first, min(end, last) + 1) if e not in self.held)
        if end > last:
            absent = (*absent, (last + 1, end))
        run = pack([self.held[e].entry(0) for e in ids], DigestKind.CRC32C) if ids else None
        return ReadAnswered(
            asked.position, asked.member, asked.first, asked.last, Status.OK, run, absent
        )

    def add(self, asked: SendAdd) -> AddAnswered:
        status = Status.UNKNOWN if self.is_dead else Status.OK
        if not self.is_dead:
            for entry in asked.run.entries():
                self.held[entry.entry_id] = pack([entry], DigestKind.CRC32C)
        run = asked.run
        return AddAnswered(
            asked.position, asked.member, asked.generation, run.first, run.last, status
        )


class World:
    """Answers a machine's requests in an order that hypothesis chooses."""

    def __init__(
        self, row: LedgerMetadata, holders: dict[str, Holder], data: st.DataObject
    ) -> None:
        self.row = row
        self.holders = holders
        self.data = data
        self.pending: list[Effect] = []
        self.reported: list[Effect] = []

    def step(self, machine: Machine, event: Event) -> None:
        for effect in machine.step(event):
            kept = (SendAdd, SendFence, SendRead, UpdateMetadata, ReadMetadata, FindBookies)
            kinds = (*kept, StartTimer)
            (self.pending if isinstance(effect, kinds) else self.reported).append(effect)
        machine.check()

    def run(self, machine: Machine) -> None:
        for _ in range(2_000):
            requests = [e for e in self.pending if not isinstance(e, StartTimer)]
            if not self.pending or any(isinstance(e, Closed | Failed) for e in self.reported):
                return
            # Timers fire late: when nothing else can happen.
            choices = requests or self.pending
            chosen = choices[self.data.draw(st.integers(0, len(choices) - 1))]
            self.pending.remove(chosen)
            self.step(machine, self.answer(chosen))
        raise AssertionError("it does not come to an end")

    def answer(self, effect: Effect) -> Event:
        match effect:
            case SendAdd():
                return self.holders[effect.member].add(effect)
            case SendRead():
                limit = self.data.draw(st.integers(1, 8), label="entries in an answer")
                return self.holders[effect.member].read(effect, limit)
            case SendFence(position, member):
                holder = self.holders[member]
                status = Status.UNKNOWN if holder.is_dead else Status.OK
                lac = -1 if holder.is_dead or not holder.held else holder.held[max(holder.held)]
                known = lac if isinstance(lac, int) else lac.last_add_confirmed
                return FenceAnswered(position, member, status, known)
            case UpdateMetadata(attempt, row):
                assert row.version == self.row.version
                self.row = replace(row, version=row.version + 1)
                self.row.check()
                return MetadataAnswered(attempt, CasStatus.OK, self.row)
            case ReadMetadata(attempt):
                return MetadataAnswered(attempt, CasStatus.OK, self.row)
            case FindBookies(attempt, _, exclude):
                live = [m for m, h in self.holders.items() if not h.is_dead and m not in exclude]
                return BookiesFound(attempt, tuple(live))
            case StartTimer(timer, tag):
                return TimerFired(timer, tag)
            case _:
                raise AssertionError(effect)


def entry_run(entry_id: int) -> Run:
    return pack([WHOLE.entry(entry_id)], DigestKind.CRC32C)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Quorum, dict[str, Holder]]:
    """Some of the entries at some of their bookies; some bookies are dead."""
    quorum = draw(st.sampled_from(QUORUMS))
    holders = {}
    for position in range(quorum.ensemble_size):
        mine = [e for e in range(ENTRIES) if quorum.is_member(position, e)]
        ids = draw(st.sets(st.sampled_from(mine))) if mine else set()
        holders[MEMBERS[position]] = Holder(
            {e: entry_run(e) for e in ids}, draw(st.integers(0, 3)) == 0
        )
    for member in MEMBERS[quorum.ensemble_size :]:
        holders[member] = Holder({})
    return quorum, holders


@settings(max_examples=250)
@given(scattered(), st.data())
def test_recovery_keeps_what_may_be_acknowledged_and_ends_where_enough_deny(
    case: tuple[Quorum, dict[str, Holder]], data: st.DataObject
) -> None:
    """I1, I16: whatever the order of answers, and whoever is dead."""
    quorum, holders = case
    before = {member: set(holder.held) for member, holder in holders.items()}
    world = World(row_of(quorum), holders, data)
    recovery = Recovery(read_entries=data.draw(st.integers(1, ENTRIES + 2), label="window"))
    world.step(recovery, RecoverRequested(world.row))
    world.run(recovery)

    def copies(entry_id: int, *, alive: bool) -> int:
        return sum(
            entry_id in before[MEMBERS[p]] and (not alive or not holders[MEMBERS[p]].is_dead)
            for p in quorum.write_set(entry_id)
        )

    (end,) = world.reported
    if isinstance(end, Closed):
        last = end.metadata.last_entry
        assert last is not None
        for entry_id in range(last + 1):
            assert copies(entry_id, alive=True), "only what was found is kept"
            members = [
                end.metadata.fragment_of(entry_id).bookies[p] for p in quorum.write_set(entry_id)
            ]
            stored = sum(entry_id in holders[m].held for m in members if m in holders)
            assert stored >= quorum.ack_quorum, "I2: on an ack quorum of the row's own members"
        following = last + 1
        if following < ENTRIES:
            assert copies(following, alive=False) < quorum.ack_quorum, "I1: it was acknowledged"
        assert end.metadata.length == sum(len(b"%d" % e) for e in range(last + 1))
    else:
        assert isinstance(end, Failed)
        assert end.code == "recovery-blocked"
        assert any(holders[m].is_dead for m in MEMBERS[: quorum.ensemble_size])
        assert world.row.state is not State.CLOSED


@settings(max_examples=200)
@given(scattered(), st.data())
def test_a_reader_gives_each_entry_that_a_living_member_has_and_names_the_first_that_none_has(
    case: tuple[Quorum, dict[str, Holder]], data: st.DataObject
) -> None:
    quorum, holders = case
    first = data.draw(st.integers(0, ENTRIES - 1), label="first")
    last = data.draw(st.integers(first, ENTRIES - 1), label="last")
    world = World(row_of(quorum), holders, data)
    reader = RangeReader(world.row, first=first, last=last, turn=data.draw(st.integers(0, 4)))
    world.step(reader, Begin())
    world.run(reader)

    readable = first
    while readable <= last and any(
        readable in holders[MEMBERS[p]].held and not holders[MEMBERS[p]].is_dead
        for p in quorum.write_set(readable)
    ):
        readable += 1
    read = [
        e
        for reported in world.reported
        if isinstance(reported, EntriesRead)
        for e in reported.run.ids
    ]
    assert read == list(range(first, readable))
    if readable <= last:
        end = world.reported[-1]
        assert isinstance(end, Failed)
        assert (end.code, end.entry_id) == ("entry-unavailable", readable)
    else:
        assert reader.is_done


@settings(max_examples=200)
@given(
    st.sampled_from(QUORUMS),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sets(st.sampled_from(MEMBERS)),
    st.data(),
)
def test_a_writer_confirms_in_order_only_what_is_on_an_ack_quorum_of_the_row(
    quorum: Quorum, batches: list[int], dead: set[str], data: st.DataObject
) -> None:
    """I2, I8: with dead members, spares, and any order of answers; then it closes where it is."""
    holders = {member: Holder({}, member in dead) for member in MEMBERS}
    row = row_of(quorum)
    world = World(row, holders, data)
    writer = LedgerWriter(row, CODEC)
    for count in batches:
        world.step(writer, AppendRequested((b"x",) * count))
        if data.draw(st.booleans(), label="a member is to be replaced"):
            members = writer.metadata.last_fragment.bookies
            leaving = members[data.draw(st.integers(0, len(members) - 1))]
            world.step(writer, ReplaceRequested(leaving))
        for _ in range(data.draw(st.integers(0, 6), label="answers before the next")):
            requests = [e for e in world.pending if not isinstance(e, StartTimer)]
            if requests:
                chosen = requests[data.draw(st.integers(0, len(requests) - 1))]
                world.pending.remove(chosen)
                world.step(writer, world.answer(chosen))
    if writer.state is WriterState.OPEN:
        world.step(writer, CloseRequested())
    world.run(writer)
    if not any(isinstance(reported, Closed) for reported in world.reported):
        world.reported = [
            reported for reported in world.reported if not isinstance(reported, Failed)
        ]
        world.run(writer)  # a handle that failed still closes its ledger

    confirmed = [reported for reported in world.reported if isinstance(reported, Confirmed)]
    ids = [e for reported in confirmed for e in range(reported.first, reported.last + 1)]
    assert ids == list(range(len(ids))), "I8"
    assert world.row.state is State.CLOSED
    assert world.row.last_entry == len(ids) - 1 == writer.last_add_confirmed
    for entry_id in ids:
        held_by = [world.row.fragment_of(entry_id).bookies[p] for p in quorum.write_set(entry_id)]
        assert sum(entry_id in holders[m].held for m in held_by) >= quorum.ack_quorum, "I2"
    if not dead:
        assert len(ids) == sum(batches), "L2: everything is confirmed"
