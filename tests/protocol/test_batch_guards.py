"""Guards of the record batch that no other test would miss; `make mutate` found them."""

import struct

import pytest

from quorumlog.protocol import batch

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
    [(0, b"\2"), (1, bytes([32])), (2, b"\0\x08"), (4, bytes(4)), (16, b"\x80")],
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
