"""Compresses and decompresses the columns of record batches (layout: `batch.py`, flag 32).

The head of a batch is not compressed, so that a log's ends, offsets and producers are known without
decompression. Readers get the same records as from an uncompressed batch.
"""

from typing import Final, TypeVar

from quorumlog.protocol import batch
from quorumlog.protocol.batch import BATCH_BYTES_MAX, BadBatch
from quorumlog.zstd import zstd

_LEVEL: Final = 3
"""The default level of zstd: batches of 16 KiB become a tenth smaller than at level 1, and cost a
tenth more CPU (docs/internals/performance.md)."""

_SMALL_BYTES: Final = 256
"""Smaller columns are not compressed: they hardly shrink, and the head grows (measured)."""

_OPTIONS: Final = {
    int(zstd.DecompressionParameter.window_log_max): BATCH_BYTES_MAX.bit_length() - 1
}


S = TypeVar("S", bound=batch.Stored)


def pack(data: bytes) -> bytes:
    """Compress a batch's columns. A batch that is compressed already, or would not shrink, is
    returned unchanged.

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
    """Decompress a batch's columns, at most BATCH_BYTES_MAX. Leaves an uncompressed batch as it is.

    Raises: BadBatch. Decompresses at most one byte more than the size that the head states.
    """
    if not batch.is_packed(data):
        return data
    size, frame = batch.packed_columns(data)
    try:
        decoder = zstd.ZstdDecompressor(options=_OPTIONS)
        columns = decoder.decompress(frame, size + 1)
    except zstd.ZstdError as error:
        raise BadBatch(f"can't decompress the record batch's columns: {error}") from error
    if len(columns) != size or not decoder.eof or decoder.unused_data:
        raise BadBatch("the record batch's columns don't decompress to the size in its head")
    return batch.with_plain(data, columns)
