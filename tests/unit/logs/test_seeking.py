"""Times are found by few reads, and always at the first record that was appended then or later."""

import random
from itertools import accumulate

import pytest

from quorumlog.errors import BadRequest, InvalidRequest
from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.quorum import Quorum
from services.gateway.edge.starts import start_of, start_of_json
from services.gateway.logs.offsets import find_time
from services.gateway.logs.values import Last, Since
from tests.unit.logs.test_manager import a_cluster, call, give_up

SETTINGS = LogSettings(Quorum(3, 3, 2))


class Ledgers:
    """A log of ledgers, each a list of (append time, records) or, published, a time and a number of records; and how
    many entries are read.
    """

    def __init__(
        self, *ledgers: list[tuple[int, int]], published: dict[int, int] | None = None
    ) -> None:
        self.entries = ledgers
        self.published = published or {}
        self.reads = 0
        sizes = [sum(count for _, count in ledger) for ledger in ledgers]
        firsts = [0, *accumulate(sizes)]
        items = [
            LogItem(at, first, first + size - 1, published_ms=self.published.get(at, 0))
            for at, (first, size) in enumerate(zip(firsts, sizes, strict=False))
        ]
        items[-1] = LogItem(len(ledgers) - 1, firsts[len(ledgers) - 1])
        self.row = LogMetadata("log", SETTINGS, items=tuple(items))
        self.times = [
            self.published.get(at, time)
            for at, ledger in enumerate(ledgers)
            for time, count in ledger
            for _ in range(count)
        ]

    async def last_entry(self, item: LogItem) -> int:
        return len(self.entries[item.ledger_id]) - 1 if self.entries[item.ledger_id] else NO_ENTRY

    async def read_head(self, ledger_id: int, entry_id: int) -> BatchHead:
        self.reads += 1
        time, count = self.entries[ledger_id][entry_id]
        before = sum(count for _, count in self.entries[ledger_id][:entry_id])
        return BatchHead(count, time, before, None)

    async def find(self, ms: int) -> int:
        return await find_time(self.row, ms, last_entry=self.last_entry, read_head=self.read_head)

    def expected(self, ms: int) -> int:
        return next((at for at, time in enumerate(self.times) if time >= ms), len(self.times))


async def test_every_time_is_found_in_any_log() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        now, ledgers, published = 100, list[list[tuple[int, int]]](), dict[int, int]()
        for at in range(rng.randint(1, 8)):
            ledger = []
            for _ in range(rng.randint(1, 6)):
                now += rng.choice((0, 0, 1, 5))
                ledger.append((now, rng.choice((1, 2, 7))))
            if rng.random() < 0.3:
                published[at] = now
                ledger = [(rng.randrange(200), count) for _, count in ledger]
            ledgers.append(ledger)
        ledgers.append([(now + n, 1) for n in range(rng.randint(0, 3))])
        log = Ledgers(*ledgers, published=published)
        for ms in range(98, now + 5):
            assert await log.find(ms) == log.expected(ms), f"seed {seed}, time {ms}"


class Huge(Ledgers):
    """A log whose entries have one record and one millisecond each, and which nobody wrote down."""

    def __init__(self, sizes: list[int]) -> None:
        self.reads = 0
        self.firsts = [0, *accumulate(sizes)]
        items = [
            LogItem(at, first, first + size - 1)
            for at, (first, size) in enumerate(zip(self.firsts, sizes, strict=False))
        ]
        self.row = LogMetadata("log", SETTINGS, items=tuple(items))

    async def last_entry(self, item: LogItem) -> int:
        return self.firsts[item.ledger_id + 1] - self.firsts[item.ledger_id] - 1

    async def read_head(self, ledger_id: int, entry_id: int) -> BatchHead:
        self.reads += 1
        return BatchHead(1, self.firsts[ledger_id] + entry_id, entry_id, None)


@pytest.mark.parametrize(
    ("sizes", "bound"),
    [
        ([100_000_000], 28),
        ([10_000] * 10_000, 28),
        ([250_000] * 400, 28),
        ([1] * 9_999 + [100_000_000 - 9_999], 41),
        ([100_000_000 - 9_999] + [1] * 9_999, 41),
    ],
    ids=["one ledger", "small ledgers", "ledgers", "the last is large", "the first is large"],
)
async def test_a_time_in_a_log_of_100_million_records_takes_few_reads(
    sizes: list[int], bound: int
) -> None:
    """The figures of docs/guides/logs.md."""
    rng = random.Random(1)
    most = 0
    for ms in (0, 1, 99_999_999, 100_000_000, *(rng.randrange(100_000_000) for _ in range(20))):
        log = Huge(sizes)
        assert await log.find(ms) == min(ms, 100_000_000)
        most = max(most, log.reads)
    assert most <= bound


async def test_an_empty_log_has_its_end_at_every_time() -> None:
    empty = LogMetadata("log", SETTINGS, first_offset=7, next_offset=9)

    async def nothing(*_: object) -> int:
        raise AssertionError("there is nothing to read")

    assert await find_time(empty, 5, last_entry=nothing, read_head=nothing) == 9  # type: ignore[arg-type]
    assert await Ledgers([]).find(5) == 0


async def test_what_was_truncated_is_not_found() -> None:
    log = Ledgers([(10, 5)], [(20, 5)], [(30, 5)])
    log.row = log.row.truncated(5)
    assert log.row.first_offset == 5
    assert [await log.find(ms) for ms in (0, 10, 20, 21, 31)] == [5, 5, 5, 10, 15]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("7", 7),
        ("-7", Last(7)),
        ("1970-01-01T00:00:01Z", Since(1000)),
        ("1970-01-01t02:00:01.5+02:00", Since(1500)),
        ("1970-01-01T00:00:00.0001Z", Since(1)),
        ("1969-12-31T23:59:59.9999Z", Since(0)),
        ("0001-01-01T00:00:00Z", Since(-62_135_596_800_000)),
    ],
)
def test_a_start_is_an_offset_a_word_a_count_from_the_end_or_a_time(
    text: str, start: object
) -> None:
    assert start_of(text, "/query/from") == start
    as_json = int(text) if text.lstrip("-").isdecimal() else text
    assert start_of_json(as_json, "/tail/from") == start


@pytest.mark.parametrize("text", ["-0", "--7", "+7", "7.5", "now", "", "1e3", "-", "earliest "])
def test_what_is_no_start_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        start_of(text, "/query/from")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2026-01-02T03:04:05 02:00", "%2B"),
        ("2026-01-02 03:04:05Z", "RFC 3339"),
        ("2026-01-02", "RFC 3339"),
        ("2026-01-02T03:04:05", "RFC 3339 time with a time zone"),
        ("2026-13-02T03:04:05Z", "RFC 3339"),
        ("2026-02-30T00:00:00Z", "RFC 3339"),
        ("0001-01-01T00:00:00+23:59", "RFC 3339"),
        ("2026-01-02T03:04:05." + "0" * 40 + "Z", "RFC 3339"),
        (f"-{2**63}", "must be an integer"),
    ],
)
def test_what_is_no_time_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        start_of(text, "/query/from")


@pytest.mark.parametrize("value", [None, True, 1.5, "7", "-7", [], 2**63, -(2**63)])
def test_a_socket_takes_numbers_as_numbers(value: object) -> None:
    with pytest.raises(InvalidRequest):
        start_of_json(value, "/tail/from")


async def test_append_times_do_not_go_back_behind_an_end_that_is_lost() -> None:
    """What is left of the ledger tells the least time of what was lost (rule 26b)."""
    async with a_cluster() as (cluster, (one, two)):
        one.skew_ms = 50_000
        for value in ("a", "b"):
            await one.logs.append("log", call(value))
        one.kill()
        await two.recover(1)
        give_up(cluster, 1, 1, 1)

        after = await two.logs.append("log", call("c"))

        first = (await two.logs.reader.read("log", 0)).records[0]
        last = (await two.logs.reader.read("log", after.first_offset)).records[0]
        assert last.timestamp_ms >= first.timestamp_ms
        found = await two.logs.reader.read("log", Since(first.timestamp_ms), limit=1)
        assert found.records[0].offset == 0
