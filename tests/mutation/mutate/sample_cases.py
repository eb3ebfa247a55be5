"""The tests of `sample.py`, run by the mutator in its own tests: pytest does not collect them by name."""

from tests.mutation.mutate.sample import Account


def test_no_more_is_taken_than_there_is() -> None:
    account = Account(3)

    assert account.withdraw(2) == 2
    assert account.withdraw(2) == 1
    assert account.balance == 0
