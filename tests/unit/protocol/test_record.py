"""Runs of entries as bytes: round trips, digests, parts, damage. Rules 1 and 2."""

import dataclasses
import itertools
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import record
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import BadRun, Codec, Entry, Run, make, merge, pack

CODECS = {
    DigestKind.NONE: Codec(DigestKind.NONE),
    DigestKind.CRC32C: Codec(DigestKind.CRC32C),
    DigestKind.HMAC_SHA256: Codec(DigestKind.HMAC_SHA256, b"mac key"),
}
kinds = st.sampled_from(list(CODECS))
batches = st.lists(st.binary(max_size=40), min_size=1, max_size=12)


def made(payloads: Sequence[bytes], kind: DigestKind = DigestKind.CRC32C, first: int = 3) -> Run:
    return make(
        ledger_id=9,
        first_entry=first,
        last_add_confirmed=first - 2,
        length_before=100,
        payloads=payloads,
        codec=CODECS[kind],
    )


@given(batches, kinds, st.integers(0, 2**62))
def test_a_run_comes_back_from_its_bytes_as_it_was(
    payloads: list[bytes], kind: DigestKind, first: int
) -> None:
    run = made(payloads, kind, first)
    again = Run(run.body)

    assert again == run
    assert (again.first, again.last, again.count) == (
        first,
        first + len(payloads) - 1,
        len(payloads),
    )
    assert [bytes(again.payload(index)) for index in range(again.count)] == payloads
    assert again.last_length == 100 + sum(map(len, payloads))
    assert again.last_add_confirmed == first - 2
    assert again.payload_bytes == sum(map(len, payloads))
    assert again.invalid(CODECS[kind]) == []
    assert pack(list(again.entries()), kind) == run


@given(batches, kinds, st.sets(st.integers(0, 5), min_size=1))
def test_a_part_of_a_run_keeps_the_bytes_of_its_entries(
    payloads: list[bytes], kind: DigestKind, residues: set[int]
) -> None:
    run = made(payloads, kind)
    part = run.where(lambda entry_id: entry_id % 6 in residues)
    expected = [entry for entry in run.entries() if entry.entry_id % 6 in residues]

    if part is None:
        assert expected == []
    else:
        assert list(Run(part.body).entries()) == expected
        assert part.invalid(CODECS[kind]) == []


@given(batches, kinds)
def test_parts_merge_to_the_run_they_are_of(payloads: list[bytes], kind: DigestKind) -> None:
    run = made(payloads, kind)
    parts = [run.where(lambda e, r=r: e % 3 != r) for r in range(3)]  # type: ignore[misc]
    assert merge(part for part in parts if part is not None) == run or len(payloads) == 0


@given(batches, st.sampled_from([DigestKind.CRC32C, DigestKind.HMAC_SHA256]), st.data())
def test_any_changed_byte_of_an_entry_is_noticed(
    payloads: list[bytes], kind: DigestKind, data: st.DataObject
) -> None:
    """Ids, LAC, length, digest and payload: the digest covers them all (BookKeeper: DigestManager)."""
    run = made(payloads, kind)
    at = data.draw(st.integers(8, len(run.body) - 1), label="place")
    change = data.draw(st.integers(1, 255), label="change")
    body = bytearray(run.body)
    body[at] ^= change

    try:
        damaged = Run(bytes(body))
    except BadRun:
        return
    assert damaged.invalid(CODECS[kind]) != []


def test_another_key_or_another_kind_of_digest_is_not_valid() -> None:
    run = made([b"a"], DigestKind.HMAC_SHA256)
    assert run.invalid(Codec(DigestKind.HMAC_SHA256, b"other")) == [3]
    assert run.invalid(CODECS[DigestKind.CRC32C]) == [3]


def test_a_run_is_valid_under_its_own_kind_of_digest_only() -> None:
    for kind in CODECS:
        run = made([b"a", b"b"], kind)
        for codec in CODECS.values():
            assert run.invalid(codec) == ([] if codec.kind is kind else [3, 4])


def test_an_entry_is_found_where_it_stands_in_a_run_with_holes_and_without() -> None:
    whole = made([b"a", b"b", b"c"])
    assert [whole.index(entry_id) for entry_id in range(2, 7)] == [None, 0, 1, 2, None]

    holes = whole.where(lambda entry_id: entry_id != 4)
    assert holes is not None
    assert [holes.index(entry_id) for entry_id in range(2, 7)] == [None, 0, None, 1, None]


def test_runs_are_equal_by_their_bytes() -> None:
    run = made([b"a"])
    assert run == Run(run.body)
    assert run != made([b"b"])
    assert run != run.body


def test_the_confirmed_entry_of_a_run_is_the_greatest_that_its_entries_carry() -> None:
    run = merge([made([b"a"], first=3), made([b"b"], first=4), made([b"c"], first=5)])
    assert run is not None
    assert run.last_add_confirmed == 3


def test_no_runs_merge_to_none() -> None:
    assert merge([]) is None


def test_the_digest_covers_header_and_payload_as_bookkeepers_does() -> None:
    run = made([b"abc"])
    (entry,) = run.entries()
    head = struct.pack(">qqqq", 9, 3, 1, 103)
    assert entry == Entry(9, 3, 1, 103, CODECS[DigestKind.CRC32C].digest(head, b"abc"), b"abc")


def test_crc32c_is_castagnolis() -> None:
    """The check value of the catalogue of CRC algorithms."""
    digest = CODECS[DigestKind.CRC32C].digest(b"1234", b"56789")
    assert digest.hex() == "e3069283"


@given(st.binary(max_size=200))
def test_bytes_that_are_no_run_are_refused_and_nothing_else_happens(body: bytes) -> None:
    try:
        run = Run(body)
    except BadRun:
        return
    assert run.count >= 1


@given(batches, st.data())
def test_a_run_that_is_cut_short_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    body = made(payloads).body
    size = data.draw(st.integers(0, len(body) - 1), label="size")
    with pytest.raises(BadRun):
        Run(body[:size])


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 2), (1, 3), (3, 1), (7, 0), (8, 0x80)],
    ids=["format", "digest", "zero", "no entries", "ledger below 0"],
)
def test_a_head_that_no_writer_makes_is_refused(at: int, value: int) -> None:
    body = bytearray(made([b"a"], DigestKind.NONE).body)
    body[at] = value
    with pytest.raises(BadRun):
        Run(bytes(body))


def test_ids_out_of_order_or_below_zero_are_refused() -> None:
    entries = list(made([b"a", b"b", b"c"]).entries())
    for wrong in ([entries[1], entries[0]], [entries[0], entries[2], entries[1]], [entries[0]] * 2):
        with pytest.raises(BadRun):
            Run(pack_unchecked(wrong))
    with pytest.raises(BadRun):
        Run(pack_unchecked([Entry(9, -1, -1, 0, b"\0\0\0\0", b"")]))


def pack_unchecked(entries: list[Entry]) -> bytes:
    count = len(entries)
    return b"".join(
        (
            struct.pack(">BBHIq", 1, 1, 0, count, entries[0].ledger_id),
            struct.pack(f">{count}q", *[e.entry_id for e in entries]),
            struct.pack(f">{count}q", *[e.last_add_confirmed for e in entries]),
            struct.pack(f">{count}q", *[e.length for e in entries]),
            struct.pack(f">{count}I", *[len(e.payload) for e in entries]),
            *[e.digest for e in entries],
            *[e.payload for e in entries],
        )
    )


# --- columns -------------------------------------------------------------------------------------


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
