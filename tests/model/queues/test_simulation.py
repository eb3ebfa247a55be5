"""Histories of keepers of queues."""

import pytest

from quorumlog.protocol.queue_requests import Settle, Settled, Settlement, Taken
from tests.model.queues.simulation import run


@pytest.mark.parametrize("start", range(0, 24, 6))
def test_histories_keep_their_promises(start: int) -> None:
    for seed in range(start, start + 6):
        run(seed)


def test_histories_have_what_they_are_judged_for() -> None:
    seen: set[object] = set()
    for seed in range(4):
        world = run(seed)
        for op in world.history.ops:
            if isinstance(op.answer, Taken):
                seen.update(count for count, _ in op.answer.records)
                seen.add(op.answer.limit)
            if isinstance(op.request, Settle) and isinstance(op.answer, Settled):
                seen.add((op.request.kind, bool(op.answer.done)))
                seen.update(one.reason for one in op.answer.refused)
        seen.update(("dead", name) for name, letters in world.dead.items() if letters)
    for kind in (Settlement.ACK, Settlement.NAK, Settlement.EXTEND, Settlement.UNREAD):
        assert (kind, True) in seen
    assert {1, 2, 3, "acknowledged", "claim-ended", "max-in-flight", "window"} <= seen
    assert {("dead", "any"), ("dead", "key")} <= seen
