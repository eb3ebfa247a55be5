"""A data directory of a later release is refused with a sentence, and nothing in it is changed."""

import hashlib
import logging
from functools import partial
from pathlib import Path

import aiohttp
import orjson
import pytest

from loadtest.ports import free_ports
from quorumlog.net.metadata_client import MetadataClient
from services.bookie.collect import MetadataRows
from services.bookie.config import StoreOptions
from services.bookie.cookie import CookieRefused, read_cookie
from services.bookie.directory import FORMAT, DirectoryTooNew, Disk
from services.bookie.log import (
    BATCH_HEAD,
    SECTOR,
    Kind,
    LogDamaged,
    QueuedRecord,
    SegmentHead,
    Stop,
    encode_batch,
    parse_segment_head,
    read_batches,
)
from services.bookie.parts import Part, mask_of
from services.bookie.segments import Segments
from services.bookie.store import Store
from services.bookie.witnesses import FreshCopies
from tests.unit.bookie.support import add, batches_of, image, last_segment, opened, run_of, started


async def a_directory(root: Path) -> Path:
    """Of a bookie that was not stopped cleanly."""
    store = started(root / "d")
    await add(store, run_of(7, range(10)))
    copy = image(store, root / "copy")
    await store.stop()
    return copy


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("found", [str(FORMAT + 1), "", "x" * 1000, "0"])
async def test_a_directory_of_another_format_stays_as_it_is(root: Path, found: str) -> None:
    directory = await a_directory(root)
    (directory / "format").write_text(found)
    before = content(directory)

    with pytest.raises(DirectoryTooNew, match=r"Start the release that wrote it"):
        opened(directory)

    assert content(directory) == before


async def test_a_directory_that_names_the_present_format_is_opened(root: Path) -> None:
    directory = await a_directory(root)
    (directory / "format").write_text(f"{FORMAT}\n")

    opened(directory).close()


@pytest.mark.parametrize("body", [b"x" * 600, bytes(2000)], ids=["full", "with blank sectors"])
async def test_a_record_of_a_later_release_at_the_end_of_the_log_is_not_cut_as_a_torn_write(
    root: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await a_directory(root)
    path = last_segment(directory)
    last = batches_of(path)[-1]
    segments = Segments(directory / "log", 0)
    later = QueuedRecord(Kind.RUN, 7, (body,), len(body))
    monkeypatch.setattr(later, "kind", 99)
    batch = b"".join(
        encode_batch(
            segments.head(int(path.stem)),
            offset=last.end,
            sequence=last.sequence + 1,
            synced_below=last.synced_below,
            records=[later],
        )
    )
    with path.open("r+b") as file:
        file.seek(last.end)
        file.write(batch)
    log = {name: found for name, found in content(directory).items() if name.startswith("log/")}

    with pytest.raises(
        LogDamaged, match=r"a record has kind 99, which only a later release supports"
    ):
        opened(directory)

    assert {name: content(directory)[name] for name in log} == log


def test_a_cookie_of_a_later_release_is_refused_by_the_names_of_its_fields(root: Path) -> None:
    cookie = {
        "name": "b1",
        "incarnation": 1,
        "cluster_id": "c",
        "instance": "i",
        "directories": [],
        "boots": 1,
        "shards": 2,
    }
    (root / "cookie.json").write_bytes(orjson.dumps(cookie))

    with pytest.raises(CookieRefused, match=r"fields that this release does not know: shards\."):
        read_cookie(root)


# --- guards that no other test would miss: `make mutate` found them ------------------------------


HEAD = SegmentHead(segment=1, nonce=5, first_sequence=1, previous_end=0, allocated=1 << 20)


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


def test_low_space_and_its_end_are_told_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "log").mkdir()
    caplog.set_level(logging.INFO, logger="services.bookie.directory")

    def reported(space: int) -> list[str]:
        caplog.clear()
        disk.options = options(space)
        for _ in range(2):
            disk.check(is_stuck=False)
        return [record.message for record in caplog.records]

    def options(space: int) -> StoreOptions:
        return StoreOptions(
            data_bytes_max=space, warn_below_bytes=400_000, read_only_below_bytes=0, reserve_bytes=0
        )

    disk = Disk(root, options(500_000))
    assert reported(500_000) == []
    assert reported(400_000) == []
    assert reported(399_999) == ["disk-low"]
    assert reported(499_999) == []
    assert reported(500_000) == ["disk-low-no-more"]


async def test_a_row_that_cannot_be_read_is_not_known() -> None:
    """Rule 18: nothing is dropped for want of an answer."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with aiohttp.ClientSession() as session:
        rows = MetadataRows(MetadataClient([url], session, deadline_s=0.05, try_s=0.05))
        rows.present(FreshCopies(), "b1", "cluster")

        assert await rows.read({7: ()}) == {}
        assert rows.missing_count == 0


async def test_an_answer_waits_for_its_own_record_and_not_for_an_earlier_one(store: Store) -> None:
    """Rule 3: the disk takes batches, and an answer belongs to one of them."""
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
