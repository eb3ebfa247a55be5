"""The tests' way of waiting; it lives beside the cluster library, which waits too."""

from loadtest.waiting import DEADLINE_S, DeadlineMissed, until, until_sync

__all__ = ["DEADLINE_S", "DeadlineMissed", "until", "until_sync"]
