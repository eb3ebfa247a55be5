"""When the database's clock may decide what is deleted for good (rule 26c)."""

from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S, STEADY_S, DatabaseClock

START = 1_800_000_000.0
DAY_S = 24 * 3600.0
SLACK_S = 5.0
"""What an answer may spend on its way."""


class Heard:
    """A clock that is heard: `wall_s` and `database_s` are by how much these clocks are wrong."""

    def __init__(self) -> None:
        self.clock = DatabaseClock()
        self.at_s = 100.0
        self.wall_s = self.database_s = 0.0

    def hear(self, after_s: float = SLACK_S) -> str:
        self.at_s += after_s
        true_ms = (START + self.at_s) * 1000
        return self.clock.hear(
            true_ms + self.database_s * 1000,
            wall_ms=true_ms + self.wall_s * 1000,
            monotonic_s=self.at_s,
        )

    @property
    def wrong_s(self) -> float:
        """By how much the time that is told is wrong."""
        reported = self.clock.now_ms(self.at_s)
        assert reported is not None
        return reported / 1000 - START - self.at_s


def test_nothing_is_old_before_a_clock_was_heard_that_agrees_with_this_machines() -> None:
    heard = Heard()
    assert heard.clock.doubt
    heard.database_s = 30 * DAY_S
    assert heard.hear()
    assert heard.hear(10 * STEADY_S), "as a process that starts while the clock is wrong"

    heard.database_s = 0

    assert not heard.hear()


def test_a_clock_that_jumps_is_doubted_until_it_is_back() -> None:
    heard = Heard()
    heard.hear()
    heard.database_s = heard.wall_s = 30 * DAY_S  # of one machine

    assert "jumped by +2592000 s" in heard.hear()
    assert abs(heard.wrong_s) < 1
    heard.database_s = heard.wall_s = 0

    assert not heard.hear()


def test_a_clock_that_jumped_and_goes_on_beside_this_machines_is_trusted_after_a_while() -> None:
    heard = Heard()
    heard.hear()
    heard.database_s = heard.wall_s = 3600

    assert heard.hear()
    assert heard.hear(STEADY_S - 1)
    assert not heard.hear(1)
    assert abs(heard.wrong_s - 3600) < 1


def test_a_clock_that_jumps_again_is_waited_for_anew() -> None:
    heard = Heard()
    heard.hear()
    for _ in range(10):
        heard.database_s += 3600
        heard.wall_s += 3600
        assert heard.hear(STEADY_S - 1)


def test_a_clock_that_jumped_away_from_this_machines_is_never_believed() -> None:
    heard = Heard()
    heard.hear()
    heard.database_s = -30 * DAY_S

    assert heard.hear(100 * STEADY_S)
    assert heard.hear(100 * STEADY_S)


def test_a_late_answer_and_a_clock_that_drifts_are_no_jump() -> None:
    heard = Heard()
    for _ in range(100):
        heard.database_s += CLOCK_DIFFERENCE_S / 2
        heard.wall_s = heard.database_s
        assert not heard.hear()


JUMPS = st.lists(
    st.tuples(st.floats(0, 2 * STEADY_S), st.floats(-90 * DAY_S, 90 * DAY_S), st.booleans()),
    max_size=20,
)


@given(JUMPS)
def test_age_is_counted_by_time_that_passed_here(jumps: list[tuple[float, float, bool]]) -> None:
    """Or the clock has gone on for so long as it does now, beside this machine's."""
    heard, moved_s = Heard(), 0.0
    heard.hear()
    for after_s, wrong_s, is_both in jumps:
        if abs(wrong_s - heard.database_s) > 2 * CLOCK_DIFFERENCE_S:
            moved_s = heard.at_s
        heard.database_s = wrong_s
        heard.wall_s = wrong_s if is_both else 0.0
        if not heard.hear(after_s):
            is_steady = heard.at_s - moved_s >= STEADY_S
            assert (
                is_steady
                or abs(heard.wrong_s) <= 2 * CLOCK_DIFFERENCE_S * (len(jumps) + 1)
                or (abs(heard.wrong_s - wrong_s) < 1)
            )
