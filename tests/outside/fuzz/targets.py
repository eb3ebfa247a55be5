"""What is fuzzed: each target takes any bytes and raises only where a claim is broken.

A claim is always one of two: bytes that are not right are refused by the one error that says so, and
bytes that are taken mean what they say, so that writing them again gives them again. CRCs keep a
fuzzer out of what lies behind them, so targets put the right one in place of what came.
"""

import json
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import google_crc32c
from pydantic import ValidationError

from quorumlog.errors import BadRequest, QuorumLogError
from quorumlog.protocol import batch, packed, record
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata
from quorumlog.protocol.transaction import Transaction
from quorumlog.wire import bodies, frames, log_bodies, repair_bodies, strict
from services.bookie.cookie import LocalCookie
from services.bookie.log import (
    BATCH_HEAD,
    SEGMENT_HEAD,
    LogBatch,
    SegmentHead,
    Stop,
    later_sync_point,
    parse_segment_head,
    read_batches,
)
from services.gateway.edge import log_payloads, payloads
from services.gateway.edge.http.codings import CODINGS, PIECE_BYTES, WINDOW_BYTES_MAX, Unpacker
from tests.unit.net.peer import read_body

Target = Callable[[bytes], None]

_ENTRY_BYTES_MAX: Final = 1 << 20
_HEAD: Final = SegmentHead(7, 0x1122334455667788, 3, 0, 0)


def runs(data: bytes) -> None:
    """A run is refused as BadRun, or is exactly its entries."""
    try:
        run = record.Run(data)
    except record.BadRun:
        return
    entries = list(run.entries())
    assert [entry.entry_id for entry in entries] == list(run.ids)
    assert record.pack(entries, run.kind).body == data
    assert run.where(lambda entry_id: entry_id == run.last) is not None
    assert all(run.index(entry_id) == place for place, entry_id in enumerate(run.ids))
    for kind in DigestKind:
        run.invalid(record.Codec(kind, b"key"))
    assert run.last_add_confirmed >= entries[0].last_add_confirmed
    assert run.last_length == entries[-1].length


def record_batches(data: bytes) -> None:
    """A batch of records is refused as BadBatch, or its records make an equal one."""
    try:
        head, records = batch.decode(data)
    except batch.BadBatch:
        with suppress(batch.BadBatch):
            batch.content(data)
        return
    assert len(records) == head.count
    again = batch.placed(
        batch.encode(records, head.producer),
        append_time_ms=head.append_time_ms,
        records_before=head.records_before,
        after_producer=head.after_producer,
    )
    assert batch.decode(again) == (head, records)


def packed_batches(data: bytes) -> None:
    """A packed batch is refused as BadBatch before it unpacks to more than a batch may have, or has the head of what
    it unpacks to, and that packs and unpacks to itself.
    """
    try:
        plain = packed.unpack(data)
        head, records = batch.decode(plain)
    except batch.BadBatch:
        return
    assert len(plain) <= max(len(data), batch.BATCH_BYTES_MAX + 1024)
    assert batch.decode_head(data) == head
    assert len(records) == head.count
    assert packed.unpack(packed.pack(plain)) == plain


def packed_bodies(data: bytes) -> None:
    """A compressed body is refused as a bad request, or unpacks to bounded pieces, the same however it comes."""
    found: list[bytes | None] = []
    for step in (len(data) or 1, 7):
        unpacker = Unpacker(CODINGS[data[0] % 2] if data else CODINGS[0])
        pieces, total = [], 0
        try:
            for start in range(1, len(data), step):
                for piece, cost in unpacker.pieces(data[start : start + step]):
                    assert len(piece) <= min(PIECE_BYTES, cost)
                    assert unpacker.kept_bytes <= WINDOW_BYTES_MAX
                    total += cost
                    pieces.append(piece)
                    if total > 1 << 20:
                        return
            unpacker.finish()
        except BadRequest:
            found.append(None)
        else:
            found.append(b"".join(pieces))
    assert found[0] == found[1]


def requests(data: bytes) -> None:
    """A request of the channel is refused as BadFrame, or says again what it said."""
    for message in (data, _with_crc(data, 4)):
        try:
            request = frames.parse_request(message)
        except frames.BadFrame:
            continue
        assert b"".join(frames.encode_request(request)) == message


def answers(data: bytes) -> None:
    """Answers of the channel are refused as BadFrame, or are written alike."""
    for message in (data, _with_crc(data, 0)):
        try:
            member, found = frames.parse_answers(message)
        except frames.BadFrame:
            continue
        assert b"".join(frames.encode_answers(member, found)) == message
        for answer in found:
            read_bodies(bytes(answer.body))


def read_bodies(data: bytes) -> None:
    """The body of a read's answer is refused as BadFrame, or is written alike."""
    try:
        found = frames.parse_read_body(data)
    except frames.BadFrame:
        return
    assert read_body(found.run, found.absent) == data


def segments(data: bytes) -> None:
    """A segment is read to an end: batches without a gap, each within the file, then one stop."""
    head = parse_segment_head(data)
    assert head is None or head.encode() == data[: SEGMENT_HEAD.size]
    for content in (data, signed_batches(data)):
        for end in (None, SEGMENT_HEAD.size + len(content)):
            at = SEGMENT_HEAD.size
            stops = 0
            for item in read_batches(_HEAD, content, SEGMENT_HEAD.size, end):
                assert not stops, "nothing comes after a stop"
                if isinstance(item, Stop):
                    stops += 1
                    continue
                _check_batch(item, at, content)
                at = item.end
        later_sync_point(_HEAD, content, 0, SEGMENT_HEAD.size)


def _check_batch(found: LogBatch, at: int, content: bytes) -> None:
    assert found.offset == at
    assert found.end > at
    assert found.end <= SEGMENT_HEAD.size + len(content)
    for stored in found.records:
        assert found.offset < stored.offset
        assert stored.offset + stored.size <= found.end
        place = stored.offset - SEGMENT_HEAD.size
        assert content[place : place + stored.size] == stored.body


def json_requests(data: bytes) -> None:
    """A body of JSON is refused as a bad request, or means what the standard library reads."""
    _only_problems(lambda: payloads.from_json(data, _ENTRY_BYTES_MAX))
    _only_problems(lambda: log_payloads.records_from_json(data))
    _only_problems(lambda: log_payloads.record_of_line(data, 1, _ENTRY_BYTES_MAX))
    try:
        value = strict.loads(data)
    except QuorumLogError:
        return
    assert _is_same(value, json.loads(data.decode(), object_pairs_hook=_unique))


def byte_requests(data: bytes) -> None:
    """Frames of payloads are refused as a bad request, or are written alike."""
    found: list[bytes] = []
    _only_problems(lambda: found.extend(payloads.from_frames(data, _ENTRY_BYTES_MAX)))
    if found:
        assert b"".join(struct.pack(">I", len(payload)) + payload for payload in found) == data


_MODELS: Final[tuple[type, ...]] = (
    LedgerMetadata,
    bodies.LedgerCreateBody,
    bodies.LedgerChange,
    bodies.CookiePut,
    bodies.BookieHeartbeat,
    bodies.ServiceHeartbeat,
    LogMetadata,
    Transaction,
    log_bodies.LogChange,
    repair_bodies.RepairsAdd,
    repair_bodies.RepairProgress,
    LocalCookie,
)


def documents(data: bytes) -> None:
    """A document between services is refused by its model, or is the same after a trip."""
    for model in _MODELS:
        try:
            found = bodies.codec(model).validate_json(data)
        except ValidationError:
            continue
        assert bodies.codec(model).validate_json(bodies.json_of(found)) == found


TARGETS: Final[Mapping[str, Target]] = {
    target.__name__: target
    for target in (
        runs,
        record_batches,
        packed_batches,
        packed_bodies,
        requests,
        answers,
        read_bodies,
        segments,
        json_requests,
        byte_requests,
        documents,
    )
}


def _with_crc(data: bytes, at: int) -> bytes:
    """The message with the right CRC at its place."""
    if len(data) < at + 4:
        return data
    crc = int(google_crc32c.value(data[:at] + data[at + 4 :]))
    return data[:at] + crc.to_bytes(4, "big") + data[at + 4 :]


def signed_batches(data: bytes) -> bytes:
    """The same bytes, where each batch head that its predecessor leads to is of this segment, at
    its place, and has the right CRC: what its numbers say is then believed.
    """
    content = bytearray(data)
    at = 0
    while at + BATCH_HEAD.size <= len(content):
        _, flags, *_, sequence, below, count, size, _ = BATCH_HEAD.unpack_from(content, at)
        count %= 8
        BATCH_HEAD.pack_into(
            content, at,
            0x716C4231, flags, _HEAD.segment, _HEAD.nonce, SEGMENT_HEAD.size + at,
            sequence, below, count, size, 0,
        )  # fmt: skip
        table_end = at + BATCH_HEAD.size + count * 20
        body_at = table_end
        for place in range(count):
            row = at + BATCH_HEAD.size + place * 20
            if row + 20 > len(content):
                break
            body_bytes = int.from_bytes(content[row + 12 : row + 16], "big")
            crc = google_crc32c.value(bytes(content[body_at : body_at + body_bytes]))
            content[row + 16 : row + 20] = int(crc).to_bytes(4, "big")
            body_at += body_bytes
        start = bytes(content[at : at + BATCH_HEAD.size - 4])
        table = bytes(content[at + BATCH_HEAD.size : table_end])
        crc = google_crc32c.extend(google_crc32c.value(start), table)
        content[at + BATCH_HEAD.size - 4 : at + BATCH_HEAD.size] = int(crc).to_bytes(4, "big")
        if size <= 0:
            break
        at += size
    return bytes(content)


def _only_problems(work: Callable[[], object]) -> None:
    with suppress(QuorumLogError):
        work()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), "two equal keys were taken"
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Equal, where two readers may differ in the last digit of a float only."""
    if isinstance(one, float) or isinstance(other, float):
        return float(one) == float(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
