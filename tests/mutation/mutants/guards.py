"""What stands in for a guard that is taken out: each makes a method that does not guard."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quorumlog.protocol import record
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import (
    AddAnswered,
    CasStatus,
    FenceAnswered,
    MetadataAnswered,
    ReadAnswered,
    SendAdd,
    SendRead,
    Status,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Bookies, Decision, Held, Known
from quorumlog.protocol.record import Run
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair, Stage
from quorumlog.protocol.replica import (
    AddAsked,
    EntriesDropped,
    FenceAsked,
    FenceSet,
    LedgerDeleted,
    ReadAsked,
    Replica,
    ReplicaRecord,
    Verdict,
)
from quorumlog.protocol.slots import Slots
from quorumlog.protocol.tally import Tally
from quorumlog.protocol.window import Window
from quorumlog.protocol.writer import LedgerWriter
from tests.mutation.mutants.hunt import stand_in


def always(value: Any) -> Any:
    """A guard that says the same whatever it is asked."""
    return lambda _original: lambda *_args, **_kwargs: value


def answers(value: Any) -> Any:
    """The same of a coroutine."""

    async def answer(*_args: object, **_named: object) -> Any:
        await asyncio.sleep(0)
        return value

    return lambda _original: answer


# --- a store that goes back ----------------------------------------------------------------------


def asked(whom: Callable[[Sequence[Held]], Sequence[Held]]) -> Any:
    """A rebuild hears of some bookies, and takes none for silent."""

    def decided(original: Any) -> Any:
        def decide(known: Known, held: Sequence[Held], bookies: Bookies) -> Decision:
            decision: Decision = original(known, whom(held), Bookies(bookies.answering))
            return decision

        return decide

    return decided


def by_version(_original: Any) -> Any:
    """A compare-and-swap looks at the version, and not at the token that made it."""
    return lambda self, base: base.version == self.row.version


# --- recovery ------------------------------------------------------------------------------------


def unfenced_read(original: Any) -> Any:
    """The bookie reads without fencing."""
    return lambda self, asked: original(self, replace(asked, fence=False))


def from_the_lac(_original: Any) -> Any:
    """Recovery begins at the LAC, though the last fragment begins later."""
    return lambda self: self._lac


@stand_in
def early_commit(original: Any, self: Recovery, chosen: dict[int, str]) -> None:
    """The ensemble that recovery chose goes into metadata at once."""
    original(self, chosen)
    made = self._changes[-1]
    self._send_update(self.metadata.with_ensemble(made.first_entry, made.bookies))


@stand_in
def read_of_the_head(original: Any, self: Recovery) -> None:
    """Recovery reads from the ensemble as it is now."""
    row = self.metadata
    self._row = replace(
        row,
        fragments=(
            *row.fragments[:-1],
            Fragment(row.last_fragment.first_entry, self._slots.members),
        ),
    )
    original(self)
    self._row = row


def eager(original: Any) -> Any:
    """Recovery takes what it sent as written back."""

    class Eager(Window):
        __slots__ = ()

        def _may_confirm(self, *_: Any) -> bool:
            return True

    def begin(self: Slots, row: LedgerMetadata, *, last_confirmed: int, **more: Any) -> None:
        original(self, row, last_confirmed=last_confirmed, **more)
        if self.is_recovery:
            self.window = Eager(row.quorum, last_confirmed=last_confirmed, length=0)

    return begin


def one_negative(_original: Any) -> Any:
    """One bookie's "no" is enough."""
    return lambda self, entry_id: self._negatives(entry_id)[0] >= 1


@stand_in
def silence_is_no(original: Any, self: Tally, answer: ReadAnswered, *rest: Any) -> Any:
    """A timeout, or any other answer that is no answer, counts as negative."""
    is_ok = answer.status is Status.OK
    return original(self, answer if is_ok else replace(answer, status=Status.NO_ENTRY), *rest)


@stand_in
def any_answer_fences(original: Any, self: Recovery, event: FenceAnswered) -> None:
    """Any answer to a fence counts for coverage, a timeout too."""
    original(self, replace(event, status=Status.OK))


@stand_in
def less_coverage(_original: Any, self: Quorum, answered: Any) -> bool:
    """Coverage lets one bookie too many be silent."""
    known = frozenset(answered)
    return all(
        sum(position not in known for position in self.write_set(entry_id)) <= self.ack_quorum
        for entry_id in range(self.ensemble_size)
    )


@stand_in
def conflict_is_ok(original: Any, self: Any, event: MetadataAnswered) -> None:
    """A compare-and-swap that met a conflict counts as done."""
    asked = self._update if isinstance(self, Recovery) else self._task and self._task.effect
    if event.status is CasStatus.CONFLICT and isinstance(asked, UpdateMetadata):
        row = replace(asked.metadata, version=asked.metadata.version + 1)
        event = MetadataAnswered(event.attempt, CasStatus.OK, row)
    original(self, event)


def unmeasured(_original: Any) -> Any:
    """Nothing was found: close with the length that is known, which is none."""
    return lambda self, *_: self._close()


# --- the writer ----------------------------------------------------------------------------------


@stand_in
def kept_acks(original: Any, self: Window, mask: int, *, first: int, is_anew: bool) -> Any:
    """Acks of what was replaced are kept."""
    del is_anew
    return original(self, mask, first=first, is_anew=False)


@stand_in
def one_ack_less(original: Any, self: Quorum, acked: int, first: int, last: int) -> Any:
    """An entry is confirmed one ack early."""
    less = Quorum(self.ensemble_size, self.write_quorum, max(1, self.ack_quorum - 1))
    return original(less, acked, first, last)


@stand_in
def change_in_the_head(
    original: Any, self: LedgerWriter, kind: Any, row: LedgerMetadata, **more: Any
) -> None:
    """The ensemble changes in the writer's head only."""
    original(self, kind, row, **more)
    if kind.value == "change":
        task, self._task = self._task, None
        self._out = [e for e in self._out if not isinstance(e, UpdateMetadata)]
        self._window.is_held = False
        self._changed(row, task)  # type: ignore[arg-type]


@stand_in
def lac_of_the_pushed(original: Any, **fields: Any) -> Any:
    """An entry carries the last id that was given out, not the last that was confirmed."""
    return original(**{**fields, "last_add_confirmed": fields["first_entry"] - 1})


@stand_in
def whoever_is_named(
    _original: Any, _: Any, leaving: Sequence[int], candidates: Sequence[str]
) -> dict[int, str]:
    """Whoever the liveness store names takes a place, members of the ensemble too."""
    return dict(zip(leaving, candidates, strict=False))


@stand_in
def change_in_recovery(original: Any, self: LedgerWriter, event: MetadataAnswered) -> None:
    """A row that is IN_RECOVERY is taken for one that is OPEN."""
    row = event.metadata
    if row is not None and row.state is State.IN_RECOVERY:
        event = replace(event, metadata=replace(row, state=State.OPEN))
    original(self, event)


@stand_in
def forgotten(_original: Any, self: Slots) -> None:
    """What a member missed is not remembered."""
    self.window.missed = []


@stand_in
def named_by_the_first(original: Any, self: Slots, *args: Any) -> Any:
    """Whenever a member came, it is sent the row of the ledger's creation."""
    effect = original(self, *args)
    return replace(effect, row=effect.row and replace(effect.row, version=1))


@stand_in
def of_one_stay(_original: Any, self: Slots, event: AddAnswered) -> bool:
    """An answer counts if its member was there when it was asked, whatever row the member had then."""
    is_same = event.member == self.members[event.position]
    return is_same and event.generation >= self._generations[event.position]


def where(*, is_recovery: bool, mutation: Any) -> Any:
    """A mutation of the slots of a recovery, or of those of a writer."""

    def mutated(original: Any) -> Any:
        mutant = mutation(original)

        def call(self: Slots, *args: Any) -> Any:
            return (mutant if self.is_recovery is is_recovery else original)(self, *args)

        return call

    return mutated


# --- metadata and bookies ------------------------------------------------------------------------


@stand_in
def fragments_beyond_the_end(
    _original: Any, self: LedgerMetadata, *, last_entry: int, length: int
) -> LedgerMetadata:
    """Fragments that begin beyond the end stay."""
    return replace(self, state=State.CLOSED, last_entry=last_entry, length=length)


@stand_in
def forgetful_replay(original: Any, me: str, records: list[ReplicaRecord], **more: Any) -> Any:
    """A restart forgets the fence."""
    kept = [record for record in records if not isinstance(record, FenceSet)]
    return original(me, kept, **more)


@stand_in
def forgotten_id(original: Any, self: Replica, record: ReplicaRecord) -> Any:
    """With the tombstone a bookie forgets all of a ledger: the next add defines its key anew."""
    if not isinstance(record, LedgerDeleted):
        return original(self, record)
    self.ledger_key = None
    self.is_fenced = self.is_limbo = False
    self.last_add_confirmed = NO_ENTRY
    self.holdings.drop()
    return None


def told_early(is_early: Callable[[Any, Verdict], bool]) -> Any:
    """Some verdicts do not wait for the disk."""

    def early(original: Any) -> Any:
        def step(self: Replica, asked: Any) -> Verdict:
            verdict: Verdict = original(self, asked)
            return replace(verdict, after=0) if is_early(asked, verdict) else verdict

        return step

    return early


def tells_of_a_fence(asked: Any, verdict: Verdict) -> bool:
    is_fencing = isinstance(asked, FenceAsked) or (isinstance(asked, ReadAsked) and asked.fence)
    return verdict.status is Status.FENCED or (is_fencing and not verdict.absent)


def stores(asked: Any, verdict: Verdict) -> bool:
    return isinstance(asked, AddAsked) and bool(verdict.records)


def repeats(asked: Any, verdict: Verdict) -> bool:
    is_reported = verdict.status in {Status.OK, Status.CONFLICT}
    return isinstance(asked, AddAsked) and is_reported and not verdict.records


@stand_in
def hasty_negative(original: Any, self: Replica, asked: ReadAsked) -> Verdict:
    """A negative waits for the fence that was asked for with it, and for no add."""
    verdict: Verdict = original(self, asked)
    after = self._fence_number if asked.fence else 0
    return verdict if asked.from_disk else replace(verdict, after=after)


def remembered(original: Any) -> Any:
    """What a repair reads back may be what the bookie remembers."""
    return lambda self, asked: original(self, replace(asked, from_disk=False))


@stand_in
def fenceless(original: Any, self: Recovery, *args: Any, **more: Any) -> None:
    """Recovery reads do not fence."""
    original(self, *args, **more)
    sent = self._out.pop()
    assert isinstance(sent, SendRead)
    self._out.append(replace(sent, fence=False, ledger_key=b""))


def unmarked(_original: Any) -> Any:
    """A new incarnation serves without phase one."""
    return lambda _self, _key, *, is_fenced: Verdict(Status.OK)  # noqa: ARG005


def unfenced_limbo(original: Any) -> Any:
    """Phase one marks and does not fence what is not OPEN."""
    return lambda self, key, *, is_fenced: original(self, key, is_fenced=False)  # noqa: ARG005


def limbo_by_name_only(_original: Any) -> Any:
    """Under its new name a bookie denies what it has not got back yet."""
    return lambda self, member: not self._is_older(member)


# --- answers and copies --------------------------------------------------------------------------


@stand_in
def unnamed_is_no(original: Any, self: Tally, answer: ReadAnswered, *rest: Any) -> Any:
    """What an answer does not name counts as absent: cut short, or damaged there."""
    if answer.status is Status.OK:
        named = set() if answer.run is None else set(answer.run.ids)
        named.update(e for low, high in answer.absent for e in range(low, high + 1))
        more = [e for e in range(answer.first, answer.last + 1) if e not in named]
        absent = tuple(sorted((*answer.absent, *((e, e) for e in more))))
        answer = replace(answer, absent=absent)
    return original(self, answer, *rest)


@stand_in
def made_anew(original: Any, self: Tally, first: int, last: int) -> Run:
    """Recovery makes entries anew, with a LAC of its own."""
    entries = [
        replace(entry, last_add_confirmed=first - 1)
        for entry in original(self, first, last).entries()
    ]
    return record.pack(entries, original(self, first, last).kind)


def whole_runs(_original: Any) -> Any:
    """Each member is sent the whole of a run, whatever it stores of it."""
    return lambda run, _quorum, _position: run


@stand_in
def normal_add(original: Any, self: FragmentRepair, run: Run) -> None:
    """Repair copies as a writer would: the fence is in its way."""
    count = len(self._out)
    original(self, run)
    for index in range(count, len(self._out)):
        effect = self._out[index]
        if isinstance(effect, SendAdd):
            self._out[index] = replace(effect, recovery=False)


@stand_in
def believed(_original: Any, self: FragmentRepair) -> None:
    """What a target took, or has by its own word, counts without being read back."""
    self._lacking = ()
    self._verified()


@stand_in
def kept_verdict(original: Any, self: FragmentRepair) -> None:
    """What was read back once counts whatever became of the row since."""
    if self._position is None:
        original(self)
    else:
        self._replace()


@stand_in
def let_go_at_once(_original: Any, self: FragmentRepair) -> None:
    """The member that lost its place is let go whether or not the target has a copy of the row."""
    self.stage = Stage.RELEASING
    self._release()


@stand_in
def unread(original: Any, self: Recovery) -> None:
    """Recovery does not read on from the LAC: what the bookies told at fencing is the end."""
    original(self)
    self._is_end_known = True


@stand_in
def entries_only(original: Any, self: Replica, record: ReplicaRecord) -> Any:
    """A record of entries that were given up says nothing of the fence."""
    made = original(self, record)
    if isinstance(record, EntriesDropped):
        self.is_fenced = False
    return made
