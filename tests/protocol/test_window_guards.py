"""Guards of window and tally that no other test would miss; `make mutate` found them."""

from functools import partial

from quorumlog.protocol.messages import ReadAnswered, Status
from quorumlog.protocol.metadata import Fragment
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.tally import EntryVerdict, Tally
from quorumlog.protocol.window import Window
from tests.protocol.hands import B1, B2, B3, CODEC, run_of

STRIPED = Quorum(3, 2, 2)
MEMBERS = (B1, B2, B3)


def test_a_late_answer_to_a_run_that_left_is_not_taken_for_the_run_before_it() -> None:
    window = Window(STRIPED, last_confirmed=-1, length=0)
    pending = window.push(run_of(b"a"), usable=0b111, tick=1)

    assert window.find(0) is pending
    assert window.find(1) is None


def test_what_several_positions_gave_is_one_run_without_holes() -> None:
    """A position's part may begin and end where the range does, and lack what others store."""
    tally = Tally(STRIPED, Fragment(0, MEMBERS), first=0, last=2)
    whole = run_of(b"a", b"b", b"c")
    for position in (0, 1):
        part = whole.where(partial(STRIPED.is_member, position))
        assert part is not None
        answer = ReadAnswered(position, MEMBERS[position], 0, 2, Status.OK, part, ())
        tally.note(answer, CODEC, 7)
    assert [tally.verdict(entry_id) for entry_id in range(3)] == [EntryVerdict.PRESENT] * 3

    run = tally.runs(0, 2)

    assert list(run.ids) == [0, 1, 2]
    assert run.body == whole.body


def test_who_is_waited_for_is_silent_only_for_what_he_was_asked_before() -> None:
    window = Window(Quorum(3, 3, 2), last_confirmed=-1, length=0)
    window.push(run_of(b"a"), usable=0b111, tick=2)

    assert window.silent(2, (0, 2, 3)) == 0b011
    assert window.silent(1, (0, 0, 0)) == 0


def test_a_window_that_is_cleared_has_missed_nothing() -> None:
    window = Window(Quorum(3, 3, 2), last_confirmed=-1, length=0)
    window.missed.append((0, 0, 0))

    window.clear()

    assert window.missed == []
