"""Guards of a bookie's files that no other test would miss; `make mutate` found them."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from loadtest.ports import free_ports
from loadtest.stores import scratch
from quorumlog.net.metadata_client import MetadataClient
from services.bookie.collect import MetadataRows
from services.bookie.config import StoreOptions
from services.bookie.directory import Disk
from services.bookie.log import (
    BATCH_HEAD,
    SECTOR,
    Kind,
    QueuedRecord,
    SegmentHead,
    Stop,
    encode_batch,
    parse_segment_head,
    read_batches,
)
from services.bookie.parts import Part, mask_of
from services.bookie.witnesses import FreshCopies
from tests.bookie.support import started

HEAD = SegmentHead(segment=1, nonce=5, first_sequence=1, previous_end=0, allocated=1 << 20)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch("ql-files-") as path:
        yield path


def batch(body: bytes) -> bytes:
    """A batch of one record, at the beginning of what is read."""
    record = QueuedRecord(Kind.FENCE, 7, (body,), len(body))
    made = encode_batch(HEAD, offset=0, sequence=1, synced_below=0, records=[record])
    return b"".join(made)


def stop_of(data: bytes) -> Stop:
    """Why nothing more is read."""
    (last,) = read_batches(HEAD, data, 0)
    assert isinstance(last, Stop)
    return last


# --- where a log ends ------------------------------------------------------------------------


def test_a_file_too_short_for_a_head_is_no_segment() -> None:
    whole = HEAD.encode()
    assert parse_segment_head(whole) == HEAD
    for size in (0, 1, len(whole) - 1):
        assert parse_segment_head(whole[:size]) is None


def test_where_nothing_was_written_the_log_ends() -> None:
    stop = stop_of(bytes(3 * SECTOR))

    assert (stop.is_blank, stop.offset) == (True, 0)


def test_a_batch_that_the_file_cuts_short_looks_torn() -> None:
    whole = batch(b"x" * SECTOR)
    for kept in (BATCH_HEAD.size - 1, len(whole) - 1):
        assert stop_of(whole[:kept]).looks_torn


def test_damage_of_a_batch_that_is_all_there_does_not_look_torn() -> None:
    """Also where the file ends with it: what does not look torn may have been acknowledged."""
    whole = bytearray(batch(b"x" * SECTOR))
    whole[-1] ^= 1

    stop = stop_of(bytes(whole))

    assert (stop.is_blank, stop.looks_torn) == (False, False)


def test_a_damaged_head_does_not_look_torn_for_what_is_blank_after_its_batch() -> None:
    """A segment is blank behind its last batch: its room was given to it before."""
    whole = bytearray(batch(b"x" * 2 * SECTOR))
    whole[0] ^= 1

    assert not stop_of(bytes(whole)).looks_torn
    assert not stop_of(bytes(whole) + bytes(4 * SECTOR)).looks_torn
    assert stop_of(bytes(SECTOR) + bytes(whole)[SECTOR:]).looks_torn


# --- parts, free space, rows -----------------------------------------------------------------


def test_a_part_with_holes_has_nothing_beside_its_entries() -> None:
    ids = [10, 12, 13]
    part = Part(10, 13, mask_of(ids))

    for first in range(6, 18):
        for last in range(first, 18):
            wanted = any(first <= entry_id <= last for entry_id in ids)
            assert part.has_any(first, last) is wanted


def test_low_space_is_told_once_and_so_is_its_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "log").mkdir()
    caplog.set_level(logging.INFO, logger="services.bookie.directory")

    def told(space: int) -> list[str]:
        caplog.clear()
        disk.options = options(space)
        for _ in range(2):
            disk.check(is_stuck=False)
        return [record.message for record in caplog.records]

    def options(space: int) -> StoreOptions:
        return StoreOptions(
            data_bytes_max=space, warn_below_bytes=400_000, read_only_below_bytes=0, reserve_bytes=0
        )

    disk = Disk(folder, options(500_000))
    assert told(500_000) == []
    assert told(400_000) == []
    assert told(399_999) == ["disk-low"]
    assert told(499_999) == []
    assert told(500_000) == ["disk-low-no-more"]


async def test_a_row_that_cannot_be_read_is_not_known() -> None:
    """Rule 18: nothing is dropped for want of an answer."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with aiohttp.ClientSession() as session:
        rows = MetadataRows(MetadataClient([url], session, deadline_s=0.05, try_s=0.05))
        rows.present(FreshCopies(), "b1", "cluster")

        assert await rows.read({7: ()}) == {}
        assert rows.missing_count == 0


async def test_an_answer_waits_for_its_own_record_and_not_for_an_earlier_one(folder: Path) -> None:
    """Rule 3: the disk takes batches, and an answer belongs to one of them."""
    store = started(folder / "d")
    ledger = store.holdings.ledger(7)
    heard: list[int] = []
    before = ledger.replica.synced_count
    for number in (1, 2, 3):
        ledger.when_synced(before + number, partial(heard.append, number))

    ledger.on_synced(1)
    assert heard == [1]
    assert not ledger.is_idle
    ledger.on_synced(2)
    assert heard == [1, 2, 3]
    await store.stop()
