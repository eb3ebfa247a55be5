"""Histories of keepers of subscriptions."""

import pytest

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.subscriptions import AckWake, ClaimWake, Phase, Subscription
from tests.model.subscriptions.simulation import run


@pytest.mark.parametrize("start", range(0, 24, 6))
def test_histories_keep_their_promises(start: int) -> None:
    for seed in range(start, start + 6):
        run(seed)


def test_histories_have_what_they_are_judged_for() -> None:
    seen: set[object] = set()
    for seed in range(6):
        world = run(seed)
        for op in world.history.ops:
            kind = type(op.request)
            if isinstance(op.answer, QuorumLogError):
                seen.add((kind, op.answer.code))
            elif isinstance(op.answer, Subscription):
                seen.add((kind, op.answer.phase))
        states = [row for _, batch in world.history.batches for row in batch.rows]
        seen.update((row.id, row.phase) for row in states)
        seen.update(
            ("created again", each.acked > 0)
            for row in states
            for each in row.links
            if each.created > "00001"
        )
        seen.update({"retried"} if any(row.attempts > 1 for row in states) else ())
    for phase in Phase:
        assert ("pull", phase) in seen
        assert phase == Phase.OPEN or ("hook", phase) in seen
    assert {("created again", True), "retried"} <= seen
    assert {(ClaimWake, Phase.HELD), (AckWake, Phase.HELD), (AckWake, Phase.IDLE)} <= seen
    assert {(ClaimWake, "already-claimed"), (ClaimWake, "no-pending-work")} <= seen
    assert {(AckWake, "wake-fenced"), (AckWake, "invalid-offset")} <= seen
