"""Reads parts with few system calls, checks their CRCs, and cuts and joins them into one run.

Columns are sliced and joined without unpacking single entries, so the cost is per run.
"""

import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import google_crc32c

from quorumlog.net.framed import InPlace
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import HEAD, Entry, Run, columns, pack
from services.bookie.log import KEY_BYTES, crc_of
from services.bookie.parts import Part
from services.bookie.segments import SegmentFile, Segments

log = logging.getLogger(__name__)

_ID: Final = struct.Struct(">q")

GAP_BYTES_MAX: Final = 32 * 1024
"""Maximum gap between parts read by one call; by judgement, a gap costs less than a call."""

AHEAD_EXTENTS: Final = 32
"""Number of extents to read ahead: the best of 8, 32, 128 and 300, measured at 13 KB each."""

EXTENT_BYTES_MAX: Final = 4 * 1024 * 1024
_LARGE_BYTES: Final = 64 * 1024


Bytes = bytes | memoryview
"""Bytes of a run; a view if that saves a copy, since copies dominate a sequential read's cost."""


@dataclass(slots=True)
class Extent:
    """A stretch of a segment read by one call, and the parts in it."""

    file: SegmentFile | None
    start: int
    end: int
    parts: list[Part]


def extents(segments: Segments, parts: Iterable[Part]) -> list[Extent]:
    """The extents that contain these stored parts; an extent of a missing segment has no file."""
    made: list[Extent] = []
    last_segment = -1
    file: SegmentFile | None = None
    for part in sorted(parts, key=lambda part: (part.segment, part.offset)):
        end = part.offset + part.size
        if made and part.segment == last_segment:
            extent = made[-1]
            if part.offset - extent.end <= GAP_BYTES_MAX and end - extent.start <= EXTENT_BYTES_MAX:
                extent.parts.append(part)
                extent.end = max(end, extent.end)
                continue
        if part.segment != last_segment:
            last_segment = part.segment
            try:
                file = segments.reader(part.segment)
            except OSError:
                file = None
        made.append(Extent(file, part.offset, end, [part]))
    return made


def scratch() -> memoryview:
    """A reusable buffer for `read_cached`, because new memory costs more than a copy (measured)."""
    return memoryview(bytearray(EXTENT_BYTES_MAX))


def read_cached(extent: Extent, into: memoryview) -> Bytes | None:
    """The extent's bytes if the page cache has them, else None. Never waits for a disk. The bytes
    are valid until the next call with the same `into`.
    """
    if extent.file is None:
        return b""
    size = extent.end - extent.start
    data = into[:size] if size <= len(into) else memoryview(bytearray(size))
    try:
        got = os.preadv(extent.file.fd, [data], extent.start, os.RWF_NOWAIT)
    except (BlockingIOError, OSError):
        return None
    return data if got == size else None


def is_large(extent: Extent) -> bool:
    """Whether an extent is one large part. A large part's run gets a separate buffer."""
    return len(extent.parts) == 1 and extent.end - extent.start > _LARGE_BYTES


def read_large_cached(extent: Extent, ledger_id: int) -> list[tuple[Part, Bytes]] | None:
    """The run of a large extent, in a separate buffer; an empty list if the run is damaged. None if
    the run is not in the page cache. Never waits for a disk.
    """
    (part,) = extent.parts
    if extent.file is None:
        return list(bodies(extent, b"", ledger_id))
    key, run = bytearray(KEY_BYTES), InPlace(part.size - KEY_BYTES)
    try:
        got = os.preadv(extent.file.fd, [key, run.room()], extent.start, os.RWF_NOWAIT)
    except OSError:
        return None
    if got != part.size:
        return None
    run.advance(part.size - KEY_BYTES)
    body = run.value()
    if crc_of((bytes(key), body)) != part.crc:
        _report_damage(part, ledger_id)
        return []
    return [(part, body)]


def read_blocking(extent: Extent) -> Bytes:
    """The extent's bytes, from the disk if necessary; short or empty if the read fails."""
    if extent.file is None:
        return b""
    try:
        return os.pread(extent.file.fd, extent.end - extent.start, extent.start)
    except OSError:
        log.exception("log-unreadable", extra={"offset": extent.start})
        return b""


def advise(wanted: Iterable[Extent]) -> None:
    """Ask the kernel to fetch these extents. A disk reads scattered runs almost at sequential speed
    with many requests at once, and at a quarter of that speed one by one (measured).
    """
    for extent in wanted:
        if extent.file is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(
                    extent.file.fd, extent.start, extent.end - extent.start, os.POSIX_FADV_WILLNEED
                )


def read_all(
    wanted: list[Extent], ledger_id: int, *, is_advised: bool = False, from_disk: bool = False
) -> list[tuple[Part, Bytes]]:
    """Read all valid runs of parts in these extents. Blocks. `from_disk`: bypass the page cache.
    Only some extents are read ahead, because in a long disk queue the first read would wait for the
    last. `is_advised`: the caller has already requested read-ahead of all extents.
    """
    if from_disk:
        drop_from_page_cache(wanted)
    found: list[tuple[Part, Bytes]] = []
    for place, extent in enumerate(wanted):
        if place % AHEAD_EXTENTS == 0 and not is_advised:
            end = place + 2 * AHEAD_EXTENTS
            advise(wanted[0 if place == 0 else place + AHEAD_EXTENTS : end])
        found.extend(bodies(extent, read_blocking(extent), ledger_id))
    return found


def drop_from_page_cache(wanted: Iterable[Extent]) -> None:
    """Ask the kernel to drop these extents from its page cache, if they are on disk. Sizes are
    rounded up to pages, because the kernel would keep a partly covered page.
    """
    page = mmap.PAGESIZE
    for extent in wanted:
        if extent.file is not None:
            start = extent.start // page * page
            size = -(-extent.end // page) * page - start
            with contextlib.suppress(OSError):
                os.posix_fadvise(extent.file.fd, start, size, os.POSIX_FADV_DONTNEED)


def bodies(extent: Extent, data: Bytes, ledger_id: int) -> Iterable[tuple[Part, Bytes]]:
    """The run of each part with a valid CRC. Damaged parts are logged and left out: their entries
    are unknown, never absent.
    """
    for part in extent.parts:
        at = part.offset - extent.start
        body = bytes(data[at : at + part.size])
        if len(body) != part.size or google_crc32c.value(body) != part.crc:
            _report_damage(part, ledger_id)
            continue
        yield part, memoryview(body)[KEY_BYTES:]


def _report_damage(part: Part, ledger_id: int) -> None:
    log.error(
        "entries-damaged",
        extra={
            "ledger": ledger_id,
            "first": part.first,
            "last": part.last,
            "segment": part.segment,
            "offset": part.offset,
        },
    )


def _columns(body: Bytes, start: int, end: int) -> tuple[Bytes, ...]:
    """The columns of the entries with indexes start..end - 1 of a run, in the run's order."""
    _, kind, _, count, _ = HEAD.unpack_from(body)
    at = columns(count, kind)
    digest = at.digest_bytes
    if start == 0 and end == count:
        low, high = at.payloads, len(body)
    else:
        sizes = struct.unpack_from(f">{end}I", body, at.sizes)
        low = at.payloads + sum(sizes[:start])
        high = low + sum(sizes[start:])
    return (
        body[at.ids + 8 * start : at.ids + 8 * end],
        body[at.lacs + 8 * start : at.lacs + 8 * end],
        body[at.lengths + 8 * start : at.lengths + 8 * end],
        body[at.sizes + 4 * start : at.sizes + 4 * end],
        body[at.digests + digest * start : at.digests + digest * end],
        body[low:high],
    )


def join(found: list[tuple[Part, Bytes]], first: int, last: int, bytes_max: int) -> bytes | None:
    """Join the entries first..last of these runs into one run, up to about `bytes_max` of payload
    (at least one entry). None if there are no such entries.
    """
    found.sort(key=lambda item: item[0].first)
    heads = _plain_heads(found)
    if heads is None:
        return _join_entries(found, first, last, bytes_max)
    pieces: list[tuple[Bytes, ...]] = []
    size = joined = 0
    for (part, body), (count, run_first) in zip(found, heads, strict=True):
        start = max(first, part.first) - run_first
        end = min(last, part.last) + 1 - run_first
        room = bytes_max - size
        if len(body) > room:
            fitting = _fitting(body, start, end, room, is_first=not pieces)
            if fitting < end:
                if fitting > start:
                    pieces.append(_columns(body, start, fitting))
                    joined += fitting - start
                break
        if len(found) == 1 and start == 0 and end == count:
            return bytes(body)
        pieces.append(_columns(body, start, end))
        joined += end - start
        size += len(body)
    if not pieces:
        return None
    fmt, kind, zero, _, ledger_id = HEAD.unpack_from(found[0][1])
    head = HEAD.pack(fmt, kind, zero, joined, ledger_id)
    return b"".join((head, *chain.from_iterable(zip(*pieces, strict=True))))


def _plain_heads(found: list[tuple[Part, Bytes]]) -> list[tuple[int, int]] | None:
    """The count and first id of each run; None if runs have holes or differ in digest kind."""
    heads = []
    only_kind = None
    for part, body in found:
        _, kind, _, count, _ = HEAD.unpack_from(body)
        at = columns(count, kind)
        (run_first,) = _ID.unpack_from(body, at.ids)
        (run_last,) = _ID.unpack_from(body, at.lacs - 8)
        if only_kind is None:
            only_kind = kind
        if part.mask or run_last - run_first != count - 1 or kind != only_kind:
            return None
        heads.append((count, run_first))
    return heads


def _fitting(body: Bytes, start: int, end: int, room: int, *, is_first: bool) -> int:
    """The end index of the entries from index `start` on that fit into `room` bytes."""
    _, kind, _, count, _ = HEAD.unpack_from(body)
    sizes = struct.unpack_from(f">{count}I", body, columns(count, kind).sizes)
    place = start
    while place < end and (room >= sizes[place] or (is_first and place == start)):
        room -= sizes[place]
        place += 1
    return place


def _join_entries(
    found: list[tuple[Part, Bytes]], first: int, last: int, bytes_max: int
) -> bytes | None:
    """Variant of `join`, entry by entry, for runs with holes or of different digest kinds."""
    runs = [(part, Run(bytes(body))) for part, body in found]
    places = sorted(
        (entry_id, number, index)
        for number, (part, run) in enumerate(runs)
        for index, entry_id in enumerate(run.ids)
        if first <= entry_id <= last and part.has(entry_id)
    )
    chosen: list[Entry] = []
    kind: DigestKind | None = None
    size = 0
    for _, number, index in places:
        run = runs[number][1]
        kind = kind or run.kind
        size += len(run.payload(index))
        if run.kind is not kind or (chosen and size > bytes_max):
            break
        chosen.append(run.entry(index))
    return pack(chosen, kind).body if kind is not None else None
