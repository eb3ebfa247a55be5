"""New ledgers where too few zones live: refused or told, as set."""

import pytest

from quorumlog.errors import NotEnoughBookies
from quorumlog.net.directory import Directory
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList
from services.gateway.engine.ledger_writes import Placing


async def placing(zones: str, *, enforces: bool, zones_min: int = 2) -> Placing:
    async def fetch() -> BookieList:
        return BookieList(
            bookies=tuple(
                BookieInfo(id=f"b{n}@1", state="writable", url="http://b", zone=zone)
                for n, zone in enumerate(zones)
            )
        )

    return Placing(Directory(fetch), zones_min=zones_min, enforces_zones=enforces)


QUORUM = Quorum(3, 3, 2)


async def test_an_ensemble_in_enough_zones_is_not_degraded() -> None:
    for enforces in (False, True):
        members, is_degraded = await (await placing("aab", enforces=enforces)).new_ensemble(
            QUORUM, allow_degraded=False
        )
        assert (len(members), is_degraded) == (3, False)


async def test_too_few_zones_are_refused_or_marked_degraded_as_configured() -> None:
    strict = await placing("aaa", enforces=True)
    with pytest.raises(NotEnoughBookies, match="1 zones, but ZONES_MIN requires 2"):
        await strict.new_ensemble(QUORUM, allow_degraded=False)

    lenient = await placing("aaa", enforces=False)
    assert (await lenient.new_ensemble(QUORUM, allow_degraded=False))[1]
    assert lenient.narrow_count == 1


async def test_each_write_set_of_a_striped_ledger_spans_the_zones() -> None:
    two_by_two = await placing("aabb", enforces=True)
    for _ in range(50):  # candidates come in an order that chance decides
        members, _ = await two_by_two.new_ensemble(Quorum(4, 2, 2), allow_degraded=False)
        assert len(members) == 4
    odd = await placing("aab", enforces=True)
    with pytest.raises(NotEnoughBookies):
        await odd.new_ensemble(Quorum(3, 2, 2), allow_degraded=False)


async def test_no_more_zones_are_required_than_there_are_copies() -> None:
    alone = await placing("a", enforces=True)
    assert await alone.new_ensemble(Quorum(1, 1, 1), allow_degraded=False) == (("b0@1",), False)


async def test_read_only_bookies_are_not_told_as_dead() -> None:
    async def fetch() -> BookieList:
        return BookieList(
            bookies=tuple(
                BookieInfo(id=f"b{n}@1", state="read-only", url="http://b") for n in "123"
            )
        )

    full = Placing(Directory(fetch), zones_min=1, enforces_zones=False)

    with pytest.raises(NotEnoughBookies, match=r"3 bookies .* 3 of 3 bookies live \(3 read-only\)"):
        await full.new_ensemble(QUORUM, allow_degraded=False)
