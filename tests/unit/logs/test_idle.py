"""Logs that expire without use: what is remembered, and histories of gateways that die and stand still."""

import pytest

from quorumlog.protocol import idle
from quorumlog.protocol.idle import Kept, Reported, slack_s
from tests.model.logs.idle import IDLE_S, run


def test_a_log_expires_a_slack_after_it_was_idle_for_so_long_and_stays_so() -> None:
    kept = Kept()
    assert kept.lives("t", 8, 100.0, is_access=False)  # an appointment is an access
    assert kept.lives("t", 8, 109.9, is_access=False)
    assert kept.lives("t", 8, 109.9, is_access=True)
    assert kept.lives("t", 8, 119.8, is_access=False)
    assert not kept.lives("t", 8, 119.9, is_access=True)
    assert not kept.lives("t", 8, 119.9, is_access=True)
    assert kept.terms() == {"t"}
    kept.deleted("t")
    assert kept.terms() == set()
    assert not kept.lives("t", 8, 120.0, is_access=True)  # by a row from before the deletion


def test_what_has_another_keeper_counts_as_used_when_it_comes_back() -> None:
    kept = Kept()
    kept.lives("t", 8, 0.0, is_access=True)
    assert not kept.lives("t", 8, 20.0, is_access=True)
    kept.forget({"t"})
    assert kept.lives("t", 8, 30.0, is_access=False)


def test_a_question_is_no_access() -> None:
    kept = Kept()
    kept.lives("t", 8, 0.0, is_access=True)
    assert kept.lives("t", 8, 7.0, is_access=False)
    assert not kept.lives("t", 8, 10.0, is_access=False)


def test_a_log_of_no_idle_time_expires_with_the_first_question_after_its_creation() -> None:
    kept = Kept()
    assert kept.lives("t", 0, 5.0, is_access=True)
    assert not kept.lives("t", 0, 5.0, is_access=True)


def test_a_keeper_is_told_once_in_a_slack_from_when_the_telling_began() -> None:
    reported = Reported()
    assert reported.is_due("t", 8, 0.0)
    reported.note("t", 10.0)
    assert not reported.is_due("t", 8, 11.9)
    assert reported.is_due("t", 8, 12.0)
    assert reported.is_due("other", 8, 11.0)
    assert slack_s(3_600_000) == slack_s(7_200_000) == 60.0


def test_what_is_beyond_the_bound_counts_as_used_and_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle, "TERMS_MAX", 2)
    kept, reported = Kept(), Reported()
    for at_s, term in enumerate("abc"):
        kept.lives(term, 8, float(at_s), is_access=True)
        reported.note(term, float(at_s))
    assert kept.terms() == {"b", "c"}
    assert reported.is_due("a", 1000, 3.0)
    assert not reported.is_due("b", 1000, 3.0)
    # One that has expired is remembered whatever comes: its deletion may be under way.
    assert not kept.lives("b", 8, 11.0, is_access=True)
    for term in "defg":
        kept.lives(term, 8, 11.0, is_access=True)
    assert not kept.lives("b", 8, 11.0, is_access=True)
    for term in ("b", "x", "y"):
        kept.deleted(term)
    assert not kept.lives("x", 8, 11.0, is_access=True)
    assert kept.lives("b", 8, 11.0, is_access=True)


@pytest.mark.parametrize("seed", range(1, 31))
def test_a_log_stays_while_it_is_used_and_goes_when_it_is_not(seed: int) -> None:
    story = run(seed)

    assert story.freed_s, "somebody saw it go"
    assert IDLE_S
