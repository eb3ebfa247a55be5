"""Where a question to a log's owner goes: answered here by the owner, forwarded once, never done twice unseen."""

from typing import Any

from quorumlog.errors import NOT_DONE, NotTheOwner
from quorumlog.protocol.log.messages import (
    HERE,
    Consult,
    DrainAsked,
    Forward,
    LogRequest,
    OwnerLost,
    Wait,
)
from tests.unit.protocol.test_log_route import Hand


def asked(hand: Hand, name: str, *, is_forwarded: bool = False) -> None:
    hand.hear(LogRequest(name, Consult(b"?"), is_forwarded=is_forwarded))


def remote(hand: Hand, name: str, **more: Any) -> None:
    """Asked where another process owns the log."""
    asked(hand, name, **more)
    hand.find_other()


def test_who_is_asked_without_an_owner_takes_the_log_over_and_answers_here() -> None:
    hand = Hand()
    asked(hand, "a")
    hand.own()
    asked(hand, "b", is_forwarded=True)
    assert hand.answers == {"a": HERE, "b": HERE}


def test_a_question_is_forwarded_to_the_owner_and_its_answer_relayed() -> None:
    hand = Hand()
    remote(hand, "a")
    assert hand.answer(Forward, b"!").call == Consult(b"?")
    assert hand.answers == {"a": b"!"}


def test_a_forwarded_question_goes_no_further() -> None:
    hand = Hand()
    remote(hand, "a")
    asked(hand, "b", is_forwarded=True)
    assert isinstance(hand.answers["b"], NotTheOwner)


def test_the_question_of_one_who_was_taken_for_the_owner_is_asked_again() -> None:
    hand = Hand()
    remote(hand, "a")
    hand.answer(Forward, NotTheOwner("no"))
    hand.answer(Wait, None)
    assert "a" not in hand.answers
    hand.own()
    assert hand.answers == {"a": HERE}


def test_a_question_is_asked_again_where_the_owner_was_lost_with_it() -> None:
    hand = Hand()
    remote(hand, "a")
    hand.answer(Forward, OwnerLost("broke", sent=True))
    assert "a" not in hand.answers


def test_a_gateway_that_ends_refuses_as_not_done() -> None:
    hand = Hand()
    hand.hear(DrainAsked("drain"))
    asked(hand, "a")
    assert isinstance(hand.answers["a"], NotTheOwner)
    assert hand.answers["a"].outcome == NOT_DONE
