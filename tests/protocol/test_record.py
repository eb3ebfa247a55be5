"""Runs of entries as bytes: round trips, digests, parts, damage. Rules 1 and 2."""

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_parts_merge_to_the_run_that_they_were_cut_from(
    payloads: list[bytes], kind: DigestKind
) -> None:
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
