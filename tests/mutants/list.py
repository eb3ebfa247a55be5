"""The mutants: one for each counterexample and rule whose part stands (reliability 1.3, rules.md)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol import limbo, placement, record, recovery
from quorumlog.protocol.messages import (
    CasStatus,
    FenceAnswered,
    MetadataAnswered,
    ReadAnswered,
    Status,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.replica import LedgerFenced, Record, Replica, Verdict
from quorumlog.protocol.tally import Tally
from quorumlog.protocol.window import Window
from quorumlog.protocol.writer import Writer
from tests.explore.scope import Scope
from tests.mutants.hunt import Mutant, Patch
from tests.sim import bookie as sim_bookie


def always(value: Any) -> Any:
    """A guard that says the same whatever it is asked."""
    return lambda _original: lambda *_args, **_kwargs: value


# --- recovery ------------------------------------------------------------------------------------


def unfenced_read(original: Any) -> Any:
    """The bookie reads without fencing."""
    return lambda self, asked: original(self, replace(asked, fence=False))


def from_the_lac(_original: Any) -> Any:
    """Recovery begins at the LAC, though the last fragment begins later."""
    return lambda self: self._lac


def early_commit(original: Any) -> Any:
    """The ensemble that recovery chose goes into metadata at once."""

    def change(self: Recovery, chosen: dict[int, str]) -> None:
        original(self, chosen)
        made = self._changes[-1]
        self._send_update(self.metadata.with_ensemble(made.first_entry, made.bookies))

    return change


def read_of_the_head(original: Any) -> Any:
    """Recovery reads from the ensemble as it is now."""

    def read(self: Recovery) -> None:
        row = self.metadata
        self._row = replace(
            row,
            fragments=(
                *row.fragments[:-1],
                Fragment(row.last_fragment.first_entry, self._head()),
            ),
        )
        original(self)
        self._row = row

    return read


def eager(window: Any) -> Any:
    """Recovery takes what it sent as written back."""
    return type("Eager", (window,), {"__slots__": (), "_may_confirm": lambda *_: True})


def one_negative(_original: Any) -> Any:
    """One bookie's "no" is enough."""
    return lambda self, entry_id: self._negatives(entry_id)[0] >= 1


def silence_is_no(original: Any) -> Any:
    """A timeout, or any other answer that is no answer, counts as negative."""

    def note(self: Tally, answer: ReadAnswered, *rest: Any) -> Any:
        is_ok = answer.status is Status.OK
        return original(self, answer if is_ok else replace(answer, status=Status.NO_ENTRY), *rest)

    return note


def any_answer_fences(original: Any) -> Any:
    """Any answer to a fence counts for coverage, a timeout too."""

    def answered(self: Recovery, event: FenceAnswered) -> None:
        original(self, replace(event, status=Status.OK))

    return answered


def less_coverage(_original: Any) -> Any:
    """Coverage lets one bookie too many be silent."""

    def covered(self: Quorum, answered: Any) -> bool:
        known = frozenset(answered)
        return all(
            sum(position not in known for position in self.write_set(entry_id)) <= self.ack_quorum
            for entry_id in range(self.ensemble_size)
        )

    return covered


def conflict_is_ok(original: Any) -> Any:
    """A compare-and-swap that met a conflict counts as done."""

    def answered(self: Any, event: MetadataAnswered) -> None:
        asked = self._update if isinstance(self, Recovery) else self._task and self._task.effect
        if event.status is CasStatus.CONFLICT and isinstance(asked, UpdateMetadata):
            row = replace(asked.metadata, version=asked.metadata.version + 1)
            event = MetadataAnswered(event.attempt, CasStatus.OK, row)
        original(self, event)

    return answered


def unmeasured(_original: Any) -> Any:
    """Nothing was found: close with the length that is known, which is none."""
    return lambda self, *_: self._close()


# --- the writer ----------------------------------------------------------------------------------


def kept_acks(original: Any) -> Any:
    """Acks of what was replaced are kept."""

    def ask(self: Window, mask: int, *, first: int, is_anew: bool) -> Any:
        del is_anew
        return original(self, mask, first=first, is_anew=False)

    return ask


def one_ack_less(original: Any) -> Any:
    """An entry is confirmed one ack early."""

    def has(self: Quorum, acked: int, first: int, last: int) -> Any:
        less = Quorum(self.ensemble_size, self.write_quorum, max(1, self.ack_quorum - 1))
        return original(less, acked, first, last)

    return has


def change_in_the_head(original: Any) -> Any:
    """The ensemble changes in the writer's head only."""

    def update(self: Writer, kind: Any, row: LedgerMetadata, **more: Any) -> None:
        original(self, kind, row, **more)
        if kind.value == "change":
            task, self._task = self._task, None
            self._out = [e for e in self._out if not isinstance(e, UpdateMetadata)]
            self._window.is_held = False
            self._changed(row, task)  # type: ignore[arg-type]

    return update


def lac_of_the_pushed(original: Any) -> Any:
    """An entry carries the last id that was given out, not the last that was confirmed."""

    def make(**fields: Any) -> Any:
        return original(**{**fields, "last_add_confirmed": fields["first_entry"] - 1})

    return make


def whoever_is_named(_original: Any) -> Any:
    """Whoever the liveness store names takes a place, members of the ensemble too."""

    def replacements(_: Any, leaving: Sequence[int], candidates: Sequence[str]) -> dict[int, str]:
        return dict(zip(leaving, candidates, strict=False))

    return replacements


def change_in_recovery(original: Any) -> Any:
    """A row that is IN_RECOVERY is taken for one that is OPEN."""

    def answered(self: Writer, event: MetadataAnswered) -> None:
        row = event.metadata
        if row is not None and row.state is State.IN_RECOVERY:
            event = replace(event, metadata=replace(row, state=State.OPEN))
        original(self, event)

    return answered


def forgotten(_original: Any) -> Any:
    """What a member missed is not remembered."""

    def take(self: Writer | Recovery) -> None:
        self._window.missed = []

    return take


# --- metadata and bookies ------------------------------------------------------------------------


def fragments_beyond_the_end(_original: Any) -> Any:
    """Fragments that begin beyond the end stay."""

    def closed(self: LedgerMetadata, *, last_entry: int, length: int) -> LedgerMetadata:
        return replace(self, state=State.CLOSED, last_entry=last_entry, length=length)

    return closed


def forgetful_replay(original: Any) -> Any:
    """A restart forgets the fence."""

    def replay(me: str, records: list[Record], **more: Any) -> Any:
        kept = [record for record in records if not isinstance(record, LedgerFenced)]
        return original(me, kept, **more)

    return replay


def unmarked(_original: Any) -> Any:
    """A new incarnation serves without phase one."""
    return lambda _self, _key, *, is_fenced: Verdict(Status.OK)  # noqa: ARG005


def unfenced_limbo(original: Any) -> Any:
    """Phase one marks and does not fence what is not OPEN."""
    return lambda self, key, *, is_fenced: original(self, key, is_fenced=False)  # noqa: ARG005


def limbo_by_name_only(_original: Any) -> Any:
    """Under its new name a bookie denies what it has not got back yet."""
    return lambda self, member: not self._is_older(member)


ONE: Final = Scope("one entry, one recoverer")
SPARE: Final = Scope("one entry, a spare, one timeout", recoverers=0, spares=1, timeouts=1)
CRASH: Final = Scope("one entry, one crash with full loss", crashes=1)

MUTANTS: Final = (
    Mutant(
        "recovery reads do not fence",
        "X1, I15",
        (Patch(Recovery, "_reads_fence", always(False)),),
        ONE,
    ),
    Mutant(
        "bookies do not fence on a recovery read",
        "X1, I15",
        (Patch(Replica, "_read", unfenced_read),),
        ONE,
    ),
    Mutant(
        "recovery starts below the last fragment",
        "X2, I24",
        (Patch(Recovery, "_start", from_the_lac),),
    ),
    Mutant(
        "an older incarnation takes normal adds",
        "X3, rule 15",
        (Patch(Replica, "_is_limbo_in_the_way", always(False)),),
        CRASH,
    ),
    Mutant(
        "a restart forgets the fence", "X3, I13", (Patch(sim_bookie, "replay", forgetful_replay),)
    ),
    Mutant(
        "an older incarnation says no",
        "X4, I27, rule 15",
        (Patch(Replica, "_may_say_no", always(True)),),
        CRASH,
    ),
    Mutant(
        "incarnations are not told apart",
        "X3, X4, X18",
        (Patch(Replica, "_is_older", always(False)),),
        CRASH,
    ),
    Mutant(
        "a new incarnation serves before phase one",
        "I27, rule 31, BP-46",
        (Patch(Replica, "enter_limbo", unmarked),),
    ),
    Mutant(
        "phase one does not fence",
        "I27, rule 31, BP-46",
        (Patch(Replica, "enter_limbo", unfenced_limbo),),
    ),
    Mutant(
        "a new incarnation denies what it has not got back",
        "I27, rule 15",
        (Patch(Replica, "_may_say_no", limbo_by_name_only),),
    ),
    Mutant(
        "limbo ends before the copies are there",
        "I27, rule 15",
        (Patch(limbo, "lacking", always(())),),
    ),
    Mutant(
        "limbo ends while an older incarnation is named",
        "I27, rule 15",
        (Patch(limbo, "older_members", always([])),),
    ),
    Mutant(
        "recovery commits its ensemble early",
        "X5, I24",
        (Patch(Recovery, "_change", early_commit),),
    ),
    Mutant(
        "recovery reads from the ensemble as it is now",
        "X6",
        (Patch(Recovery, "_read_window", read_of_the_head),),
    ),
    Mutant(
        "answers of replaced members count",
        "X7, I18, rule 7",
        (Patch(Writer, "_is_current", always(True)),),
        SPARE,
    ),
    Mutant(
        "acks of replaced members are kept",
        "BK#3005, rule 7",
        (Patch(Window, "ask", kept_acks),),
        SPARE,
    ),
    Mutant(
        "the ensemble changes without compare-and-swap",
        "X8, BK#1591",
        (Patch(Writer, "_update", change_in_the_head),),
        SPARE,
    ),
    Mutant(
        "entries are confirmed while a change is under way",
        "X8, X9, I19, rule 6",
        (Patch(Writer, "_uncounted", always(0)),),
        SPARE,
    ),
    Mutant(
        "recovery closes before all is written back",
        "X10",
        (Patch(recovery, "Window", eager),),
        ONE,
    ),
    Mutant("one negative is enough", "X11, I16", (Patch(Tally, "_is_absent", one_negative),), ONE),
    Mutant(
        "silence counts as negative",
        "X11, I16",
        (Patch(Tally, "note", silence_is_no),),
        Scope("one entry, one recoverer, one timeout", timeouts=1),
    ),
    Mutant(
        "any answer counts for coverage",
        "X11, I14, rule 13",
        (Patch(Recovery, "_fence_answered", any_answer_fences),),
    ),
    Mutant("coverage is one bookie short", "I14", (Patch(Quorum, "is_covered", less_coverage),)),
    Mutant(
        "the fence is not checked on add",
        "X12, I12",
        (Patch(Replica, "_is_fence_in_the_way", always(False)),),
        ONE,
    ),
    Mutant(
        "recovery takes a conflict for success",
        "X13, I4",
        (Patch(Recovery, "_metadata_answered", conflict_is_ok),),
    ),
    Mutant(
        "the writer takes a conflict for success",
        "X13, rule 6",
        (Patch(Writer, "_metadata_answered", conflict_is_ok),),
    ),
    Mutant(
        "an ack fewer confirms", "X14, I2", (Patch(Quorum, "has_ack_quorum", one_ack_less),), ONE
    ),
    Mutant(
        "a fence is told before it is on disk",
        "X20, I13, rule 3",
        (Patch(Replica, "_after_fence", always(0)),),
    ),
    Mutant(
        "an add is ok before it is on disk", "rule 3", (Patch(Replica, "_after_add", always(0)),)
    ),
    Mutant(
        "a repeated add is ok before it is on disk",
        "rule 3",
        (Patch(Replica, "_after_duplicate", always(0)),),
    ),
    Mutant(
        "a negative does not wait for the adds before it",
        "rule 3, I17",
        (Patch(Replica, "_after_negative", always(0)),),
        is_equivalent="a recovery read waits for its fence, which follows the adds in the same log",
    ),
    Mutant(
        "entries with a bad code are taken",
        "overview 1.4",
        (Patch(Tally, "_invalid", always(set())),),
    ),
    Mutant(
        "entries carry the last id given out as LAC",
        "I10",
        (Patch(record, "make", lac_of_the_pushed),),
        ONE,
    ),
    Mutant(
        "whoever is named takes a place",
        "I22, I31",
        (Patch(placement, "replacements", whoever_is_named),),
    ),
    Mutant(
        "IN_RECOVERY is taken for OPEN",
        "I24, rule 10",
        (Patch(Writer, "_metadata_answered", change_in_recovery),),
    ),
    Mutant(
        "fragments beyond the end stay",
        "I23",
        (Patch(LedgerMetadata, "closed", fragments_beyond_the_end),),
        is_equivalent="no fragment begins beyond the end that a writer or a recovery finds: a second belt",
    ),
    Mutant(
        "the length is not measured", "reference 2.4.3", (Patch(Recovery, "_measure", unmeasured),)
    ),
    Mutant(
        "late acks count in recovery",
        "I18, rule 7",
        (Patch(Recovery, "_is_current", always(True)),),
    ),
    Mutant(
        "a member that refused is used again",
        "rule 15",
        (Patch(Writer, "_may_come_back", always(True)),),
        is_equivalent="it refuses again, once a second: messages, no harm",
    ),
    Mutant(
        "a change of rows during recovery does not matter",
        "reference 2.4.8",
        (Patch(Recovery, "_is_same_ledger", always(True)),),
        is_equivalent="only an operator who declares a member lost changes such a row: tests/protocol",
    ),
    Mutant(
        "a repair fills a target that metadata does not name",
        "rule 20",
        (Patch(FragmentRepair, "_is_marked", always(True)),),
    ),
    Mutant(
        "an open fragment is repaired",
        "I25",
        (Patch(LedgerMetadata, "is_closed_fragment", always(True)),),
    ),
    Mutant(
        "a repair replaces before the copies are there",
        "I25",
        (Patch(FragmentRepair, "_send", always(None)),),
    ),
    Mutant(
        "the writer forgets what a member missed",
        "rule 8",
        (Patch(Writer, "_take_missed", forgotten),),
    ),
    Mutant(
        "a recovery forgets what a member missed",
        "rule 12",
        (Patch(Recovery, "_take_missed", forgotten),),
    ),
)
