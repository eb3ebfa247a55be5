"""Bytes that the targets take: what a fuzzer begins with."""

import zlib
from collections.abc import Mapping
from typing import Final

from quorumlog.protocol import batch, packed, record
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.wire import frames
from quorumlog.zstd import zstd
from services.bookie.log import (
    CLEAN_END,
    SEGMENT_HEAD,
    Kind,
    QueuedRecord,
    SegmentHead,
    encode_batch,
)
from tests.outside.fuzz.targets import signed_batches
from tests.unit.net.peer import read_body

_KEY: Final = bytes(range(32))


def _run(kind: DigestKind, ids: tuple[int, ...] = (4, 5, 8)) -> record.Run:
    merged = record.merge(
        record.make(
            ledger_id=9,
            first_entry=entry_id,
            last_add_confirmed=entry_id - 1,
            length_before=10 * entry_id,
            payloads=[b"payload %d" % entry_id],
            codec=record.Codec(kind, b"k"),
        )
        for entry_id in ids
    )
    assert merged is not None
    return merged


def _segment() -> bytes:
    head = SegmentHead(1, 2, 3, 4, 5)
    content = b""
    for sequence in range(3):
        bodies = [(_KEY, b"x" * (sequence * 300)), (_KEY,)]
        records = [
            QueuedRecord(Kind(place + 1), 9, parts, sum(map(len, parts)))
            for place, parts in enumerate(bodies)
        ]
        content += b"".join(
            encode_batch(
                head,
                offset=SEGMENT_HEAD.size + len(content),
                sequence=3 + sequence,
                synced_below=SEGMENT_HEAD.size,
                records=records,
                flags=CLEAN_END if sequence == 2 else 0,
            )
        )
    return signed_batches(content)


def _records() -> bytes:
    data = batch.encode(
        [
            batch.Record(b"value", b"key", (("name", "value"), ("more", "")), 1_700_000_000_000),
            batch.Record(b"", None, (), None),
        ],
        batch.ProducerSeq("producer", 3, 4),
    )
    return batch.placed(data, append_time_ms=1_700_000_000_001, records_before=7)


def _many(producer: batch.ProducerSeq | None = None) -> bytes:
    return batch.encode([batch.Record(b'{"order":%d}' % n, b"key") for n in range(60)], producer)


_ADD: Final = (frames.Op.ADD, 1, 9, 4, 8, "b1@1", _KEY)
_READ: Final = (frames.Op.READ, 2, 9, 3, 5, "b1@1")

SAMPLES: Final[Mapping[str, tuple[bytes, ...]]] = {
    "runs": (*tuple(_run(kind).body for kind in DigestKind), _run(DigestKind.NONE, (1, 2)).body),
    "record_batches": (
        _records(),
        batch.encode([batch.Record(b"v", None, (), None)]),
    ),
    "packed_batches": (
        packed.pack(_many()),
        packed.pack(_many(batch.ProducerSeq("p", 1, 2))),
        _records(),
    ),
    "packed_bodies": tuple(
        sample
        for each in (b"", b"hello", b"abc" * 1000, bytes(200_000))
        for sample in (b"\0" + zstd.compress(each) * 2, b"\1" + zlib.compress(each, wbits=31) * 2)
    ),
    "requests": tuple(
        b"".join(frames.encode_request(request))
        for request in (
            frames.Request(*_ADD, recovery=True, run=_run(DigestKind.CRC32C)),
            frames.Request(*_READ, bytes_max=100),
            frames.Request(*_READ, bytes_max=100, from_disk=True),
            frames.Request(*_READ, _KEY, bytes_max=100, fence=True),
            frames.Request(frames.Op.FENCE, 3, 9, -1, -1, "b1@2", _KEY),
            frames.Request(frames.Op.READ_LAC, 4, 9, -1, -1, "b2@1"),
            frames.Request(frames.Op.WRITE_LAC, 5, 9, -1, 7, "b2@1", _KEY),
        )
    ),
    "answers": (
        b"".join(
            frames.encode_answers(
                "b1@1",
                [
                    frames.ChannelAnswer(frames.Op.ADD, Status.OK, 1, 9, 4, 8, 3),
                    frames.ChannelAnswer(
                        frames.Op.READ,
                        Status.OK,
                        2,
                        9,
                        4,
                        8,
                        3,
                        read_body(_run(DigestKind.NONE), [(6, 7)]),
                    ),
                ],
            )
        ),
    ),
    "read_bodies": (
        read_body(None, [(0, 3), (5, 5)]),
        read_body(_run(DigestKind.HMAC_SHA256), [(6, 7)]),
    ),
    "segments": (_segment(), SegmentHead(1, 2, 3, 4, 5).encode() + _segment()),
    "json_requests": (
        b'{"text":"hello"}',
        b'{"entries":[{"data":"aGVsbG8="},{"json":{"a":[1,-2.5e3,null,true,"\\u00e9\\\\"]}}]}',
        b'{"records":[{"text":"v","key":"k","headers":{"n":"v"},"timestamp":"2026-01-01T00:00:00Z"}]}',
        b'{"entries":[],"entries":[{"text":"\\"}]}',
        b'{"records":[],"records":[{"text":"\\"}]}',
    ),
    "byte_requests": (b"\0\0\0\x05hello\0\0\0\0\0\0\0\x01x",),
    "documents": (
        b'{"ensemble_size":3,"write_quorum":3,"ack_quorum":2,"digest":"crc32c","metadata":{"a":"b"}}',
        b'{"incarnation":1,"url":"http://127.0.0.1:1","state":"writable","free_bytes":1,"ttl_s":5}',
        b'{"name":"b","incarnation":1,"cluster_id":"c","instance":"i","directories":["/d"],"boots":1}',
    ),
}
"""By the name of the target."""
