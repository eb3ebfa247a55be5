"""The quick way to make a run gives the very bytes of the plain one."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import record
from quorumlog.protocol.metadata import DigestKind

ONE_SIZE = st.integers(0, 9).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=20)
)
PAYLOADS = st.one_of(st.lists(st.binary(max_size=50), min_size=1, max_size=20), ONE_SIZE)


@given(
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(-1, 2**62),
    st.integers(0, 2**62),
    PAYLOADS,
    st.sampled_from(list(DigestKind)),
)
def test_a_run_of_new_entries_is_the_run_of_its_entries(
    ledger_id: int,
    first_entry: int,
    lac: int,
    length_before: int,
    payloads: list[bytes],
    kind: DigestKind,
) -> None:
    codec = record.Codec(kind, b"mac key")
    made = record.make(
        ledger_id=ledger_id,
        first_entry=first_entry,
        last_add_confirmed=lac,
        length_before=length_before,
        payloads=payloads,
        codec=codec,
    )

    entries = list(made.entries())
    assert record.pack(entries, kind) == made
    assert made.invalid(codec) == []
    assert [entry.payload for entry in entries] == payloads
    assert [entry.entry_id for entry in entries] == [
        *range(first_entry, first_entry + len(payloads))
    ]
    lengths = itertools.accumulate(map(len, payloads), initial=length_before)
    assert [entry.length for entry in entries] == list(lengths)[1:]
    assert {entry.last_add_confirmed for entry in entries} == {lac}
    assert {entry.ledger_id for entry in entries} == {ledger_id}


@given(PAYLOADS, st.data())
def test_a_damaged_entry_is_named_and_no_other(payloads: list[bytes], data: st.DataObject) -> None:
    for kind in (DigestKind.CRC32C, DigestKind.HMAC_SHA256):
        codec = record.Codec(kind, b"mac key")
        made = record.make(
            ledger_id=1,
            first_entry=5,
            last_add_confirmed=4,
            length_before=9,
            payloads=payloads,
            codec=codec,
        )
        index = data.draw(st.integers(0, len(payloads) - 1))
        entries = list(made.entries())
        damaged = entries[index]
        payload = damaged.payload + b"!"
        entries[index] = record.Entry(
            damaged.ledger_id,
            damaged.entry_id,
            damaged.last_add_confirmed,
            damaged.length,
            damaged.digest,
            payload,
        )

        assert record.pack(entries, kind).invalid(codec) == [damaged.entry_id]


@pytest.mark.parametrize("count", [1, 2, 9_999, 10_000, 10_001])
@pytest.mark.parametrize("size", [0, 1])
def test_a_run_of_any_count_has_the_columns_of_its_entries(count: int, size: int) -> None:
    codec = record.Codec(DigestKind.CRC32C)
    first, length = 2**63 - 1 - count, 2**62
    made = record.make(
        ledger_id=1,
        first_entry=first,
        last_add_confirmed=first - 1,
        length_before=length,
        payloads=[b"p" * size] * count,
        codec=codec,
    )

    read = record.Run(made.body)
    assert read.ids == range(first, first + count)
    assert read.invalid(codec) == []
    assert read.last_length == length + count * size
    assert read.last_add_confirmed == first - 1
    assert record.pack(list(made.entries()), codec.kind) == made


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 1, 998, 999])
def test_a_column_with_one_other_number_is_read_as_it_is(column: int, place: int) -> None:
    codec = record.Codec(DigestKind.CRC32C)
    made = record.make(
        ledger_id=1,
        first_entry=5,
        last_add_confirmed=4,
        length_before=0,
        payloads=[bytes(3)] * 1000,
        codec=codec,
    )
    entries = list(made.entries())
    entry = entries[place]
    if column == 0:
        entries[place] = dataclasses.replace(entry, payload=b"four")
    elif column == 1:
        entries[place] = dataclasses.replace(entry, last_add_confirmed=1000)
    else:
        entries[place] = dataclasses.replace(entry, entry_id=entry.entry_id + 10_000)

    if column == 2 and place != 999:
        with pytest.raises(record.BadRun):
            record.pack(entries, codec.kind)
        return
    other = record.pack(entries, codec.kind)
    assert list(other.entries()) == entries
    assert other.invalid(codec) == [entries[place].entry_id]
    assert other.last_add_confirmed == (1000 if column == 1 else 4)


@pytest.mark.parametrize("count", [2, 3, 1000])
def test_ids_that_would_reach_beyond_the_greatest_are_refused(count: int) -> None:
    entry = record.Entry(1, 2**63 - 1, 0, 0, bytes(4), b"")
    whole = record.pack([entry] * 1, DigestKind.CRC32C).body
    at = record.columns(count, whole[1])
    body = bytearray(at.payloads)
    body[: record.HEAD.size] = record.HEAD.pack(record.FORMAT, whole[1], 0, count, 1)
    for index in range(count):
        # What a progression's sum would be, whose numbers reach into each other.
        number = (2**63 - 1 + index) % 2**64
        body[8 * index + at.ids : 8 * index + at.ids + 8] = number.to_bytes(8, "big")

    with pytest.raises(record.BadRun):
        record.Run(bytes(body))
