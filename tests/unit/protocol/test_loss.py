"""What is lost for good, and what a bookie in limbo is expected to hold (rules 15 and 31)."""

import pytest

from quorumlog.protocol import limbo
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.loss import Answers, Holding, Word, answers, holders
from quorumlog.protocol.metadata import Repair, State
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, ledger

ROW = ledger(state=State.CLOSED, last_entry=9, length=10)
NOTHING = Holding((), ())
ALL_BUT_5 = Holding(((0, 4), (6, 9)), ())


def said(*words: Word) -> Answers:
    return Answers(5, 5, tuple(zip((B1, B2, B3), words, strict=True)))


def test_what_all_who_could_have_it_deny_is_lost() -> None:
    reported = {B1: ALL_BUT_5, B2: NOTHING, B3: Holding(((0, 3),), ())}

    found = [a for a in answers(ROW, range(10), reported) if a.is_lost()]

    assert [(a.first, a.last) for a in found] == [(5, 5)]
    assert found[0].words == ((B1, Word.ABSENT), (B2, Word.ABSENT), (B3, Word.ABSENT))


@pytest.mark.parametrize("word", [Word.HELD, Word.SILENT, Word.DAMAGED])
def test_one_word_other_than_no_is_no_proof(word: Word) -> None:
    assert said(Word.ABSENT, Word.ABSENT, Word.ABSENT).is_lost()
    assert not said(Word.ABSENT, word, Word.ABSENT).is_lost()


def test_a_member_that_is_declared_gone_is_not_waited_for_and_is_believed_where_it_has_it() -> None:
    """Rule 14: an operator's word stands in for silence, never against a copy."""
    for word in (Word.SILENT, Word.DAMAGED):
        assert said(Word.ABSENT, word, Word.ABSENT).is_lost((B2,))
        assert not said(Word.SILENT, word, Word.ABSENT).is_lost((B2,))
    assert not said(Word.ABSENT, Word.HELD, Word.ABSENT).is_lost((B2,))


def test_a_copy_that_can_not_be_read_is_no_absence() -> None:
    """Architecture 2.5."""
    holding = Holding(((0, 9),), ((4, 5),))

    assert [holding.word(e) for e in (3, 4, 5, 6, 10)] == [
        Word.HELD,
        Word.DAMAGED,
        Word.DAMAGED,
        Word.HELD,
        Word.ABSENT,
    ]


def test_the_target_of_a_repair_could_have_it_too() -> None:
    """Rule 20: it was given entries before metadata named it a member."""
    two = ledger(
        fragments=((0, (B1, B2, B3)), (5, (B1, B2, B5))),
        state=State.CLOSED,
        last_entry=9,
        length=10,
    ).with_repair(Repair(0, B1, B4))

    assert set(holders(two, 4)) == {B1, B2, B3, B4}
    assert set(holders(two, 5)) == {B1, B2, B5}
    reported = {B1: NOTHING, B2: NOTHING, B3: NOTHING, B5: NOTHING, B4: Holding(((3, 3),), ())}
    lost = [(a.first, a.last) for a in answers(two, range(10), reported) if a.is_lost()]
    assert lost == [(0, 2), (4, 4), (5, 9)]


def test_who_is_kept_after_it_lost_its_place_could_have_it_too() -> None:
    """Rule 20b."""
    moved = ledger(state=State.CLOSED, last_entry=9, length=10).with_member_replaced(0, B1, B4)

    assert holders(moved, 4) == (B1, B2, B3, B4)


def test_only_the_write_set_is_asked_for_an_entry() -> None:
    striped = ledger(4, 2, 2, state=State.CLOSED, last_entry=3, length=4)

    assert holders(striped, 1) == (B2, B3)


def test_limbo_no_longer_waits_for_what_was_given_up() -> None:
    held = ((0, 2), (6, 9))

    assert limbo.lacking(ROW, 0, 0, 9, held) == ((3, 5),)
    assert limbo.lacking(ROW.given_up(3, 4, ()), 0, 0, 9, held) == ((5, 5),)
    assert limbo.lacking(ROW.given_up(3, 5, ()), 0, 0, 9, held) == ()
    striped = ledger(4, 2, 2, state=State.CLOSED, last_entry=7, length=8).given_up(3, 3, ())
    assert limbo.lacking(striped, 0, 0, 7, ()) == ((0, 0), (4, 4), (7, 7))


def test_people_are_told_who_said_what() -> None:
    assert str(said(Word.ABSENT, Word.SILENT, Word.HELD)) == (
        f"entries 5 to 5 ({B1}: absent, {B2}: silent, {B3}: held)"
    )
    assert list(answers(ROW, (), {})) == []


OPEN = ledger(fragments=((0, (B1, B2, B3)), (5, (B4, B2, B3)), (9, (B1, B2, B3))))
CLOSED = ledger(
    fragments=((0, (B1, B2, B3)), (5, (B4, B2, B3)), (9, (B1, B2, B3))),
    state=State.CLOSED,
    last_entry=20,
    length=21,
)
CLOSED_EMPTY_AT_THE_END = ledger(
    fragments=((0, (B1, B2, B3)), (5, (B4, B2, B3))), state=State.CLOSED, last_entry=4, length=5
)


def test_a_members_places_are_the_fragments_that_name_it() -> None:
    assert list(limbo.places(CLOSED, B1)) == [(0, 4), (9, 20)]
    assert list(limbo.places(CLOSED, B4)) == [(5, 8)]
    assert list(limbo.places(CLOSED, "b9@1")) == []


def test_who_is_kept_after_it_lost_a_place_is_still_named_there() -> None:
    """Rule 20b: an audit queues it, so that whoever ended before the last step is followed by another one."""
    moved = CLOSED.with_member_replaced(1, B4, B1)

    assert list(limbo.places(moved, B4)) == [(5, 8)]
    assert list(limbo.places(moved.with_leaving_released(5, B1), B4)) == []


def test_a_place_in_an_open_fragment_ends_nowhere() -> None:
    assert list(limbo.places(OPEN, B1)) == [(0, 4), (9, ID_MAX - 1)]


def test_a_place_without_entries_is_named_by_its_first() -> None:
    """A row that names a member keeps the member's ledger in limbo, whether it stores anything or not."""
    assert list(limbo.places(CLOSED_EMPTY_AT_THE_END, B4)) == [(5, 5)]


def test_only_what_has_an_end_is_expected_to_be_held() -> None:
    assert list(limbo.expected(OPEN, B1)) == [(0, 0, 4)]
    assert list(limbo.expected(OPEN, B4)) == [(0, 5, 8)]
    assert list(limbo.expected(CLOSED, B1)) == [(0, 0, 4), (0, 9, 20)]
    assert list(limbo.expected(CLOSED, B3)) == [(2, 0, 4), (2, 5, 8), (2, 9, 20)]
