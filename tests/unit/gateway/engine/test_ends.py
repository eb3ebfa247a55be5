"""Who asks for the end of a ledger shares one look, and recoveries are retried."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from quorumlog.errors import UNKNOWN, MetadataUnavailable, NoSuchLedger
from quorumlog.net.ports import Ports
from quorumlog.net.timers import Tasks
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.gateway.engine import ends as module
from services.gateway.engine.ends import Ends
from tests.support.virtual import in_virtual_time
from tests.unit.gateway.engine.hands import MEMBERS, Failing, Hand, Primary, closed, rows_of
from tests.unit.metadata.support import DRAFT


class Keeping(Hand):
    """Bookies that keep each copy at once, but for the first ones."""

    def __init__(self, silent: int = 0) -> None:
        super().__init__()
        self.silent = silent

    def keep_row(self, *args: Any) -> None:
        super().keep_row(*args)
        is_kept = args[0] not in MEMBERS[: self.silent]
        args[-1](Status.OK if is_kept else Status.UNKNOWN)


class Closed(Primary):
    """A metadata service with each ledger closed at its first entry."""

    async def get(self, ledger_id: int) -> LedgerMetadata:
        return replace(await super().get(ledger_id), ledger_id=ledger_id)


async def test_an_end_beyond_the_bound_is_kept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX", 1)
    hand = Keeping()
    ends = Ends(rows_of(Closed(closed(0))), hand.ports)
    one, two = closed(0), replace(closed(0), ledger_id=8)

    assert await ends.reported(one) == one
    known = len(hand.copies)
    await ends.reported(one)
    assert len(hand.copies) == known
    await ends.reported(two)
    await ends.reported(one)

    assert len(hand.copies) == 3 * known


class Recovered:
    """Recoveries that end when they may, and the rows by which they began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[LedgerMetadata] = []
        self.may_end = asyncio.Event()
        monkeypatch.setattr(module, "recover", self.recover)
        self.ends = Ends(rows_of(Primary(closed(0))), Keeping().ports)
        self.row = replace(closed(0), state=State.IN_RECOVERY, last_entry=None, length=None)

    async def recover(
        self, row: LedgerMetadata, *_: Any, **_more: Any
    ) -> tuple[LedgerMetadata, int]:
        self.began.append(row)
        await self.may_end.wait()
        return closed(0), 3

    def start(self, *declared: str) -> asyncio.Task[tuple[LedgerMetadata, int]]:
        return asyncio.create_task(self.ends.recover(self.row, declare_lost=declared))


async def test_a_shared_recovery_outlives_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Recovered(monkeypatch)
    one, two = world.start(), world.start()
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait([one])
    world.may_end.set()

    assert await two == (closed(0), 3)
    assert len(world.began) == 1


async def test_a_recovery_with_lost_members_starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Recovered(monkeypatch)
    one, two = world.start(), world.start("b1@1")
    await asyncio.sleep(0)
    world.may_end.set()
    await asyncio.gather(one, two)

    assert [row.state for row in world.began] == [State.IN_RECOVERY, State.CLOSED]


async def test_an_end_with_too_few_copies_is_kept_again_for_the_next_reader() -> None:
    hand = Keeping(silent=2)
    ends = Ends(rows_of(Primary(closed(0))), hand.ports)

    assert await ends.reported(closed(0)) == closed(0)
    assert await ends.copied(closed(0)) == closed(0)
    asked, hand.silent = len(hand.copies), 0
    assert await ends.reported(closed(0)) == closed(0)
    known = len(hand.copies)
    assert await ends.reported(closed(0)) == closed(0)

    assert known > asked
    assert len(hand.copies) == known


async def test_callers_share_one_look_at_an_end_and_one_may_go() -> None:
    hand = Hand()
    ends = Ends(rows_of(Primary(closed(0))), hand.ports)
    asking = [asyncio.ensure_future(ends.reported(closed(0))) for _ in range(3)]
    await asyncio.sleep(0)
    asking.pop().cancel()
    await asyncio.sleep(0)
    sent = len(hand.copies)
    hand.keep_all()

    assert await asyncio.gather(*asking) == [closed(0)] * 2
    assert sent == len(closed(0).all_members)


async def test_a_ledger_that_is_deleted_meanwhile_has_ended_for_its_closer_alone() -> None:
    gone = Failing(NoSuchLedger("the ledger was deleted", ledger_id=7, deleted=True))
    ends = Ends(rows_of(gone), Keeping().ports)

    assert await ends.kept(closed(0)) == closed(0)
    with pytest.raises(NoSuchLedger):
        await ends.reported(closed(0))


async def test_the_outcome_of_a_close_is_unknown_without_metadata() -> None:
    ends = Ends(rows_of(Failing(MetadataUnavailable())), Keeping().ports)

    with pytest.raises(MetadataUnavailable) as error:
        await ends.kept(closed(0))
    assert error.value.outcome == UNKNOWN
    with pytest.raises(MetadataUnavailable):
        await ends.reported(closed(0))


async def test_looks_that_are_under_way_end_with_the_gateway() -> None:
    ends = Ends(rows_of(Primary(closed(0))), Hand().ports)
    asking = asyncio.ensure_future(ends.reported(closed(0)))
    await asyncio.sleep(0)

    await ends.close()

    with pytest.raises(asyncio.CancelledError):
        await asking


OUTAGE_S = 24 * 3600


class Away:
    """Rows that can't be read for a day."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def fresh(self, _ledger_id: int) -> LedgerMetadata:
        if asyncio.get_running_loop().time() < OUTAGE_S:
            raise MetadataUnavailable
        self.read.set()
        return DRAFT.closed(last_entry=-1, length=0)


@in_virtual_time(seed=0)
async def test_a_background_recovery_is_retried_through_any_outage() -> None:
    rows, tasks = Away(), Tasks()
    none = cast(Any, None)
    ends = Ends(cast(Any, rows), Ports(none, none, none, none, tasks))
    ends.start_recovery(7)
    async with asyncio.timeout(OUTAGE_S + 3600):
        await rows.read.wait()
    await tasks.close()
