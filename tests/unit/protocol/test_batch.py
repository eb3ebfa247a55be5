"""Record batches, packed ones too: what goes in comes out, and garbage is refused."""

import os
import struct
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import BATCH_BYTES_MAX, BadBatch, ProducerSeq, Record
from quorumlog.zstd import zstd

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
RECORDS = st.lists(
    st.builds(
        batch.Record,
        value=st.binary(max_size=50),
        key=st.none() | st.binary(max_size=20),
        headers=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
        timestamp_ms=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
        ttl_s=st.just(0) | st.integers(1, batch.TTL_S_MAX),
    )
    | st.builds(
        batch.Record, value=st.just(b""), key=st.binary(max_size=20), is_tombstone=st.just(True)
    ),
    min_size=1,
    max_size=8,
)
PRODUCERS = st.none() | st.builds(
    batch.ProducerSeq,
    id=TEXT,
    epoch=st.integers(0, 2**63 - 1),
    seq=st.integers(0, 2**63 - 1),
)


@given(RECORDS, PRODUCERS, st.integers(0, 2**53), st.booleans())
def test_a_batch_is_read_as_it_was_written(
    records: list[batch.Record], producer: batch.ProducerSeq | None, before: int, after: bool
) -> None:
    data = batch.encode(records, producer)
    data = batch.placed(data, append_time_ms=7, records_before=before, after_producer=after)

    head, read = batch.decode(data)

    has_ttls = any(record.ttl_s for record in records)
    assert head == batch.BatchHead(len(records), 7, before, producer, after, has_ttls=has_ttls)
    assert head == batch.decode_head(data)
    assert head.records_after == before + len(records)
    assert read == records


@given(RECORDS, PRODUCERS, st.integers(0, 2**53), st.booleans())
def test_only_the_last_place_of_a_batch_counts(
    records: list[batch.Record], producer: batch.ProducerSeq | None, before: int, after: bool
) -> None:
    data = batch.encode(records, producer)
    other = batch.placed(data, append_time_ms=9, records_before=5, after_producer=not after)

    first, second = (
        batch.placed(each, append_time_ms=7, records_before=before, after_producer=after)
        for each in (data, other)
    )

    assert first == second


@given(RECORDS, PRODUCERS, RECORDS)
def test_the_content_is_what_was_sent_and_not_where_it_went(
    records: list[batch.Record], producer: batch.ProducerSeq | None, others: list[batch.Record]
) -> None:
    first, other = batch.encode(records), batch.encode(others)
    moved = batch.encode(records, producer)
    moved = batch.placed(moved, append_time_ms=9, records_before=5, after_producer=True)

    assert batch.content(first) == batch.content(moved)
    assert (batch.content(first) == batch.content(other)) == (records == others)


@given(RECORDS, PRODUCERS, st.data())
def test_a_batch_cut_short_or_grown_is_refused(
    records: list[batch.Record], producer: batch.ProducerSeq | None, data: st.DataObject
) -> None:
    whole = batch.encode(records, producer)
    cut = data.draw(st.integers(0, len(whole) - 1))

    for damaged in (whole[:cut], whole + b"\0"):
        with pytest.raises(batch.BadBatch):
            batch.decode(damaged)


@given(RECORDS, st.data())
def test_a_batch_that_was_opened_can_be_decoded(
    records: list[batch.Record], data: st.DataObject
) -> None:
    damaged = bytearray(batch.encode(records))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    try:
        opened = batch.opened(bytes(damaged))
    except batch.BadBatch:
        return
    assert len(opened.records) == opened.count


@given(RECORDS, PRODUCERS, st.data())
def test_a_part_of_a_batch_has_the_records_in_it_and_no_other_bytes(
    records: list[batch.Record], producer: batch.ProducerSeq | None, data: st.DataObject
) -> None:
    skip = data.draw(st.integers(0, len(records) - 1))
    count = data.draw(st.integers(1, len(records) - skip))
    stored = batch.placed(batch.encode(records, producer), append_time_ms=7, records_before=5)

    part = batch.opened(stored).part(skip, count)

    assert part.records == records[skip : skip + count]
    assert [bytes(value) for value in part.values] == [r.value for r in part.records]
    assert bytes(part.joined_values) == b"".join(r.value for r in part.records)
    assert (part.head.append_time_ms, part.head.records_before) == (7, 5 + skip)
    assert part.head.producer is None
    assert len(part.data) <= len(stored)


@given(RECORDS, st.data())
def test_what_fits_is_counted_by_record(records: list[batch.Record], data: st.DataObject) -> None:
    skip = data.draw(st.integers(0, len(records) - 1))
    bytes_max = data.draw(st.integers(1, 10_000))
    found = batch.opened(batch.encode(records))

    count, size = found.fitting(skip, len(records) - skip, bytes_max, 64)

    sizes = [found.part(at, 1).size + 64 for at in range(skip, len(records))]
    assert size == sum(sizes[:count])
    assert count == 1 or sum(sizes[: count - 1]) < bytes_max
    assert count == len(sizes) or size >= bytes_max


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_batch_or_a_batch_never_another_error(data: bytes) -> None:
    try:
        head, records = batch.decode(data)
    except batch.BadBatch:
        return
    assert head.count == len(records)


# --- guards that no other test would miss: `make mutate` found them ------------------------------


PLAIN = batch.encode([batch.Record(b"a")])
HEAD_BYTES = len(PLAIN) - 4 - 1
"""What stands before the size of the only value, and the value."""


def with_headers(raw: bytes) -> bytes:
    """A batch of one record whose headers are these bytes."""
    whole = batch.encode([batch.Record(b"", headers=(("", ""),))])
    sizes = struct.pack(">II", len(raw), 0)
    return whole[:HEAD_BYTES] + sizes + raw


def test_a_batch_has_only_the_columns_that_its_records_need() -> None:
    found = batch.opened(PLAIN)
    assert (found.times_at, found.key_sizes_at, found.header_sizes_at) == (None, None, None)
    assert len(PLAIN) == HEAD_BYTES + 4 + 1

    records = [batch.Record(b"a", b"k", (("h", "v"),), 5), batch.Record(b"b")]
    found = batch.opened(batch.encode(records))
    assert None not in (found.times_at, found.key_sizes_at, found.header_sizes_at)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"\2"), (1, bytes([32])), (2, b"\0\x20"), (4, bytes(4)), (16, b"\x80")],
    ids=["version", "flags", "marks", "no records", "records before"],
)
def test_a_head_that_no_writer_makes_is_refused(at: int, value: bytes) -> None:
    """By whoever reads the head alone, too."""
    damaged = PLAIN[:at] + value + PLAIN[at + len(value) :]

    for read in (batch.decode, batch.decode_head, batch.opened, batch.content):
        with pytest.raises(batch.BadBatch):
            read(damaged)


def test_a_head_of_more_records_than_the_batch_has_room_for_is_refused() -> None:
    """Before anything is made for each of them."""
    many = [batch.Record(b"")] * 5
    full = batch.encode(many)
    assert batch.decode(full)[1] == many
    assert batch.decode_head(full).count == len(many)

    damaged = full[:4] + struct.pack(">I", len(many) + 1) + full[8:]
    for read in (batch.decode, batch.decode_head):
        with pytest.raises(batch.BadBatch):
            read(damaged)


def test_a_key_of_less_than_no_bytes_is_refused() -> None:
    whole = batch.encode([batch.Record(b"v", b"")])
    for size in (-2, -(2**31)):
        damaged = whole[:HEAD_BYTES] + struct.pack(">i", size) + whole[HEAD_BYTES + 4 :]
        with pytest.raises(batch.BadBatch):
            batch.decode(damaged)


@pytest.mark.parametrize(
    "raw",
    [b"\0\1", b"\0\2a", b"\0\1a", b"\0\1a\0\1", b"\0\1\xff\0\1\xff", b"\0"],
    ids=["text", "text in part", "value", "value's text", "UTF-8", "size"],
)
def test_headers_cut_short_or_no_text_are_a_bad_batch(raw: bytes) -> None:
    with pytest.raises(batch.BadBatch):
        batch.decode(with_headers(raw))


def test_headers_are_pairs_of_texts() -> None:
    assert batch.decode(with_headers(b"\0\1a\0\2bc"))[1][0].headers == (("a", "bc"),)


# --- packed batches ------------------------------------------------------------------------------


ORDERS = [
    Record(b'{"order":%d,"state":"accepted"}' % number, b"k%d" % number, (("h", "v"),), number)
    for number in range(100)
]
ME = ProducerSeq("me", 3, 4)


@given(RECORDS, PRODUCERS, st.integers(0, 2**53), st.booleans())
def test_a_packed_batch_has_the_records_the_head_and_the_content_of_the_plain_one(
    records: list[Record], producer: ProducerSeq | None, before: int, after: bool
) -> None:
    plain = batch.encode([*records, *ORDERS], producer)
    found = packed.pack(plain)
    assert batch.is_packed(found)
    assert len(found) < len(plain)

    placed = batch.placed(found, append_time_ms=7, records_before=before, after_producer=after)
    expected = batch.placed(plain, append_time_ms=7, records_before=before, after_producer=after)

    assert batch.decode_head(placed) == batch.decode_head(expected)
    assert packed.unpack(placed) == expected
    assert packed.unpack(expected) == expected
    assert packed.pack(placed) == placed
    if producer is not None:
        assert batch.content(placed) == batch.content(expected)


def test_a_batch_that_does_not_shrink_stays_plain() -> None:
    for records in ([Record(b"")], [Record(b"short")], [Record(os.urandom(5000))]):
        data = batch.encode(records)
        assert packed.pack(data) is data


def test_the_head_is_read_without_unpacking() -> None:
    """A takeover reads heads and contents of all batches since the last snapshot."""
    data = packed.pack(batch.encode(ORDERS, ME))
    at = data.index(zstd.compress(b"")[:4])
    damaged = data[:at] + bytes(len(data) - at)
    assert batch.decode_head(damaged) == batch.decode_head(data)
    assert batch.content(damaged) == batch.content(batch.encode(ORDERS, ME))
    with pytest.raises(BadBatch, match="decompress"):
        packed.unpack(damaged)


def test_who_does_not_unpack_is_told() -> None:
    data = packed.pack(batch.encode(ORDERS))
    for read in (batch.decode, batch.opened, batch.content):
        with pytest.raises(BadBatch, match="packed"):
            read(data)


@pytest.mark.parametrize("producer", [None, ME])
def test_a_packed_batch_that_was_cut_or_grew_is_refused(producer: ProducerSeq | None) -> None:
    whole = packed.pack(batch.encode(ORDERS, producer))
    for damaged in (*(whole[:size] for size in range(2, len(whole))), whole + b"\0", whole * 2):
        with pytest.raises(BadBatch):
            batch.decode(packed.unpack(damaged))


@given(st.data())
def test_changed_bytes_are_another_batch_or_none(data: st.DataObject) -> None:
    damaged = bytearray(packed.pack(batch.encode(ORDERS, ME)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        plain = packed.unpack(bytes(damaged))
        head, records = batch.decode(plain)
    except BadBatch:
        return
    assert len(records) == head.count


@pytest.mark.parametrize("claimed", [100, 1 << 20, BATCH_BYTES_MAX, BATCH_BYTES_MAX + 1, 2**32 - 1])
def test_a_batch_unpacks_to_no_more_than_its_head_says(claimed: int) -> None:
    """And a head may say no more than a batch has."""
    bomb = zstd.compress(bytes(64 << 20))
    plain = batch.encode([Record(b"")])
    head = bytes([plain[0], plain[1] | 32]) + plain[2 : batch.columns_begin(plain)]
    with pytest.raises(BadBatch):
        packed.unpack(head + claimed.to_bytes(4, "big") + bomb)


def test_a_batch_of_greatest_length_is_packed_and_a_longer_one_is_not() -> None:
    most = batch.encode([Record(bytes(BATCH_BYTES_MAX - len(batch.encode([Record(b"")]))))])
    assert len(most) == BATCH_BYTES_MAX
    assert packed.unpack(packed.pack(most)) == most
    assert len(packed.pack(most)) < 10_000
    longer = batch.encode([Record(bytes(BATCH_BYTES_MAX))])
    assert packed.pack(longer) is longer


@given(RECORDS, PRODUCERS, st.data())
def test_a_thinned_batch_has_the_records_that_stay_at_their_offsets(
    records: list[batch.Record], producer: batch.ProducerSeq | None, data: st.DataObject
) -> None:
    """Rule 27d: it covers the offsets of the removed ones, and those of a gap before it."""
    numbers = st.integers(0, len(records) - 1)
    kept = sorted(data.draw(st.sets(numbers, min_size=1)))
    gap = data.draw(st.integers(0, 3))
    stored = batch.placed(
        batch.encode(records, producer), append_time_ms=7, records_before=9, seq="s"
    )
    head = batch.decode_head(stored)

    thinned = batch.opened(stored).thinned(head, kept, gap)
    again = packed.unpack(packed.pack(thinned))
    found = batch.opened(again)

    assert again == thinned
    assert (found.head.count, found.head.records_before) == (len(records) + gap, 9 - gap)
    assert (found.head.append_time_ms, found.head.seq, found.head.producer) == (7, "s", None)
    assert found.head.has_gaps
    assert [*found.indexes] == [gap + number for number in kept]
    assert found.records == [records[number] for number in kept]
    for begin, end in found.runs(range(found.count)):
        part = found.part(begin, end - begin)
        assert not part.head.has_gaps
        assert part.head.records_before == 9 - gap + found.indexes[begin]
        assert part.records == found.records[begin:end]

    fewer = sorted(data.draw(st.sets(st.integers(0, len(kept) - 1), min_size=1)))
    last = batch.opened(found.thinned(found.head, fewer, 0))
    assert last.records == [records[kept[number]] for number in fewer]
    assert [*last.indexes] == [found.indexes[number] for number in fewer]


def test_a_batch_without_records_covers_offsets() -> None:
    """Rule 27d."""
    stored = batch.placed(
        batch.encode([batch.Record(b"v", b"k")]), append_time_ms=7, records_before=9, seq="s"
    )

    found = batch.opened(batch.emptied(batch.decode_head(stored), 6))

    assert (found.records, [*found.runs(())], found.size) == ([], [], 0)
    assert (found.head.count, found.head.records_before, found.head.records_after) == (6, 4, 10)
    assert (found.head.append_time_ms, found.head.seq) == (7, "s")


@pytest.mark.parametrize("indexes", [(1, 1), (2, 1), (0, 3)])
def test_indexes_that_do_not_ascend_within_the_batch_are_refused(indexes: tuple[int, int]) -> None:
    stored = batch.encode([batch.Record(b"a"), batch.Record(b"b"), batch.Record(b"c")])
    thinned = bytearray(batch.opened(stored).thinned(batch.decode_head(stored), (0, 2), 0))
    at = thinned.index(b"\0\0\0\2\0\0\0\0\0\0\0\2")
    thinned[at + 4 : at + 12] = b"".join(index.to_bytes(4, "big") for index in indexes)

    with pytest.raises(batch.BadBatch, match="must ascend"):
        batch.opened(bytes(thinned))


def test_more_indexes_than_the_batch_has_room_for_are_refused() -> None:
    head = batch.decode_head(batch.encode([batch.Record(b"")]))
    emptied = bytearray(batch.emptied(head, 1))
    emptied[-4:] = b"\xff\xff\xff\xff"

    with pytest.raises(batch.BadBatch, match="truncated in its indexes"):
        batch.opened(bytes(emptied))
    with pytest.raises(batch.BadBatch, match="truncated in its indexes"):
        batch.opened(bytes(emptied[:-1]))


def test_whether_each_record_has_a_key() -> None:
    keyed, plain = batch.Record(b"v", b"", timestamp_ms=3), batch.Record(b"v", timestamp_ms=3)

    assert batch.has_keys(batch.encode([keyed, keyed], ProducerSeq("p", 0, 0), seq="s"))
    assert batch.has_keys(batch.encode([], is_end=True))
    assert not batch.has_keys(batch.encode([keyed, plain]))
    assert not batch.has_keys(batch.encode([plain]))


def test_records_last_for_their_times_to_live() -> None:
    """Rule 27f."""
    records = [batch.Record(b"a", ttl_s=5), batch.Record(b"b"), batch.Record(b"c", ttl_s=7)]
    found = batch.opened(batch.encode(records))
    thinned = batch.opened(found.thinned(found.head, (0, 2), 0))
    plain = batch.encode([batch.Record(b"a"), batch.Record(b"b")])

    assert [found.lasting(1000, at) for at in (1000, 5999, 6000, 8000)] == [
        [0, 1, 2], [0, 1, 2], [1, 2], [1],
    ]  # fmt: skip
    assert [*found.runs((0, 2))] == [(0, 1), (2, 3)]
    assert (thinned.lasting(0, 5000), [*thinned.indexes]) == ([1], [0, 2])
    assert [*batch.opened(plain).lasting(0, 1 << 60)] == [0, 1]
    assert not batch.decode_head(batch.emptied(found.head, 2)).has_ttls


def test_one_time_to_live_for_all_records() -> None:
    records = [batch.Record(b"a", b"k"), batch.Record(b"b", timestamp_ms=4)]
    plain = batch.encode(records)
    columns = bytes(memoryview(plain)[batch.columns_begin(plain) :])
    encoded = batch.EncodedRecords(2, plain[1], columns).with_ttl(9)

    made = batch.opened(batch.encode(encoded)).records

    assert made == [batch.Record(b"a", b"k", ttl_s=9), batch.Record(b"b", timestamp_ms=4, ttl_s=9)]
    assert not batch.has_keys(batch.encode(encoded))


def test_parts_of_a_batch_cost_no_more_than_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thinned batch, readers get a part for each run of offsets: there may be thousands."""
    count, added = 2000, 0
    records = [Record(b"v", b"k", (("h", "x"),)) for _ in range(count)]
    data = batch.placed(batch.encode(records), append_time_ms=1, records_before=0)
    whole = batch.opened(data)
    found = batch.opened(whole.thinned(whole.head, range(0, count, 2), 0))

    def counted(sizes: Any, **options: Any) -> Any:
        nonlocal added
        added += len(sizes)
        return accumulate(sizes, **options)

    monkeypatch.setattr(batch, "accumulate", counted)
    parts = [found.part(begin, end - begin) for begin, end in found.runs(range(found.count))]

    assert [part.records for part in parts] == [[record] for record in records[::2]]
    assert added <= 10 * count
