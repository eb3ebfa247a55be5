"""Giving entries up (rule 31): what is asked before, and that the proof is about the row that changes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from loadtest.stores import Stores
from quorumlog.errors import (
    EntryLost,
    InvalidRequest,
    LossNotProven,
    NoSuchEntry,
    NoSuchLedger,
    WrongPassword,
)
from quorumlog.protocol import loss
from quorumlog.protocol.loss import Answers, Holding
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges
from services.gateway.engine import ends
from tests.unit.gateway.engine.support import World, ledger, payloads, world_of


class Reported:
    """What bookies answer, as a test has it; by default nobody has anything."""

    def __init__(self, world: World) -> None:
        self.held: dict[str, Ranges] = {}
        self.asked: list[Ranges] = []
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        for gateway in world.gateways:
            gateway.engine._holdings = cast("Any", self)

    async def answers(self, row: LedgerMetadata, ranges: Ranges) -> AsyncIterator[Answers]:
        self.asked.append(ranges)
        reported = {m: Holding(self.held.get(m, ()), ()) for m in row.all_members}
        for first, last in ranges:
            for found in loss.answers(row, range(first, last + 1), reported):
                yield found
        if self.meanwhile is not None:
            await self.meanwhile()


async def closed(world: World, **options: Any) -> LedgerMetadata:
    row = await ledger(world.engine, **options)
    password = options.get("password")
    batch = [b"%d" % n for n in range(10)]
    await world.engine.appends.append(row.ledger_id, batch, password=password)
    return await world.engine.close(row.ledger_id, password=password)


async def test_entries_without_a_copy_are_lost_at_every_gateway(stores: Stores) -> None:
    async with world_of(stores) as world:
        reported = Reported(world)
        row = await closed(world)

        now = await world.engine.accept_loss(row.ledger_id, 3, 5)

        assert now.lost_entries == ((3, 5),)
        assert await world.metadata.get(row.ledger_id) == now
        for engine in (world.engine, world.other):
            page = await engine.reads.read(row.ledger_id, 0)
            assert (page.next, page.runs[-1].last) == (3, 2)
            for entry_id in (3, 5):
                # The bookies have it all the while: what was given up is not asked for.
                with pytest.raises(EntryLost) as lost:
                    await engine.reads.entry(row.ledger_id, entry_id)
                assert (lost.value.entry_id, lost.value.members["next"]) == (entry_id, 6)
            assert await payloads(engine, row.ledger_id, 6) == [b"6", b"7", b"8", b"9"]
            with pytest.raises(NoSuchEntry):
                await engine.reads.entry(row.ledger_id, 10)
        # A repeat changes nothing; what is new alone is asked for.
        assert await world.other.accept_loss(row.ledger_id, 3, 5) == now
        assert (await world.other.accept_loss(row.ledger_id, 2, 6)).lost_entries == ((2, 6),)
        assert reported.asked == [((3, 5),), ((2, 2), (6, 6))]


async def test_one_range_more_than_a_row_takes_is_refused_and_changes_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "LOST_RANGES_MAX", 1)
    async with world_of(stores) as world:
        Reported(world)
        row = await closed(world)
        now = await world.engine.accept_loss(row.ledger_id, 3, 5)

        with pytest.raises(InvalidRequest, match="at most 1 ranges"):
            await world.engine.accept_loss(row.ledger_id, 8, 8)

        assert await world.metadata.get(row.ledger_id) == now
        assert (await world.engine.accept_loss(row.ledger_id, 6, 8)).lost_entries == ((3, 8),)


async def test_entries_with_a_copy_are_never_declared_lost(stores: Stores) -> None:
    async with world_of(stores) as world:
        reported = Reported(world)
        row = await closed(world)
        member = row.fragments[0].bookies[1]
        reported.held[member] = ((5, 5),)

        for declared in ([], [member]):
            with pytest.raises(LossNotProven) as refused:
                await world.engine.accept_loss(row.ledger_id, 3, 6, declare_lost=declared)
            assert refused.value.entry_id == 5
            (answers,) = refused.value.members["answers"]
            assert (answers["first"], answers["last"]) == (5, 5)
            assert answers["answers"][member] == "held"
        assert await world.metadata.get(row.ledger_id) == row


async def test_a_proof_of_loss_holds_for_one_version_of_the_row(stores: Stores) -> None:
    """Between the answers and the compare-and-swap a repair may give the place to one who has it."""
    async with world_of(stores) as world:
        reported = Reported(world)
        row = await closed(world)
        (new,) = {bookie.member for bookie in world.bookies.values()} - set(row.all_members)
        reported.held[new] = ((0, 9),)

        async def repaired() -> None:
            reported.meanwhile = None
            moved = row.with_member_replaced(0, row.fragments[0].bookies[0], new)
            await world.metadata.cas(moved)

        reported.meanwhile = repaired
        with pytest.raises(LossNotProven):
            await world.engine.accept_loss(row.ledger_id, 3, 5)

        assert len(reported.asked) == 2
        assert (await world.metadata.get(row.ledger_id)).lost_entries == ()


async def test_only_entries_of_a_closed_ledger_are_declared_lost(stores: Stores) -> None:
    async with world_of(stores) as world:
        reported = Reported(world)
        living = await ledger(world.engine)
        await world.engine.appends.append(living.ledger_id, [b"one"])
        row = await closed(world, password="secret")

        with pytest.raises(LossNotProven):
            await world.engine.accept_loss(living.ledger_id, 0, 0)
        with pytest.raises(NoSuchLedger):
            await world.engine.accept_loss(12345, 0, 0)
        with pytest.raises(WrongPassword):
            await world.engine.accept_loss(row.ledger_id, 0, 0)
        with pytest.raises(InvalidRequest):
            await world.engine.accept_loss(row.ledger_id, 5, 10, password="secret")
        with pytest.raises(InvalidRequest):
            await world.engine.accept_loss(
                row.ledger_id, 5, 6, password="secret", declare_lost=["bookie-77"]
            )
        assert reported.asked == []
