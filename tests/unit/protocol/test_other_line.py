"""A machine that lived through a loss: the store has a row of the same version that another change made (rule 18a).

The compare-and-swap conflicts. Each machine goes by the row that it is given, so that its next change names that one;
a writer or an owner whose place is not in the row ends.
"""

from dataclasses import replace
from typing import Final

from quorumlog.protocol.log import LogItem
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    LogRequest,
    RowChanged,
    SwapLog,
)
from quorumlog.protocol.messages import (
    CasStatus,
    Failed,
    RecoverRequested,
    SendFence,
    SendRead,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from tests.unit.protocol import test_log_owner as owners
from tests.unit.protocol import test_recovery as recoveries
from tests.unit.protocol import test_repair as repairs
from tests.unit.protocol import test_writer as writers
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, ledger

MINE: Final = "11111111-0000-4000-8000-000000000000"
OTHER: Final = "22222222-0000-4000-8000-000000000000"


def other(row: LedgerMetadata) -> LedgerMetadata:
    """The row of its version that the store has."""
    return replace(row, attempt=OTHER)


def changing() -> writers.Bench:
    """A writer whose ensemble change is under way."""
    bench = writers.Bench(replace(ledger(version=4), attempt=MINE))
    bench.append()
    bench.fails(0, 0)
    bench.found(B4)
    assert bench.one(UpdateMetadata).metadata.attempt == MINE
    return bench


def test_a_writer_whose_ensemble_is_in_the_row_goes_on_from_that_row() -> None:
    bench = changing()

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4)))
    bench.found(B4)

    update = bench.one(UpdateMetadata).metadata
    assert (update.version, update.attempt) == (4, OTHER)


def test_a_writer_whose_ensemble_is_not_in_the_row_ends_and_closes_nothing() -> None:
    bench = changing()

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4, fragments=((0, (B5, B2, B3)),))))

    failed = bench.one(Failed)
    assert (failed.code, failed.first) == ("ledger-fenced", 0)
    bench.none(UpdateMetadata)
    bench.append()
    assert bench.one(Failed).code == "ledger-fenced"
    bench.none(UpdateMetadata)


def test_a_recovery_starts_over_by_the_row() -> None:
    bench = recoveries.Bench(replace(ledger(version=4), attempt=MINE))
    bench.do(RecoverRequested(bench.row))

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4, fragments=((0, (B5, B2, B3)),))))

    update = bench.one(UpdateMetadata).metadata
    assert (update.version, update.attempt) == (4, OTHER)
    bench.cas()
    assert [fence.member for fence in bench.all(SendFence)] == [B5, B2, B3]


def test_a_recovery_that_closes_reads_again_where_the_row_has_another_last_fragment() -> None:
    bench = recoveries.ended()

    moved = ledger(version=2, state=State.IN_RECOVERY, fragments=((0, (B1, B4, B3)),))
    bench.cas(CasStatus.CONFLICT, other(moved))

    bench.none(UpdateMetadata)
    assert [fence.member for fence in bench.all(SendFence)] == [B1, B4, B3]


def test_a_repair_marks_its_target_again_in_the_row() -> None:
    bench = repairs.Bench(replace(repairs.CLOSED, attempt=MINE))

    bench.cas(CasStatus.CONFLICT, other(repairs.CLOSED))

    update = bench.one(UpdateMetadata).metadata
    assert (update.attempt, update.repairs != ()) == (OTHER, True)


def test_a_repair_that_replaces_reads_the_target_again_under_the_row() -> None:
    """Rule 20a: meanwhile nobody may have named the target."""
    bench = repairs.verifying()
    bench.gets(bench.one(SendRead), repairs.AB)
    assert bench.row.repairs

    bench.cas(CasStatus.CONFLICT, other(bench.row))

    bench.none(UpdateMetadata)
    assert bench.one(SendRead).member == B4


def rolling() -> owners.Hand:
    hand = owners.Hand()
    hand.append("a")
    hand.hear(LogRequest("roll"))
    hand.answer(CountBookies, 3)
    hand.answer(CreateLedger, owners.ledger(2))
    return hand


def test_an_owner_whose_ledger_is_the_last_of_the_row_goes_on_from_that_row() -> None:
    hand = rolling()

    hand.answer(SwapLog, RowChanged(replace(owners.LOG, attempt=OTHER)))

    again = hand.asked(SwapLog).question
    assert isinstance(again, SwapLog)
    assert again.log.attempt == OTHER


def test_an_owner_whose_ledger_is_not_the_last_of_the_row_ends() -> None:
    hand = rolling()
    row = replace(owners.LOG, attempt=OTHER, items=(LogItem(9, 0),))

    hand.answer(SwapLog, RowChanged(row))

    assert hand.asked(DeleteLedger).question == DeleteLedger(2)
    assert hand.owner.is_ended
    assert hand.answers["roll"] is NOT_OWNER
