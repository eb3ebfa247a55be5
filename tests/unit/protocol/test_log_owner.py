"""The owner of a log as a machine: what it does about each event, without a ledger or a row."""

from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchLog,
    NotEnoughBookies,
    Overloaded,
    QuorumLogError,
    SequenceGap,
    UnexpectedEntryId,
    WriterLost,
)
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState, job
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    CloseLedger,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    EntriesDurable,
    Event,
    HeadLearned,
    LogRequest,
    OwnerEnded,
    Pause,
    ReadLog,
    RecordsAppended,
    RecoverLedger,
    ReleaseAsked,
    Resolve,
    Retired,
    RowChanged,
    Settled,
    Stopped,
    Submit,
    SubmitFailed,
    SubmitRefused,
    SwapLog,
    Wait,
)
from quorumlog.protocol.log.owner import IN_FLIGHT_MAX, Owner, OwnerPhase
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from tests.mutation.mutants.hunt import applied, swap

LOG = LogMetadata("log", LogSettings(Quorum(3, 3, 2), roll_bytes=0), (LogItem(1, 0),), version=2)
NOW = Now(0, 0)
SETTLE_S = 5.0


class Hand:
    """An owner, what it wants done, and what it has answered."""

    def __init__(self, log: LogMetadata = LOG) -> None:
        self.owner = Owner(log, ProducerTable(), NOW, settle_s=SETTLE_S)
        self.out: list[Any] = []
        self.answers: dict[str, Any] = {}
        self.reads_rows = True
        """Whether the row that is read before a ledger's first entries are acknowledged names the ledger, at once."""

    def hear(self, event: Event, now: Now = NOW) -> list[Any]:
        """The effects but for answers, which are kept."""
        effects = self.owner.step(event, now)
        self.owner.check()
        for effect in tuple(effects) if self.reads_rows else ():
            if isinstance(effect, Ask) and is_naming(effect, self.owner):
                effects.remove(effect)
                effects += self.owner.step(Answered(effect.number, self.owner.log), now)
        self.answers |= {e.request: e.answer for e in effects if isinstance(e, Resolve)}
        self.out = [effect for effect in effects if not isinstance(effect, Resolve)]
        return self.out

    def append(self, *names: str, **options: Any) -> list[Any]:
        return self.hear(AppendsAsked(tuple((name, call(name, **options)) for name in names)))

    def asked(self, kind: type) -> Ask:
        """The one question of a kind that was just asked."""
        (ask,) = (e for e in self.out if isinstance(e, Ask) and isinstance(e.question, kind))
        return ask

    def answer(self, kind: type, value: Any, now: Now = NOW) -> list[Any]:
        return self.hear(Answered(self.asked(kind).number, value), now)

    @property
    def offsets(self) -> dict[str, int]:
        """Of what was acknowledged."""
        return {
            name: answer.first_offset
            for name, answer in self.answers.items()
            if isinstance(answer, RecordsAppended)
        }


def is_naming(ask: Ask, owner: Owner | None) -> bool:
    """Whether an owner asks for the row because of a ledger's first entries (rule 18f)."""
    if owner is None or not isinstance(ask.question, ReadLog):
        return False
    number = ask.number[1] if isinstance(ask.number, tuple) else ask.number
    return number in (owner._name_asked, owner._settle_asked)


def call(name: str, *, seq: int | None = None, epoch: int = 0) -> Append:
    producer = None if seq is None else ProducerSeq("p", epoch, seq)
    return Append.of((Record(name.encode()),), producer)


def ledger(ledger_id: int, last_entry: int | None = None) -> LedgerMetadata:
    fragment = Fragment(0, ("b1@1", "b2@1", "b3@1"))
    row = LedgerMetadata(ledger_id, LOG.settings.quorum, DigestKind.CRC32C, (fragment,), log="log")
    if last_entry is None:
        return row
    return replace(row, state=State.CLOSED, last_entry=last_entry, length=9)


def rolling() -> Hand:
    """An owner that is to name ledger 2 as the next one; `a` is in flight."""
    hand = Hand()
    hand.append("a")
    hand.hear(LogRequest("roll"))
    hand.answer(CountBookies, 3)
    hand.answer(CreateLedger, ledger(2))
    return hand


def test_appends_of_one_step_are_one_submission_and_acknowledged_in_order() -> None:
    hand = Hand()

    (submitted,) = hand.append("a", "b", "c")

    assert isinstance(submitted, Submit)
    assert (submitted.ledger_id, submitted.first_entry, len(submitted.payloads)) == (1, 0, 3)
    hand.hear(EntriesDurable(1, 1))
    assert hand.offsets == {"a": 0, "b": 1}
    hand.hear(EntriesDurable(1, 2))
    assert hand.offsets == {"a": 0, "b": 1, "c": 2}


def begun() -> Hand:
    """Entries 0 and 1 are on disk, and the row is read."""
    hand = Hand()
    hand.reads_rows = False
    hand.append("a", "b", "c")
    hand.hear(EntriesDurable(1, 0))
    asked = hand.out
    assert hand.hear(EntriesDurable(1, 1)) == [], "it is read once"
    hand.out = asked
    return hand


def test_the_first_entries_of_a_ledger_wait_until_the_row_is_read_to_name_it() -> None:
    """Rule 18f. The others wait for nothing."""
    hand = begun()
    hand.answer(ReadLog, MetadataUnavailable())
    hand.answer(Wait, None)
    assert hand.answers == {}

    hand.answer(ReadLog, LOG)
    assert hand.offsets == {"a": 0, "b": 1}
    assert hand.hear(EntriesDurable(1, 2)) == []
    assert hand.offsets == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("row", [replace(LOG, items=()), NoSuchLog()], ids=["unnamed", "gone"])
def test_entries_of_an_unnamed_ledger_are_not_acked(row: LogMetadata | QuorumLogError) -> None:
    """Rule 18f: neither when they are on disk, nor when the ledger's end covers them."""
    hand = begun()

    ended, _ = hand.answer(ReadLog, row)
    assert isinstance(ended, OwnerEnded)
    hand.answer(RecoverLedger, ledger(1, last_entry=1))
    hand.answer(ReadLog, row)

    assert {name: answer.outcome for name, answer in hand.answers.items()} == dict.fromkeys(
        "abc", UNKNOWN
    )
    assert hand.owner.phase is OwnerPhase.SETTLED


def test_an_end_that_covers_nothing_in_flight_needs_no_look_at_the_row() -> None:
    hand = Hand()
    hand.append("a")
    hand.hear(Retired())

    (settled,) = hand.answer(RecoverLedger, ledger(1, last_entry=-1))

    assert isinstance(settled, Settled)
    assert [name for name, _ in settled.again] == ["a"]


def test_what_was_not_taken_is_as_if_it_had_not_come() -> None:
    hand = Hand()
    hand.append("a", seq=0)
    hand.append("b", seq=1)

    hand.hear(SubmitRefused(1, 1, 1, Overloaded()))
    (again,) = hand.append("c", seq=1)

    assert isinstance(hand.answers["b"], Overloaded)
    assert again.first_entry == 1
    hand.hear(EntriesDurable(1, 1))
    assert hand.offsets == {"a": 0, "c": 1}


def test_entries_that_were_refused_together_are_begun_one_by_one() -> None:
    """Rule 24a: there may be room for some of them."""
    hand = Hand()
    (submitted,) = hand.append("a", "b", "c")

    (again,) = hand.hear(SubmitRefused(1, 0, 3, Overloaded()))
    hand.hear(SubmitRefused(1, 1, 1, Overloaded(), again.number))
    hand.hear(EntriesDurable(1, 0))
    (later,) = hand.append("d")

    assert again == replace(submitted, number=1, one_by_one=True)
    assert hand.offsets == {"a": 0}
    assert {type(hand.answers[name]) for name in "bc"} == {Overloaded}
    assert (later.first_entry, later.number) == (1, 2)


def test_refusals_of_what_came_after_a_refused_entry_end_no_owner() -> None:
    """Rule 24a: the ledger finds that an entry is missing before these, which is the owner's doing."""
    hand = Hand()
    hand.append("a")
    hand.append("b")

    hand.hear(SubmitRefused(1, 0, 1, Overloaded()))
    (again,) = hand.append("c")
    hand.hear(SubmitRefused(1, 1, 1, UnexpectedEntryId()))

    assert not hand.out
    assert {type(hand.answers[name]) for name in "ab"} == {Overloaded}
    assert (again.first_entry, hand.owner.phase) == (0, OwnerPhase.LIVE)


def test_a_refused_request_is_handed_on_with_its_repeats() -> None:
    """Rule 24a: by a ledger that is over."""
    hand = Hand()
    hand.hear(AppendsAsked((("first", call("a", seq=0)), ("repeat", call("a", seq=0)))))

    (_, settled) = hand.hear(SubmitRefused(1, 0, 1, WriterLost()))

    assert [name for name, _ in settled.again] == ["first", "repeat"]


def test_a_new_epoch_that_was_not_taken_leaves_the_old_one() -> None:
    hand = Hand()
    hand.append("a", seq=0)
    hand.hear(EntriesDurable(1, 0))
    hand.append("b", seq=0, epoch=1)

    hand.hear(SubmitRefused(1, 1, 1, Overloaded()))
    hand.append("c", seq=1)
    hand.hear(EntriesDurable(1, 1))

    assert hand.offsets == {"a": 0, "c": 1}


def test_a_first_request_that_was_not_taken_leaves_its_producer_unknown() -> None:
    hand = Hand()
    hand.append("a", seq=0)

    hand.hear(SubmitRefused(1, 0, 1, Overloaded()))
    hand.append("b", seq=1)
    hand.answer(ReadLog, LOG)

    assert isinstance(hand.answers["b"], SequenceGap)


def test_a_ledger_that_is_over_takes_nothing_and_loses_nothing() -> None:
    hand = Hand()
    hand.append("a")
    hand.append("b", "c")

    hand.hear(SubmitRefused(1, 1, 2, WriterLost()))

    assert any(isinstance(effect, OwnerEnded) for effect in hand.out)
    (settled,) = hand.answer(RecoverLedger, ledger(1, 0))
    assert [name for name, _ in settled.again] == ["b", "c"]
    assert hand.offsets == {"a": 0}


def test_the_end_of_the_ledger_says_what_was_appended() -> None:
    hand = Hand()
    hand.append("a", "b", "c")

    hand.hear(SubmitFailed(1, WriterLost()))
    hand.append("late")
    # Nothing is acknowledged any more but by the end.
    hand.hear(EntriesDurable(1, 2))
    assert hand.answers == {}


def test_what_is_beyond_the_end_is_appended_again_before_what_came_later() -> None:
    hand = Hand()
    hand.append("a", "b", "c")
    hand.hear(SubmitFailed(1, WriterLost()))

    (settled,) = hand.answer(RecoverLedger, ledger(1, 0))

    assert hand.offsets == {"a": 0}
    assert [name for name, _ in settled.again] == ["b", "c"]


def test_a_repeat_in_flight_gets_its_answer_once_the_owner_has_looked() -> None:
    hand = Hand()
    hand.append("a", seq=0)
    hand.hear(AppendsAsked((("again", call("a", seq=0)),)))

    hand.hear(EntriesDurable(1, 0))
    assert "again" not in hand.answers
    hand.answer(ReadLog, LOG)

    assert hand.answers["again"] == replace(hand.answers["a"], is_duplicate=True, highest_seq=0)


def test_a_displaced_owner_refuses_nobody_by_what_it_remembers() -> None:
    hand = Hand()
    hand.append("gap", seq=7)

    out = hand.answer(ReadLog, replace(LOG, version=4, items=(LogItem(1, 0, 4), LogItem(9, 5))))

    assert hand.answers == {}
    assert [name for name, _ in out[-1].again] == ["gap"]


def test_who_can_not_be_checked_is_told_so_and_a_repeat_has_an_unknown_outcome() -> None:
    hand = Hand()
    hand.append("a", seq=0)
    hand.hear(EntriesDurable(1, 0))
    hand.hear(AppendsAsked((("again", call("a", seq=0)), ("gap", call("b", seq=7)))))

    hand.answer(ReadLog, MetadataUnavailable(outcome=NOT_DONE))

    assert hand.answers["again"].outcome == UNKNOWN
    assert hand.answers["gap"].outcome == NOT_DONE


@pytest.mark.parametrize("error", [WriterLost(retryable=True), NoSuchLedger()])
def test_a_request_whose_end_stays_unknown_is_unknown(error: QuorumLogError) -> None:
    hand = Hand()
    hand.append("a")
    hand.hear(SubmitFailed(1, WriterLost()))
    late = Now(0, 0, monotonic_s=SETTLE_S + 1)

    if error.retryable:
        hand.answer(RecoverLedger, error)
        assert hand.asked(Wait).question == Wait(Pause.SETTLE)
        hand.answer(Wait, None)
    out = hand.answer(RecoverLedger, error, late)

    assert hand.answers["a"].outcome == UNKNOWN
    assert out == [Settled(())]


def test_a_process_that_ends_refuses_who_waited_and_leaves_the_rest_unknown() -> None:
    hand = Hand()
    hand.append("a")
    hand.hear(ReleaseAsked())
    hand.append("b")
    hand.hear(LogRequest("roll"))

    hand.hear(Stopped())

    assert hand.answers["a"].outcome == UNKNOWN
    assert hand.answers["b"].outcome == NOT_DONE
    assert isinstance(hand.answers["roll"], WriterLost)


def test_a_roll_names_the_next_ledger_drains_closes_and_goes_on() -> None:
    hand = rolling()
    named = hand.asked(SwapLog).question
    assert isinstance(named, SwapLog)
    assert [item.ledger_id for item in named.log.items] == [1, 2]
    hand.answer(SwapLog, replace(named.log, version=3))

    assert hand.append("b") == [], "it waits for the next ledger"
    hand.hear(EntriesDurable(1, 0))
    hand.answer(CloseLedger, ledger(1, 0))
    swapped = hand.asked(SwapLog).question
    assert isinstance(swapped, SwapLog)
    out = hand.answer(SwapLog, replace(swapped.log, version=4))

    (submitted,) = (effect for effect in out if isinstance(effect, Submit))
    assert (submitted.ledger_id, submitted.first_entry) == (2, 0)
    assert hand.answers["roll"] is None
    hand.hear(EntriesDurable(2, 0))
    assert hand.offsets == {"a": 0, "b": 1}


def test_a_roll_goes_on_from_a_row_that_was_truncated_meanwhile() -> None:
    hand = rolling()

    hand.answer(SwapLog, RowChanged(replace(LOG, version=7)))

    again = hand.asked(SwapLog).question
    assert isinstance(again, SwapLog)
    assert again.log.version == 7


def test_a_roll_that_loses_the_log_deletes_what_it_made_and_says_so() -> None:
    hand = rolling()
    other = replace(LOG, version=7, items=(LogItem(1, 0, 0), LogItem(9, 1)))

    hand.answer(SwapLog, RowChanged(other))

    assert hand.asked(DeleteLedger).question == DeleteLedger(2)
    assert hand.answers["roll"] is NOT_OWNER


def test_a_roll_whose_late_answer_shows_a_closed_log_ends_its_owner() -> None:
    hand = rolling()
    named = hand.asked(SwapLog).question
    assert isinstance(named, SwapLog)
    hand.answer(SwapLog, named.log)
    hand.append("b")
    hand.hear(EntriesDurable(1, 0))
    hand.answer(CloseLedger, ledger(1, 0))
    items = (LogItem(1, 0, 0), LogItem(2, 1, 0))
    ended = replace(LOG, version=9, items=items, state=LogState.CLOSED, next_offset=1)

    out = hand.answer(SwapLog, ended)

    assert not [effect for effect in out if isinstance(effect, Submit)]
    assert hand.owner.is_ended
    assert hand.answers["roll"] is NOT_OWNER


def test_a_guard_of_late_answers_that_is_taken_out_is_missed() -> None:
    names_it = swap(job, "is_written", lambda log, new: log.last_item.ledger_id == new).guard(
        "an owner goes on in a log that was closed since",
        "rule 22",
        test_a_roll_whose_late_answer_shows_a_closed_log_ends_its_owner,
    )

    with applied(names_it), pytest.raises(AssertionError):
        names_it.claim()


def test_too_few_bookies_leave_the_log_as_it_was() -> None:
    hand = Hand()
    hand.append("a")
    hand.hear(LogRequest("roll"))

    assert hand.answer(CountBookies, 2) == []
    assert isinstance(hand.answers["roll"], NotEnoughBookies)
    assert not hand.owner.is_ended


def test_a_head_above_what_is_known_that_names_another_ledger_ends_the_owner() -> None:
    hand = Hand()
    hand.append("a")

    assert hand.hear(HeadLearned(LogHead("log", 2, LOG.state, last_ledger=9))) == []
    assert hand.hear(HeadLearned(LogHead("log", 3, LOG.state, last_ledger=1))) == []
    hand.hear(HeadLearned(LogHead("log", 4, LOG.state, last_ledger=9)))

    assert isinstance(hand.out[0], OwnerEnded)


def test_a_released_log_is_closed_and_nothing_is_lost() -> None:
    hand = Hand()
    hand.append("a")
    hand.hear(ReleaseAsked())
    hand.append("b")
    hand.hear(EntriesDurable(1, 0))

    (settled,) = hand.answer(CloseLedger, ledger(1, 0))

    assert [name for name, _ in settled.again] == ["b"]
    assert hand.offsets == {"a": 0}


def test_a_log_that_is_deleted_ends_its_owner() -> None:
    hand = Hand()
    hand.hear(LogRequest("roll"))

    out = hand.answer(ReadLog, NoSuchLog())

    assert isinstance(hand.answers["roll"], NoSuchLog)
    assert out[-1] == Settled(())


def test_more_than_an_owner_takes_is_refused_but_not_what_has_waited_before() -> None:
    hand = Hand()
    many = tuple((f"r{n}", call("x")) for n in range(IN_FLIGHT_MAX))
    hand.hear(AppendsAsked(many))

    hand.append("one more")
    hand.hear(AppendsAsked((("again", call("y")),), are_again=True))

    assert isinstance(hand.answers["one more"], Overloaded)
    assert "again" not in hand.answers
    hand.hear(Retired())
    hand.answer(RecoverLedger, ledger(1, IN_FLIGHT_MAX))
    assert hand.offsets["again"] == IN_FLIGHT_MAX


def test_a_roll_by_itself_that_failed_waits_for_a_pause_and_the_next_append() -> None:
    hand = Hand(replace(LOG, settings=replace(LOG.settings, roll_entries=1)))
    hand.append("a")
    hand.answer(CountBookies, 2)
    pause = hand.asked(Wait)
    assert pause.question == Wait(Pause.ROLL)

    assert not any(isinstance(effect, Ask) for effect in hand.append("b"))
    assert hand.hear(Answered(pause.number, None)) == []
    hand.append("c")

    assert hand.asked(CountBookies).question == CountBookies()
