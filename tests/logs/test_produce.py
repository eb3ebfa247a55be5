"""`make produce`, short: gateways and bookies are killed in turn, and no record is lost or doubled."""

from dataclasses import replace

from loadtest.produce import Plan, Sent, judge, produce, value_of
from loadtest.stores import Stores

SENT = [Sent("a", 3, {0: 0, 1: 1, 2: 3}), Sent("b", 1, {0: 2})]
FOUND = [(n, value_of(*which)) for n, which in enumerate((("a", 0), ("a", 1), ("b", 0), ("a", 2)))]


async def test_each_record_is_there_once_at_its_offset_while_one_process_after_another_dies(
    stores: Stores,
) -> None:
    plan = Plan(records=1600, batch=8, every_s=0.2, down_s=0.2, pause_s=0.1)

    result = await produce(plan, stores=stores)

    assert result.is_good, result
    assert result.records == 1600
    assert result.kills > 0


def test_the_judge_sees_what_is_lost_doubled_elsewhere_or_out_of_order() -> None:
    good = judge(SENT, FOUND, 7)
    assert good.is_good
    assert good.line() == "produce: 4 records, 7 kills, 0 lost, 0 duplicated, 0 misplaced"

    lost = judge(SENT, FOUND[:3], 0)
    doubled = judge(SENT, [*FOUND, (4, value_of("a", 1))], 0)
    moved = judge([replace(SENT[0], offsets={0: 0, 1: 1, 2: 4}), SENT[1]], FOUND, 0)
    turned = judge(SENT, [(0, FOUND[1][1]), (1, FOUND[0][1]), *FOUND[2:]], 0)

    assert (lost.lost, lost.is_good) == (1, False)
    assert (doubled.duplicated, doubled.is_good) == (1, False)
    assert (moved.misplaced, moved.is_good) == (1, False)
    assert turned.problems == ("a is out of order",)
    assert judge(SENT, [*FOUND, (4, b"x")], 0).problems == ("1 records were never sent",)
    assert judge(SENT, [(n + 1, value) for n, value in FOUND], 0).problems
