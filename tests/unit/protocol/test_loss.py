"""When nobody can serve an entry any more, and who is expected to have it then: rule 31."""

import pytest

from quorumlog.protocol import limbo
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
