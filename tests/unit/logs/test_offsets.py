"""Offsets are found by few reads, and always in the entry that holds them."""

import random

from quorumlog.protocol.batch import BatchHead
from services.gateway.logs.offsets import POINTS_MAX, Points, find_entry


class Ledger:
    """Heads of batches of the given sizes, and how many of them were read."""

    def __init__(self, sizes: list[int]) -> None:
        self.heads = []
        before = 0
        for size in sizes:
            self.heads.append(BatchHead(size, 0, before, None))
            before += size
        self.records = before
        self.reads = 0

    async def read_head(self, entry_id: int) -> BatchHead:
        self.reads += 1
        return self.heads[entry_id]

    async def find(self, points: Points, place: int, last: int) -> int | None:
        return await find_entry(points, place, last_entry=last, read_head=self.read_head)


async def test_every_place_is_found_whatever_the_sizes_and_whatever_is_known() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        ledger = Ledger([rng.choice((1, 1, 2, 5, 400)) for _ in range(rng.randint(1, 40))])
        holder = [n for n, head in enumerate(ledger.heads) for _ in range(head.count)]
        points = Points()
        for _ in range(30):
            last = rng.randrange(len(ledger.heads))
            place = rng.randrange(ledger.records + 2)
            expected = holder[place] if place < ledger.heads[last].records_after else None

            found = await ledger.find(points, place, last)

            assert found == expected, f"seed {seed}, place {place}, last {last}"


async def test_batches_of_one_size_are_found_at_the_first_guess() -> None:
    ledger = Ledger([3] * 1000)
    points = Points()

    assert await ledger.find(points, 1500, 999) == 500
    assert ledger.reads <= 2


async def test_sizes_of_any_kind_cost_a_logarithm_of_reads() -> None:
    ledger = Ledger([1] * 5000 + [10_000] + [1] * 5000)
    points = Points()

    assert await ledger.find(points, 4999, 10_000) == 4999
    assert ledger.reads <= 2 * 14


async def test_a_reader_in_order_reads_no_heads() -> None:
    ledger = Ledger([2, 3, 4])
    points = Points()
    points.add(2, 1)
    points.add(5, 2)

    assert [await ledger.find(points, place, 2) for place in (0, 2, 5)] == [0, 1, 2]
    assert ledger.reads == 0


def test_points_stay_few() -> None:
    points = Points()
    for number in range(1, 10 * POINTS_MAX):
        points.add(number, number)

    assert len(points) <= POINTS_MAX + 1
    assert points.around(10 * POINTS_MAX)[0] == (10 * POINTS_MAX - 1, 10 * POINTS_MAX - 1)
