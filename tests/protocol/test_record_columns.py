"""The quick way to make a run gives the very bytes of the plain one."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import record
from quorumlog.protocol.metadata import DigestKind

PAYLOADS = st.lists(st.binary(max_size=50), min_size=1, max_size=20)


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
