"""A few guards for the tests of the mutator: what finds them is in `sample_cases.py`."""


class Account:
    """Keeps a balance that is never below nothing."""

    def __init__(self, balance: int) -> None:
        self.balance = balance

    def withdraw(self, amount: int) -> int:
        """Take what is there of an amount, and say how much that was."""
        if amount < 0:
            raise ValueError("a negative amount")
        if amount > self.balance:
            amount, self.balance = self.balance, 0
            return amount
        self.balance -= amount
        return amount

    def close(self) -> None:
        """No case asks for this."""
        if self.balance:
            raise ValueError("there is money in it")
