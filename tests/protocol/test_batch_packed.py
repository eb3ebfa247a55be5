"""Packed record batches: the same records, a head that needs no unpacking, and no more memory than the head says."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import BATCH_BYTES_MAX, BadBatch, ProducerSeq, Record
from quorumlog.zstd import zstd
from tests.protocol.test_batch import PRODUCERS, RECORDS

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
    with pytest.raises(BadBatch, match="unpacked"):
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
