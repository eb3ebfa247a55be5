"""The route of a log's requests as a machine: who is asked, who takes over, who is told what."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    EntryUnavailable,
    LogClosed,
    LogReplaced,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchLog,
    NotTheOwner,
    Overloaded,
    QuorumLogError,
    WriterLost,
)
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.handover import CONFLICTS_MAX, same
from quorumlog.protocol.log.messages import (
    Abandoned,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    CloseLedger,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    DeleteLog,
    DeletionAsked,
    DrainAsked,
    EntriesDurable,
    Event,
    ForceAsked,
    Forward,
    HeadLearned,
    HealAsked,
    IsAlive,
    LedgerEnd,
    LogGone,
    LogRequest,
    MeasureLedger,
    OwnerLost,
    ReadLedger,
    ReadLog,
    RecordsAppended,
    RecoverLedger,
    Relay,
    Resolve,
    RowChanged,
    Stopped,
    Submit,
    SubmitFailed,
    SwapLog,
    Wait,
)
from quorumlog.protocol.log.route import LogRoute, RoutePhase
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from tests.unit.protocol.test_log_owner import is_naming

ME, OTHER = Writer("me", "http://me"), Writer("other", "http://other")
EMPTY = LogMetadata("log", LogSettings(Quorum(1, 1, 1), roll_bytes=0), version=1)
OTHERS = replace(EMPTY, items=(LogItem(7, 0),), version=2)
"""A log whose last ledger another process writes."""
NOW = Now(0, 0)
DONE = RecordsAppended(4, 4, 7, 4)


class Hand:
    """A route, the questions that it waits for, and what it has answered."""

    def __init__(self) -> None:
        self.machine = LogRoute("log", ME.id, settle_s=5.0)
        self.asked: list[Ask] = []
        self.answers: dict[Any, Any] = {}
        self.submitted: list[bytes] = []
        self.is_gone = False

    def hear(self, event: Event) -> None:
        for effect in self.machine.step(event, NOW):
            match effect:
                case Ask((_, _) as number, _) if is_naming(effect, self.machine.owner):
                    assert self.machine.owner is not None
                    self.hear(Answered(number, self.machine.owner.log))
                case Ask():
                    self.asked.append(effect)
                case Resolve(request, answer) | Relay(request, answer):
                    assert request not in self.answers, "one answer for each request"
                    self.answers[request] = answer
                case Submit(_, _, payloads):
                    self.submitted += payloads
                case LogGone():
                    self.is_gone = True
                case _:
                    pass
        self.machine.check()

    def append(self, *names: str, seq: int | None = None, is_forwarded: bool = False) -> None:
        calls = (replace(call(name, seq), is_forwarded=is_forwarded) for name in names)
        self.hear(AppendsAsked(tuple(zip(names, calls, strict=True))))

    def questions(self, kind: type) -> list[Any]:
        return [ask.question for ask in self.asked if isinstance(ask.question, kind)]

    def answer(self, kind: type, value: Any) -> Any:
        """Answer the oldest question of a kind; gives the question."""
        ask = next(ask for ask in self.asked if isinstance(ask.question, kind))
        self.asked.remove(ask)
        self.hear(Answered(ask.number, value))
        return ask.question

    def find_other(self) -> None:
        """Another process writes the log's last ledger."""
        self.answer(ReadLog, OTHERS)
        self.answer(ReadLedger, ledger(7, OTHER))

    def own(self, row: LogMetadata = EMPTY, ledger_id: int = 1) -> LogMetadata:
        """Take the log over, once its row is asked for."""
        self.answer(ReadLog, row)
        return self.create(ledger_id)

    def create(self, ledger_id: int) -> LogMetadata:
        """Finish a takeover that asks for its ledger."""
        self.answer(CreateLedger, ledger(ledger_id, ME))
        return self.swap()

    def swap(self) -> LogMetadata:
        """A compare-and-swap is done."""
        (swap,) = self.questions(SwapLog)
        row: LogMetadata = replace(swap.log, version=swap.log.version + 1)
        self.answer(SwapLog, row)
        return row

    def recover(self, last_entry: int, ledger_id: int = 7) -> None:
        """Close a ledger with so many records as entries."""
        self.answer(RecoverLedger, closed(ledger_id, last_entry))
        self.answer(MeasureLedger, LedgerEnd(last_entry + 1, 9, last_entry, has_producers=False))


def call(name: str, seq: int | None = None) -> Append:
    producer = None if seq is None else ProducerSeq("p", 0, seq)
    return Append.of((Record(name.encode()),), producer)


def ledger(ledger_id: int, writer: Writer | None) -> LedgerMetadata:
    fragment = Fragment(0, ("b1@1",))
    return LedgerMetadata(
        ledger_id, Quorum(1, 1, 1), DigestKind.CRC32C, (fragment,), writer=writer, log="log"
    )


def closed(ledger_id: int, last_entry: int, writer: Writer | None = OTHER) -> LedgerMetadata:
    row = ledger(ledger_id, writer)
    return replace(row, state=State.CLOSED, last_entry=last_entry, length=9)


def owning() -> tuple[Hand, LogMetadata]:
    """A route whose process has just become the owner: `first` is in flight."""
    hand = Hand()
    hand.append("first")
    return hand, hand.own()


def remote() -> Hand:
    """A route that knows another process for the owner: `first` was forwarded."""
    hand = Hand()
    hand.append("first")
    hand.find_other()
    return hand


def test_a_request_that_finds_nobody_makes_this_process_the_owner() -> None:
    hand, row = owning()

    hand.hear(EntriesDurable(1, 0))

    assert hand.machine.phase is RoutePhase.OWNING
    assert hand.answers["first"] == RecordsAppended(0, 0, 1, 0)
    assert [item.ledger_id for item in row.items] == [1]


def test_all_who_wait_share_one_search_and_keep_their_order() -> None:
    hand = Hand()
    hand.append("a")
    hand.append("b", "c")
    assert len(hand.asked) == 1

    hand.own()

    assert [b"a" in payload for payload in hand.submitted] == [True, False, False]
    assert [b"c" in payload for payload in hand.submitted] == [False, False, True]


def test_requests_go_to_the_process_that_the_row_names() -> None:
    hand = remote()
    hand.append("second")

    assert [each.call for each in hand.questions(Forward)] == [call("first"), call("second")]
    hand.answer(Forward, DONE)
    assert hand.answers == {"first": DONE}


def test_a_forwarded_request_is_not_forwarded_again() -> None:
    hand = remote()

    hand.append("theirs", is_forwarded=True)

    assert isinstance(hand.answers["theirs"], NotTheOwner)
    assert len(hand.questions(Forward)) == 1


def test_a_forwarded_request_that_waits_for_a_search_is_not_forwarded_either() -> None:
    hand = Hand()
    hand.append("theirs", is_forwarded=True)
    hand.find_other()

    assert isinstance(hand.answers["theirs"], NotTheOwner)


def test_whether_a_dead_owner_has_appended_a_request_nobody_can_say() -> None:
    hand = remote()

    hand.answer(Forward, OwnerLost("gone", sent=True))

    assert hand.answers["first"].outcome == UNKNOWN
    assert hand.machine.phase is RoutePhase.UNKNOWN
    assert hand.machine.is_idle


@pytest.mark.parametrize("sent", [True, False])
def test_a_producers_request_is_repeated_whatever_became_of_it(*, sent: bool) -> None:
    hand = Hand()
    hand.append("a", seq=0)
    hand.find_other()

    hand.answer(Forward, OwnerLost("gone", sent=sent))
    hand.find_other()
    hand.answer(IsAlive, value=False)
    hand.recover(-1)
    hand.create(8)

    assert hand.machine.phase is RoutePhase.OWNING
    assert len(hand.submitted) == 1


def test_an_owner_that_could_not_be_reached_and_lives_stays_the_owner() -> None:
    hand = remote()

    hand.answer(Forward, OwnerLost("refused", sent=False))
    hand.find_other()
    hand.answer(IsAlive, value=True)

    assert hand.machine.phase is RoutePhase.REMOTE
    assert hand.questions(Forward) == [Forward(OTHER, "log", call("first"))]


def test_who_is_told_that_the_owner_is_none_waits_before_looking_again() -> None:
    hand = remote()

    hand.answer(Forward, NotTheOwner())
    assert not hand.questions(ReadLog)
    hand.answer(Wait, None)
    hand.own(EMPTY)

    assert len(hand.submitted) == 1


def test_what_an_ended_owner_did_not_do_comes_before_what_came_later() -> None:
    hand, row = owning()
    hand.hear(SubmitFailed(1, WriterLost()))
    hand.append("second")
    hand.answer(RecoverLedger, closed(1, -1, ME))
    hand.answer(ReadLog, row)
    hand.answer(ReadLedger, closed(1, -1, ME))
    hand.submitted.clear()
    hand.recover(-1, 1)

    hand.create(2)

    assert [b"first" in payload for payload in hand.submitted] == [True, False]


def test_what_an_ended_owner_did_not_do_is_forwarded_one_at_a_time() -> None:
    hand, _ = owning()
    hand.append("second", "third")
    hand.hear(SubmitFailed(1, WriterLost()))
    hand.answer(RecoverLedger, closed(1, 0, ME))
    assert hand.answers["first"] == RecordsAppended(0, 0, 1, 0)
    hand.find_other()

    assert hand.questions(Forward) == [Forward(OTHER, "log", call("second"))]
    hand.answer(Forward, DONE)
    assert hand.questions(Forward) == [Forward(OTHER, "log", call("third"))]


def test_what_an_ended_owner_did_not_do_goes_to_no_namesake_of_its_log() -> None:
    """Its log was deleted and made again meanwhile. Source: seed 220 of the log simulation, an append that a gateway had
    been sent by another one, whose client had got its answer, deleted the log and begun anew.
    """
    hand, _ = owning()
    hand.append("mine")
    hand.append("theirs", is_forwarded=True)
    hand.hear(SubmitFailed(1, WriterLost()))
    hand.answer(RecoverLedger, closed(1, 0, ME))
    hand.answer(ReadLog, replace(OTHERS, created_at="later"))
    hand.answer(ReadLedger, ledger(7, OTHER))

    assert isinstance(hand.answers["theirs"], NotTheOwner)
    assert isinstance(hand.answers["mine"], NotTheOwner)
    assert hand.questions(Forward) == []


@pytest.mark.parametrize("is_forwarded", [True, False])
def test_an_append_whose_client_gave_up_goes_to_no_owner_any_more(*, is_forwarded: bool) -> None:
    hand, _ = owning()
    hand.append("second", is_forwarded=is_forwarded)
    hand.hear(Abandoned("second"))
    hand.hear(SubmitFailed(1, WriterLost()))
    hand.answer(RecoverLedger, closed(1, 0, ME))

    assert hand.questions(ReadLog) == [], "nobody looks for an owner of it"
    hand.append("third")
    before = len(hand.submitted)
    hand.answer(ReadLog, EMPTY)
    hand.create(9)
    assert [b"third" in payload for payload in hand.submitted[before:]] == [True]


def test_an_append_that_was_judged_by_another_log_of_the_name_is_refused() -> None:
    hand, row = owning()
    hand.hear(AppendsAsked((("other", replace(call("other"), created_at="before")),)))
    assert "other" not in hand.answers, "this owner may be of a log that is no more"
    hand.answer(ReadLog, row)

    assert isinstance(hand.answers["other"], LogReplaced)
    assert hand.answers["other"].outcome == NOT_DONE
    assert not any(b"other" in payload for payload in hand.submitted)


def test_an_owner_of_a_log_that_is_no_more_refuses_nothing_for_the_next_one() -> None:
    hand, _ = owning()
    hand.hear(AppendsAsked((("next", replace(call("next"), created_at="later")),)))
    hand.answer(ReadLog, replace(OTHERS, created_at="later"))
    hand.answer(RecoverLedger, closed(1, 0, ME))
    hand.answer(ReadLog, replace(OTHERS, created_at="later"))
    hand.answer(ReadLedger, ledger(7, OTHER))

    wanted = replace(call("next"), created_at="later")
    assert hand.questions(Forward) == [Forward(OTHER, "log", wanted)]


def test_a_forwarded_append_names_the_known_log_and_learns_of_the_next() -> None:
    hand = Hand()
    hand.append("first")
    hand.answer(ReadLog, replace(OTHERS, created_at="before"))
    hand.answer(ReadLedger, ledger(7, OTHER))
    assert hand.questions(Forward) == [
        Forward(OTHER, "log", replace(call("first"), created_at="before"))
    ]

    hand.answer(Forward, LogReplaced())
    hand.answer(Wait, None)
    hand.answer(ReadLog, replace(OTHERS, created_at="later"))
    hand.answer(ReadLedger, ledger(7, OTHER))
    assert hand.questions(Forward) == [
        Forward(OTHER, "log", replace(call("first"), created_at="later"))
    ]
    hand.hear(Abandoned("first"))
    hand.answer(Forward, LogReplaced())
    hand.answer(Wait, None)
    assert hand.questions(ReadLog) == [], "nobody waits for it any more"


def test_a_change_by_force_is_of_the_log_that_was_judged() -> None:
    hand = Hand()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed, created_at="before"))
    hand.answer(ReadLog, replace(EMPTY, created_at="later"))

    assert isinstance(hand.answers["close"], LogReplaced)
    assert hand.questions(SwapLog) == []


def test_a_change_by_force_is_of_the_log_that_it_found_first() -> None:
    hand = Hand()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed))
    hand.answer(ReadLog, EMPTY)
    hand.answer(SwapLog, RowChanged(OTHERS))
    hand.answer(Wait, None)
    hand.answer(ReadLog, replace(EMPTY, created_at="later"))

    assert isinstance(hand.answers["close"], LogReplaced)
    assert hand.questions(SwapLog) == []


def test_a_change_by_force_that_finds_a_later_log_refuses_nobody_elses_request() -> None:
    hand, row = owning()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed))
    hand.answer(ReadLog, row)
    hand.answer(RecoverLedger, closed(1, -1, ME))
    hand.append("second")
    hand.recover(-1, 1)
    later = replace(EMPTY, created_at="later")
    hand.answer(SwapLog, RowChanged(later))
    hand.answer(Wait, None)
    hand.answer(ReadLog, later)

    assert isinstance(hand.answers["close"], LogReplaced)
    hand.own(later, 9)
    assert isinstance(hand.answers["first"], NotTheOwner), "it had a place in the log before"
    assert [b"second" in payload for payload in hand.submitted] == [False, True]


def test_a_change_is_not_taken_for_done_with_the_row_of_a_later_log() -> None:
    hand = Hand()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed))
    hand.answer(ReadLog, EMPTY)
    later = replace(OTHERS, created_at="later")
    hand.answer(SwapLog, later)

    assert hand.answers == {}
    hand.answer(Wait, None)
    hand.answer(ReadLog, later)
    assert isinstance(hand.answers["close"], LogReplaced)


def test_a_request_under_way_to_another_owner_is_not_appended_here_as_well() -> None:
    hand, row = owning()
    hand.append("second", "third")
    hand.hear(SubmitFailed(1, WriterLost()))
    hand.answer(RecoverLedger, closed(1, 0, ME))
    hand.find_other()
    hand.submitted.clear()
    hand.hear(ForceAsked("open", creates=True, finish=same))
    hand.answer(ReadLog, replace(row, version=5))
    hand.recover(0, 1)
    hand.create(9)

    assert hand.submitted == []
    hand.answer(Forward, DONE)

    assert [b"third" in payload for payload in hand.submitted] == [True]


def test_a_takeover_that_another_one_wins_is_begun_anew_and_given_up_at_last() -> None:
    hand = Hand()
    hand.append("a")

    for _ in range(CONFLICTS_MAX):
        hand.answer(ReadLog, EMPTY)
        hand.answer(CreateLedger, ledger(1, ME))
        hand.answer(SwapLog, RowChanged(OTHERS))
        hand.answer(DeleteLedger, None)
        hand.answer(Wait, None)

    assert isinstance(hand.answers["a"], Overloaded)
    assert hand.machine.is_idle


def test_a_row_that_names_a_ledger_which_is_gone_is_read_again() -> None:
    hand = Hand()
    hand.append("a")
    hand.answer(ReadLog, OTHERS)

    hand.answer(ReadLedger, NoSuchLedger())
    hand.answer(Wait, None)

    assert len(hand.questions(ReadLog)) == 1


@pytest.mark.parametrize("error", [MetadataUnavailable(), NoSuchLog()])
def test_a_search_that_fails_tells_all_who_waited(error: QuorumLogError) -> None:
    hand = Hand()
    hand.append("a", "b")
    hand.hear(LogRequest("roll"))

    hand.answer(ReadLog, error)
    if not error.retryable:
        hand.answer(ReadLog, error)  # for the roll, which came after the first question

    assert all(isinstance(hand.answers[name], type(error)) for name in ("a", "b", "roll"))
    assert hand.is_gone == isinstance(error, NoSuchLog)
    hand.append("c")
    assert len(hand.questions(ReadLog)) == 1


@pytest.mark.parametrize(
    "error", [NoSuchLog(), replace(EMPTY, state=LogState.CLOSED)], ids=["deleted", "closed"]
)
def test_a_request_after_the_question_is_not_refused(error: QuorumLogError | LogMetadata) -> None:
    """The log may have been deleted and created again in between. Source: seed 6689 of the log simulation."""
    hand = Hand()
    hand.append("early")
    hand.append("late")

    hand.answer(ReadLog, error)

    assert set(hand.answers) == {"early"}
    assert not hand.is_gone, "a request waits"
    hand.own()
    assert [b"late" in payload for payload in hand.submitted] == [True]


def test_a_change_by_force_that_fails_refuses_only_its_own_request() -> None:
    hand = Hand()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed))
    hand.append("a")

    hand.answer(ReadLog, replace(EMPTY, state=LogState.CLOSED))

    assert set(hand.answers) == {"close"}
    hand.own()
    assert len(hand.submitted) == 1


def test_the_deletion_of_an_earlier_log_refuses_nothing_of_its_namesake() -> None:
    hand, row = owning()
    hand.hear(DeletionAsked("delete", created_at="before"))
    hand.append("second")

    hand.answer(ReadLog, row)

    assert set(hand.answers) == {"delete"}
    assert not hand.is_gone, "the process owns the log"
    hand.hear(EntriesDurable(1, 0))
    assert "first" in hand.answers


def test_what_befell_a_ledger_of_the_log_is_told_as_unavailable() -> None:
    hand = Hand()
    hand.append("a")
    hand.answer(ReadLog, OTHERS)
    hand.answer(ReadLedger, ledger(7, None))

    hand.answer(RecoverLedger, QuorumLogError("the key does not fit", retryable=False))

    assert isinstance(hand.answers["a"], EntryUnavailable)


def test_a_closed_log_takes_nothing() -> None:
    hand = Hand()
    hand.append("a")

    hand.answer(ReadLog, replace(EMPTY, state=LogState.CLOSED))

    assert isinstance(hand.answers["a"], LogClosed)


def test_an_open_takes_the_log_from_an_owner_that_lives() -> None:
    hand = remote()
    hand.hear(ForceAsked("open", creates=True, finish=lambda row: row.opened("me")))

    hand.answer(ReadLog, OTHERS)
    hand.recover(3)
    row = hand.create(8)

    assert hand.answers["open"] == row
    assert row.writer_token == 8
    assert hand.machine.phase is RoutePhase.OWNING


def test_a_close_refuses_what_the_owner_here_had_not_begun() -> None:
    hand, row = owning()
    hand.hear(ForceAsked("close", creates=False, finish=LogMetadata.closed))
    hand.answer(ReadLog, row)
    hand.answer(RecoverLedger, closed(1, -1, ME))
    hand.recover(-1, 1)

    hand.answer(ReadLog, hand.swap())

    assert isinstance(hand.answers["first"], LogClosed)
    assert hand.answers["first"].outcome == NOT_DONE


def test_a_log_whose_ledger_has_its_end_needs_no_healing() -> None:
    hand = Hand()
    hand.hear(HealAsked("heal", 7))

    hand.answer(ReadLog, EMPTY)

    assert hand.answers["heal"] is True


def test_a_log_whose_writer_lives_is_not_healed() -> None:
    hand = Hand()
    hand.hear(HealAsked("heal", 7))
    hand.find_other()

    hand.answer(IsAlive, value=True)

    assert hand.answers["heal"] is False
    assert hand.machine.is_idle


def test_a_log_that_is_owned_here_is_not_healed() -> None:
    hand, row = owning()
    hand.hear(HealAsked("heal", 1))
    hand.answer(ReadLog, row)

    hand.answer(ReadLedger, ledger(1, ME))

    assert hand.answers["heal"] is False


def test_a_log_whose_writer_is_dead_is_sealed_and_owned_by_nobody() -> None:
    hand = Hand()
    hand.hear(HealAsked("heal", 7))
    hand.find_other()
    hand.answer(IsAlive, value=False)
    hand.recover(3)

    assert hand.swap().end_offset == 4

    assert hand.answers["heal"] is True
    assert hand.machine.phase is RoutePhase.UNKNOWN


def test_who_writes_a_log_is_ended_before_the_log_is_deleted() -> None:
    hand, row = owning()
    hand.hear(DeletionAsked("delete"))
    hand.answer(ReadLog, row)
    assert not hand.questions(DeleteLog)

    hand.answer(RecoverLedger, closed(1, -1, ME))
    hand.answer(DeleteLog, None)
    hand.answer(RecoverLedger, closed(1, -1, ME))

    assert hand.answers["delete"] == row
    assert not hand.is_gone, "a request waits"
    hand.answer(ReadLog, NoSuchLog())
    assert isinstance(hand.answers["first"], NoSuchLog)
    assert hand.answers["first"].outcome == NOT_DONE
    assert hand.is_gone


def test_a_log_that_changed_before_its_deletion_is_fenced_again() -> None:
    hand = Hand()
    hand.hear(DeletionAsked("delete"))
    hand.answer(ReadLog, EMPTY)

    hand.answer(DeleteLog, RowChanged(OTHERS))

    assert hand.questions(RecoverLedger) == [RecoverLedger(7)]


def test_a_namesake_that_was_made_since_is_not_deleted() -> None:
    hand = Hand()
    hand.hear(DeletionAsked("delete"))
    hand.answer(ReadLog, EMPTY)

    hand.answer(DeleteLog, RowChanged(replace(OTHERS, created_at="later")))

    assert isinstance(hand.answers["delete"], NoSuchLog)
    assert not hand.asked


def test_a_process_that_ends_seals_its_log_and_takes_nothing_new() -> None:
    hand, row = owning()
    hand.hear(DrainAsked("drain"))
    hand.append("late")
    assert isinstance(hand.answers["late"], NotTheOwner)

    hand.hear(EntriesDurable(1, 0))
    hand.answer(CloseLedger, closed(1, 0, ME))
    hand.answer(ReadLog, row)
    hand.answer(ReadLedger, closed(1, 0, ME))
    hand.recover(0, 1)
    hand.swap()

    assert "first" in hand.answers
    assert hand.answers["drain"] is None
    assert hand.machine.is_idle


def test_a_process_that_ends_does_not_end_the_owner_after_it() -> None:
    hand, _ = owning()
    hand.hear(EntriesDurable(1, 0))
    hand.hear(DrainAsked("drain"))
    hand.answer(CloseLedger, WriterLost())
    hand.answer(ReadLog, OTHERS)

    hand.answer(ReadLedger, ledger(7, OTHER))

    assert hand.answers["drain"] is None
    assert not hand.asked


def test_a_roll_outlasts_the_owner_that_began_it() -> None:
    hand, _ = owning()
    hand.hear(EntriesDurable(1, 0))
    hand.hear(LogRequest("roll"))
    hand.hear(HeadLearned(LogHead("log", 9, LogState.OPEN, last_ledger=7)))
    assert hand.machine.owner is None

    hand.answer(CountBookies, 3)
    hand.answer(ReadLog, replace(OTHERS, version=9))
    hand.answer(ReadLedger, ledger(7, OTHER))

    assert hand.questions(Forward) == [Forward(OTHER, "log", None)]
    hand.answer(Forward, None)
    assert hand.answers["roll"] is None


def test_a_roll_for_another_gateway_is_refused_where_this_one_is_displaced() -> None:
    hand, _ = owning()
    hand.hear(EntriesDurable(1, 0))
    hand.hear(LogRequest("roll", is_forwarded=True))
    hand.hear(HeadLearned(LogHead("log", 9, LogState.OPEN, last_ledger=7)))

    hand.answer(CountBookies, 3)

    assert isinstance(hand.answers["roll"], NotTheOwner)


def test_a_request_whose_client_is_gone_is_not_begun() -> None:
    hand = Hand()
    hand.append("a", "b")

    hand.hear(Abandoned("a"))
    hand.own()

    assert [b"b" in payload for payload in hand.submitted] == [True]


def waits_for_a_search() -> Hand:
    hand = Hand()
    hand.append("first")
    return hand


def waits_for_a_takeover() -> Hand:
    hand = Hand()
    hand.append("first")
    hand.answer(ReadLog, OTHERS)
    hand.answer(ReadLedger, ledger(7, None))
    return hand


def waits_for_the_end_of_a_ledger() -> Hand:
    hand, _ = owning()
    hand.hear(SubmitFailed(1, WriterLost()))
    return hand


def waits_to_look_again() -> Hand:
    hand = remote()
    hand.answer(Forward, NotTheOwner())
    return hand


@pytest.mark.parametrize(
    "stage",
    [
        waits_for_a_search,
        waits_for_a_takeover,
        waits_for_the_end_of_a_ledger,
        waits_to_look_again,
        remote,
        lambda: owning()[0],
    ],
)
def test_everybody_is_answered_when_the_process_ends(stage: Callable[[], Hand]) -> None:
    hand = stage()
    hand.append("last")
    hand.hear(LogRequest("roll"))
    hand.hear(HealAsked("heal", 7))
    hand.hear(ForceAsked("open", creates=True, finish=same))
    hand.hear(DeletionAsked("delete"))
    hand.hear(DrainAsked("drain"))

    hand.hear(Stopped())

    assert set(hand.answers) == {"first", "last", "roll", "heal", "open", "delete", "drain"}
    hand.append("late")
    assert isinstance(hand.answers["late"], NotTheOwner)
