"""The tests' own way of waiting."""

import asyncio

import pytest

from tests.support.waiting import DeadlineMissed, until, until_sync


async def test_until_returns_the_first_true_answer() -> None:
    answers = iter([0, None, 7])

    assert await until(lambda: next(answers), "seven") == 7


async def test_a_predicate_that_hangs_misses_the_deadline() -> None:
    with pytest.raises(DeadlineMissed, match="the end of time"):
        await until(asyncio.Event().wait, "the end of time", 0.05)


async def test_passing_errors_count_as_not_yet() -> None:
    failures = [TimeoutError()]

    async def ask() -> bool:
        if failures:
            raise failures.pop()
        return True

    assert await until(ask, "an answer", passing=(TimeoutError,))


async def test_an_unexpected_error_ends_the_wait() -> None:
    def ask() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await until(ask, "never")


def test_the_deadline_says_what_was_seen_last() -> None:
    with pytest.raises(DeadlineMissed, match="seen last: 0"):
        until_sync(lambda: 0, "a one", 0.01)
