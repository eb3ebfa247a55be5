"""Converts entries and records to and from Arrow columns (`application/vnd.apache.arrow.stream`).

A record batch is stored as columns (protocol/batch.py), so it becomes Arrow without a Python call
per record. The module requires pyarrow and numpy; a gateway can run without them
(services/gateway/edge/arrow.py).

A client's stream is decoded only after a check of its schema and message heads, because a
compressed body would grow in memory to any size that it claims.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quorumlog.protocol import batch

MEDIA: Final = "application/vnd.apache.arrow.stream"

TIME: Final = pa.timestamp("us", tz="UTC")
HEADERS: Final = pa.map_(pa.string(), pa.string())

ENTRIES: Final = pa.schema(
    [
        pa.field("entry_id", pa.int64(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""The columns of a read of a ledger."""

RECORDS: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", TIME, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("headers", HEADERS),
        pa.field("value", pa.binary()),
        pa.field("ledger_id", pa.int64(), nullable=False),
        pa.field("entry_id", pa.int64(), nullable=False),
    ]
)
"""The columns of a read of a log. `headers` is null for a record without headers, and `value` is
null in a tombstone."""

_TIME_MS_MAX: Final = 253_402_300_799_999
_TIME_MS_MIN: Final = -62_135_596_800_000
"""The bounds of the years 1 to 9999, the range of calendar dates."""

_PER_S: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


_BROKEN: Final = (ValueError, TypeError, LookupError, OSError, MemoryError, struct.error)
"""Exceptions of pyarrow and this module for invalid streams, such as names not in UTF-8."""


PAIRS_MAX: Final = 1 << 18
"""Maximum number of headers in a stream, in all records: as many as fit into a JSON body."""
_MESSAGES_BESIDE: Final = 2
"""Number of messages besides record batches: the schema and the end of the stream."""


class BadColumns(ValueError):
    """The bytes are not an Arrow stream that the API accepts; the message has the reason."""


def stream(schema: Any, batches: Iterable[Any]) -> bytes:
    """Encode record batches as one Arrow stream."""
    table = pa.Table.from_batches(list(batches), schema).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def entries(run: Any) -> Any:
    """The entries of a `Run` (which executors can't import) as a record batch of ENTRIES."""
    begin = len(run.body) - run.payload_bytes
    values = _binary(pa.py_buffer(run.body), np.array(run.sizes), begin)
    return pa.record_batch([pa.array(np.array(run.ids, np.int64)), values], ENTRIES)


def records(stored: batch.StoredBatch) -> Any:
    """The records of a stored batch as a record batch of RECORDS."""
    found, total, first = stored.columns, stored.count, stored.first_offset
    data = found.data
    buffer = pa.py_buffer(data)
    sizes = np.frombuffer(data, ">i4", total, found.value_sizes_at)
    columns = [
        pa.array(np.arange(first, first + total, dtype=np.int64)),
        _times(found, stored.time_ms),
        _keys(buffer, found),
        _headers(found),
        _nullable(buffer, sizes, len(data) - len(found.joined_values)),
        pa.array(np.full(total, stored.ledger_id, np.int64)),
        pa.array(np.full(total, stored.entry_id, np.int64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORDS)


def _binary(buffer: Any, sizes: "npt.NDArray[Any]", at: int, validity: Any = None) -> Any:
    """A binary column of values that are stored one after another from `at` on."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    places = pa.py_buffer(offsets.astype(np.int32))
    buffers = [validity, places, buffer.slice(at, int(offsets[-1]))]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _nullable(buffer: Any, sizes: "npt.NDArray[Any]", at: int) -> Any:
    """A binary column, null where the size is -1."""
    if sizes.min(initial=0) >= 0:
        return _binary(buffer, sizes, at)
    validity = pa.py_buffer(np.packbits(sizes >= 0, bitorder="little"))
    return _binary(buffer, np.maximum(sizes, 0), at, validity)


def _keys(buffer: Any, found: batch.Columns) -> Any:
    if found.key_sizes_at is None:
        return pa.nulls(found.count, pa.binary())
    sizes = np.frombuffer(found.data, ">i4", found.count, found.key_sizes_at)
    return _nullable(buffer, sizes, found.columns_at)


def _headers(found: batch.Columns) -> Any:
    if not found.headers:
        return pa.nulls(found.count, HEADERS)
    return pa.array([list(texts) or None for texts in found.headers], HEADERS)


def _times(found: batch.Columns, time_ms: int) -> Any:
    total = found.count
    if found.times_at is None:
        times = np.full(total, time_ms, np.int64)
    else:
        own = np.frombuffer(found.data, ">i8", total, found.times_at).astype(np.int64)
        times = np.where(own == batch.NO_TIME, time_ms, own)
    microseconds = np.clip(times, _TIME_MS_MIN, _TIME_MS_MAX) * 1000
    return pa.Array.from_buffers(TIME, total, [None, pa.py_buffer(microseconds)])


def table(data: bytes, allowed: Sequence[str], rows_max: int) -> Any:
    """The checked table of a client's stream. `value` and `key` are binary, and `value` has no
    nulls. Raises: BadColumns. Decoding stops after the batch that exceeds `rows_max` rows.
    """
    try:
        _check_plain(data, rows_max)
        reader = pa.ipc.open_stream(pa.py_buffer(data))
        _check_schema(reader.schema, allowed)
        batches, rows = [], 0
        for found in reader:
            found.validate(full=True)
            batches.append(found)
            rows += found.num_rows
            if rows > rows_max:
                break
        whole = pa.Table.from_batches(batches, reader.schema)
        _check_headers(whole)
        for name in ("value", "key"):
            if name in whole.column_names:
                at = whole.column_names.index(name)
                whole = whole.set_column(at, name, whole.column(at).cast(pa.binary()))
    except BadColumns:
        raise
    except (pa.ArrowException, *_BROKEN) as error:
        raise BadColumns(f"the body must be an Arrow stream: {str(error)[:200]}") from error
    if whole.column("value").null_count:
        raise BadColumns("the column value must not contain nulls")
    return whole


def _check_schema(schema: Any, allowed: Sequence[str]) -> None:
    """Raise BadColumns unless each column is allowed, has the right type, and occurs once."""
    names = schema.names
    for name in names:
        if name not in allowed:
            shown = ascii(str(name)[:100])
            raise BadColumns(f"the column {shown} is not allowed: use {', '.join(allowed)}")
    if len(set(names)) != len(names) or "value" not in names:
        raise BadColumns("an Arrow stream must have the column value, and each column only once")
    for field in schema:
        if not _is_right(field.name, field.type):
            raise BadColumns(f"the column {field.name} has a wrong type: {str(field.type)[:100]}")


def _is_right(name: str, kind: Any) -> bool:
    types = pa.types
    if name in ("value", "key"):
        return kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())
    if name == "timestamp":
        return bool(types.is_timestamp(kind) and kind.tz is not None)
    return bool(
        types.is_map(kind) and types.is_string(kind.key_type) and types.is_string(kind.item_type)
    )


def _check_headers(whole: Any) -> None:
    """Raise BadColumns if a table has more than `PAIRS_MAX` headers."""
    if "headers" in whole.column_names:
        count = sum(len(chunk.keys) for chunk in whole.column("headers").chunks)
        if count > PAIRS_MAX:
            raise BadColumns(f"the column headers has {count} headers; the limit is {PAIRS_MAX}")


def _check_plain(data: bytes, messages_max: int) -> None:
    """Raise BadColumns if a message's body is compressed, or if there are too many messages. An
    encapsulated message (Arrow's IPC format) is 0xFFFFFFFF, the size of the head, the head as a
    FlatBuffer, and the body. Field 3 of a record batch is the compression.
    """
    at = count = 0
    while at + 8 <= len(data):
        count += 1
        if count > messages_max + _MESSAGES_BESIDE:
            raise BadColumns(f"an Arrow stream must have at most {messages_max} record batches")
        mark, size = struct.unpack_from("<Ii", data, at)
        if mark != 0xFFFFFFFF or size < 0:
            raise BadColumns("the body must be an Arrow stream: a message is missing")
        if size == 0:
            return
        head = at + 8
        root = head + _u32(data, head)
        kind_at, body_at = _field(data, root, 1), _field(data, root, 3)
        if kind_at is not None and data[kind_at] in (2, 3):
            table_at = _field(data, root, 2)
            if table_at is None:
                raise BadColumns("the body must be an Arrow stream: a message has no head")
            found = table_at + _u32(data, table_at)
            if data[kind_at] == 2:
                raise BadColumns("dictionary-encoded columns are not accepted: send plain columns")
            if _field(data, found, 3) is not None:
                raise BadColumns("compressed columns are not accepted: send plain columns")
        body_size = 0 if body_at is None else struct.unpack_from("<q", data, body_at)[0]
        if body_size < 0:
            raise BadColumns("the body must be an Arrow stream: a size is negative")
        at = head + size + body_size


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _field(data: bytes, table_at: int, number: int) -> int | None:
    """The position of a field in a FlatBuffers table; None if the table lacks the field."""
    (back,) = struct.unpack_from("<i", data, table_at)
    vtable = table_at - back
    if vtable < 0:
        raise BadColumns("the body must be an Arrow stream: a message's head points beyond its end")
    (size,) = struct.unpack_from("<H", data, vtable)
    place = 4 + 2 * number
    if place + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + place)
    return table_at + int(offset) if offset else None


def encoded(
    whole: Any, check: Callable[[dict[str, str], int], object]
) -> tuple[batch.EncodedRecords, int]:
    """The rows of a client's table as a log's records, and their size: the bytes of keys and values,
    plus the headers' characters. Only headers need Python objects. `check` gets a record's headers
    and index, and raises if the headers are not allowed. Raises: BadColumns.
    """
    columns = {name: whole.column(name) for name in whole.column_names}
    some = {name for name, column in columns.items() if column.null_count < whole.num_rows}
    flags, sizes, parts = 0, list[bytes](), list[Any]()
    lengths, values = _joined(columns["value"])
    size = len(values)
    if "timestamp" in some:
        flags |= batch.HAS_TIMES
        sizes.append(_milliseconds(columns["timestamp"]))
    if "key" in some:
        flags |= batch.HAS_KEYS
        key_lengths, keys = _joined(columns["key"].fill_null(b""))
        is_valid = columns["key"].is_valid().to_numpy()
        sizes.append(np.where(is_valid, key_lengths, -1).astype(">i4").tobytes())
        parts.append(keys)
        size += len(keys)
    if "headers" in some:
        found = [_header(pairs) for pairs in columns["headers"].to_pylist()]
        for index, pairs in enumerate(found):
            check(pairs, index)
            size += sum(map(len, chain.from_iterable(pairs.items())))
        encoded = [batch.encode_headers(pairs.items()) for pairs in found]
        if any(encoded):
            flags |= batch.HAS_HEADERS
            sizes.append(np.array([*map(len, encoded)], ">u4").tobytes())
            parts += encoded
    sizes.append(lengths.astype(">u4").tobytes())
    data = b"".join((*sizes, *parts, values))
    return batch.EncodedRecords(whole.num_rows, flags, data), size


def _joined(column: Any) -> tuple["npt.NDArray[Any]", memoryview]:
    """The lengths of the values in a binary column without nulls, and the values, joined."""
    whole = pa.concat_arrays(column.chunks)
    _, places, data = whole.buffers()
    ends = np.frombuffer(places, np.int32, len(whole) + 1, 4 * whole.offset)
    return np.diff(ends), memoryview(data or b"")[ends[0] : ends[-1]]


def _milliseconds(column: Any) -> bytes:
    """The encoded times of a column. Raises: BadColumns for a time that no answer can represent."""
    ends = pc.min_max(column.cast(pa.int64())).as_py()
    per_s = _PER_S[column.type.unit]
    low, high = _TIME_MS_MIN // 1000 * per_s, (_TIME_MS_MAX + 1) // 1000 * per_s
    if not low <= ends["min"] <= ends["max"] < high:
        raise BadColumns("the column timestamp must only have times in the years 1 to 9999")
    times = column.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
    found: bytes = times.fill_null(batch.NO_TIME).to_numpy().astype(">i8").tobytes()
    return found


def _header(pairs: Any) -> dict[str, str]:
    found = dict(pairs or ())
    if len(found) != len(pairs or ()) or None in found.values():
        raise BadColumns("a record's headers must have distinct names, and a value each")
    return found
