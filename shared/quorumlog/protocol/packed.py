"""Record batches whose columns are compressed (layout: `batch.py`, flag 32), and back.

The head stays as it is, so that a log's ends, offsets and producers are known without unpacking anything. Only who
reads or forwards records unpacks them: readers get the same records as from a plain batch.
"""

from typing import Final, TypeVar

from quorumlog.protocol import batch
from quorumlog.protocol.batch import BATCH_BYTES_MAX, BadBatch
from quorumlog.zstd import zstd

_LEVEL: Final = 3
"""zstd's own default: batches of 16 KiB shrink a tenth more than at level 1, for a tenth more CPU
(docs/performance.md)."""

_SMALL_BYTES: Final = 256
"""Columns that are smaller shrink by less than the head grows, or hardly (measured)."""

_OPTIONS: Final = {
    int(zstd.DecompressionParameter.window_log_max): BATCH_BYTES_MAX.bit_length() - 1
}


S = TypeVar("S", bound=batch.Stored)


def pack(data: bytes) -> bytes:
    """The batch with compressed columns; the batch itself where that is not shorter, or it is packed already.

    Raises: BadBatch.
    """
    if batch.is_packed(data) or len(data) > BATCH_BYTES_MAX:
        return data
    at = batch.columns_begin(data)
    if len(data) - at < _SMALL_BYTES:
        return data
    packed = batch.with_packed(data, at, zstd.compress(memoryview(data)[at:], _LEVEL))
    return packed if len(packed) < len(data) else data


def unpack(data: S) -> S | bytes:
    """The batch with plain columns, of BATCH_BYTES_MAX at most; the batch itself where it is plain.

    Raises: BadBatch, before more is unpacked than its head says.
    """
    if not batch.is_packed(data):
        return data
    size, frame = batch.packed_columns(data)
    try:
        decoder = zstd.ZstdDecompressor(options=_OPTIONS)
        columns = decoder.decompress(frame, size + 1)
    except zstd.ZstdError as error:
        raise BadBatch(f"a record batch's columns can't be unpacked: {error}") from error
    if len(columns) != size or not decoder.eof or decoder.unused_data:
        raise BadBatch("a record batch's columns unpack to another size than its head says")
    return batch.with_plain(data, columns)
