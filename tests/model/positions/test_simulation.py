"""Histories of keepers of positions."""

import pytest

from quorumlog.errors import LeaseHeld, LeaseLost, LogReplaced, PositionBehind
from quorumlog.protocol.positions import Acquire, Commit, Position, Renew, Reset
from tests.model.positions.simulation import History, run


@pytest.mark.parametrize("start", range(0, 32, 8))
def test_histories_keep_their_promises(start: int) -> None:
    for seed in range(start, start + 8):
        run(seed)


def test_histories_have_what_they_are_judged_for() -> None:
    seen: set[object] = set()
    histories: list[History] = [run(seed) for seed in range(4)]
    for history in histories:
        for op in history.ops:
            if op.answer is not None:
                is_done = isinstance(op.answer, Position)
                seen.add((type(op.request), is_done or type(op.answer)))
    for kind in (Acquire, Commit, Renew, Reset):
        assert (kind, True) in seen
    for refused in (
        (Acquire, LeaseHeld),
        (Acquire, LogReplaced),
        (Commit, LeaseLost),
        (Commit, PositionBehind),
        (Renew, LeaseLost),
    ):
        assert refused in seen
