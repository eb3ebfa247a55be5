"""Which parts of a ledger an incarnation of a bookie is asked for (rule 15)."""

from quorumlog.protocol import limbo
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import State
from tests.unit.protocol.hands import B1, B2, B3, B4, ledger

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
