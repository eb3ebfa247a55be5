"""BP-46's scenarios, step by step, on real processes with real lost data.

Each is run twice: a bookie with one protection taken out shows that the steps lose an acknowledged
entry, and the shipped one that they do not.
"""

import asyncio
import signal

from loadtest.stores import Stores
from loadtest.waiting import DeadlineMissed
from tests.cluster.bp46.world import World, world_of
from tests.support.waiting import until

LATE = {"ledger-closed", "ledger-fenced"}


async def test_what_is_lost_without_the_protection_is_not_lost_with_it(stores: Stores) -> None:
    async with world_of(stores) as world:
        for is_protected in (False, True):
            await lost_fence_by_an_emptied_disk(world, is_protected=is_protected)
            await lost_fence_by_a_power_cut(world, is_protected=is_protected)
            await truncation_by_recovery(world, is_protected=is_protected)


async def lost_fence_by_an_emptied_disk(world: World, *, is_protected: bool) -> None:
    """Scenario 1: b2 forgets the fence with its disk, and b3 never heard of it."""
    _, b2, b3 = world.bookies
    ledger_id = await e1_on_all_three(world)
    # C1 hangs. The message to b3 is lost.
    world.is_cut(cut=True)
    await b3.end()
    assert (await world.recovered(ledger_id))["last_entry"] == 0
    b3.start()

    await b2.lose_disk()
    b2.start(BUILD="" if is_protected else "loss-is-not-noticed")
    await asyncio.gather(b2.ready(), b3.ready())

    await c1_wakes_up(world, ledger_id, is_protected=is_protected)


async def lost_fence_by_a_power_cut(world: World, *, is_protected: bool) -> None:
    """Scenario 1, by a bookie that tells a fence before it is on disk, and loses power."""
    _, b2, b3 = world.bookies
    await b2.end()
    # Under `deferred` the power cut alone would make a new incarnation.
    b2.start(DURABILITY="fsync", BUILD="" if is_protected else "nothing-waits-for-the-disk")
    await b2.ready()
    ledger_id = await e1_on_all_three(world)
    world.is_cut(cut=True)
    await b3.end()
    await b2.hold_disk()
    recovery = asyncio.create_task(world.recovered(ledger_id))

    async def is_fenced() -> bool:
        return bool((await b2.get(f"/v1/ledgers/{ledger_id}"))["fenced"])

    await until(is_fenced, "b2 took the fence, and can't sync it")
    if not is_protected:
        assert (await recovery)["last_entry"] == 0
    await b2.cut_power()
    b2.start(DURABILITY="fsync")
    await b2.ready()
    assert (await recovery)["last_entry"] == 0
    b3.start()
    await b3.ready()

    await c1_wakes_up(world, ledger_id, is_protected=is_protected)
    await b2.end()
    b2.start()
    await b2.ready()


async def e1_on_all_three(world: World) -> int:
    ledger_id = await world.create()
    await world.append(ledger_id, "e1")
    assert world.acknowledged[ledger_id] == {0: "e1"}
    for bookie in range(3):
        # With its LAC C1 has nothing more to say for now.
        await world.holds(bookie, ledger_id, 0, lac=0)
    return ledger_id


async def c1_wakes_up(world: World, ledger_id: int, *, is_protected: bool) -> None:
    """C1 writes E2 to all bookies: b1 is fenced, b3 never was, and b2 decides."""
    append = asyncio.create_task(world.append(ledger_id, "e2"))
    if is_protected:
        # Had b2 taken it too, it would be acknowledged: C1 asks metadata only after that.
        await world.holds(2, ledger_id, 1)
        world.is_cut(cut=False)
        assert (await append)["code"] in LATE
        assert await world.lost(ledger_id) == {}
        return
    reported = await append
    world.is_cut(cut=False)
    if reported.get("code") == "quorum-timeout":
        raise DeadlineMissed("b2 and b3 acknowledge e2", reported, 50)
    assert world.acknowledged[ledger_id] == {0: "e1", 1: "e2"}, reported
    assert await world.lost(ledger_id) == {1: "no-such-entry"}


async def truncation_by_recovery(world: World, *, is_protected: bool) -> None:
    """Scenario 2: b1 and b3 acknowledge E0, b1 loses it, and C2 finds only b1 and b2."""
    b1, b2, b3 = world.bookies
    c1, _ = world.gateways
    ledger_id = await world.create()
    # b2 fails to respond: it is away for a moment, and stops and starts in order.
    await b2.end()
    await b1.hold_disk()
    await world.append(ledger_id, "e0")
    assert world.acknowledged[ledger_id] == {0: "e0"}
    await world.holds(2, ledger_id, 0)
    await c1.end(signal.SIGKILL)
    await b3.end()
    await b1.cut_power()
    b1.start(BUILD="" if is_protected else "loss-is-not-noticed")
    b2.start()
    c1.start()
    await asyncio.gather(b1.ready(), b2.ready())

    recovery = asyncio.create_task(world.recovered(ledger_id))
    if not is_protected:
        # Two of three say no: the ledger is closed as empty.
        assert (await recovery)["last_entry"] == -1
    b3.start()
    await asyncio.gather(b3.ready(), c1.ready())
    closed = await recovery

    assert closed["last_entry"] == (0 if is_protected else -1)
    assert await world.lost(ledger_id) == ({} if is_protected else {0: "no-such-entry"})
