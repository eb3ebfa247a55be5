"""Rows of a DataFrame as records of a log: the columns that a write takes, and Arrow tables of them."""

import zlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from quorumlog.wire.columns import HEADERS, TIME

_NAMED: Final = 10
"""The most columns that an error lists."""
_BYTES: Final = (StringType, BinaryType)
_WANTED: Final = (
    "a row has value (string or binary), and maybe key, topic, headers (a map of strings, or "
    "array<struct<key,value>>), timestamp and partition; other columns go into the value: "
    'df.selectExpr("to_json(struct(*)) AS value")'
)


class BadRows(ValueError):
    """Rows that can't become records; the message says why."""


def check_schema(schema: StructType, *, has_log: bool) -> None:
    """Raise BadRows unless the columns make records. `has_log`: the option `topic` names the log."""
    kinds = {field.name: field.dataType for field in schema.fields}
    wrong = [name for name, kind in kinds.items() if not _is_right(name, kind)]
    if len(kinds) < len(schema.fields):
        raise BadRows(f"two columns have one name: {', '.join(schema.names)}")
    if wrong or "value" not in kinds:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise BadRows(f"{', '.join(wrong[:_NAMED]) or 'value is missing'}{more}: {_WANTED}")
    if not has_log and "topic" not in kinds:
        raise BadRows("which log? set the option topic, or have a column topic")


def _is_right(name: str, kind: DataType) -> bool:
    match name:
        case "value" | "key":
            return isinstance(kind, _BYTES)
        case "topic":
            return isinstance(kind, StringType)
        case "timestamp":
            return isinstance(kind, TimestampType)
        case "partition":
            return isinstance(kind, IntegerType)
        case "headers":
            return _are_headers(kind)
        case _:
            return False


def _are_headers(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = {field.name: field.dataType for field in kind.elementType.fields}
    return (
        set(fields) == {"key", "value"}
        and isinstance(fields["key"], StringType)
        and isinstance(fields["value"], _BYTES)
    )


def by_log(batch: Any, log: str | None) -> Iterable[tuple[str, Any]]:
    """The rows of a batch as tables for appends, each with its log."""
    table = _table(batch)
    if log is not None:
        yield log, table
        return
    topics = batch.column("topic")
    if topics.null_count:
        raise BadRows("the column topic is null in a row")
    for topic in pc.unique(topics).to_pylist():
        yield topic, table.filter(pc.equal(topics, topic))


def _table(batch: Any) -> Any:
    names = batch.schema.names
    value = batch.column("value")
    if value.null_count:
        raise BadRows("the column value is null in a row")
    columns = {"value": value.cast(pa.binary())}
    if "key" in names and batch.column("key").null_count < batch.num_rows:
        columns["key"] = batch.column("key").cast(pa.binary())
    if "timestamp" in names and batch.column("timestamp").null_count < batch.num_rows:
        columns["timestamp"] = batch.column("timestamp").cast(TIME)
    if "headers" in names and batch.column("headers").null_count < batch.num_rows:
        rows = [_pairs(row) for row in batch.column("headers").to_pylist()]
        columns["headers"] = pa.array(rows, HEADERS)
    return pa.table(columns)


def _pairs(row: Any) -> list[tuple[str, str]] | None:
    if not row:
        return None
    found = [
        (pair["key"], pair["value"]) if isinstance(pair, dict) else (pair[0], pair[1])
        for pair in row
    ]
    if any(None in pair for pair in found):
        raise BadRows("a header is null")
    if len({key for key, _ in found}) < len(found):
        raise BadRows("a record has two headers of one name")
    try:
        return [(key, value if isinstance(value, str) else value.decode()) for key, value in found]
    except UnicodeDecodeError:
        raise BadRows("a header's value is not UTF-8: headers of a log are text") from None


def sizes(table: Any) -> Any:
    """The bytes of each row, as a numpy array: of value, key and headers."""
    total = pc.binary_length(table.column("value"))
    if "key" in table.column_names:
        total = pc.add(total, pc.fill_null(pc.binary_length(table.column("key")), 0))
    found = total.to_numpy()
    if "headers" in table.column_names:
        found = found + np.concatenate(
            [_header_sizes(chunk) for chunk in table.column("headers").chunks] or [[]]
        )
    return found


def _header_sizes(headers: Any) -> Any:
    """The bytes of each row of a map array, whose offsets say where a row's pairs end."""
    pairs = pc.add(pc.binary_length(headers.keys), pc.binary_length(headers.items))
    ends = np.concatenate([[0], np.cumsum(pairs.to_numpy())]).astype(np.int64)
    offsets = headers.offsets.to_numpy()
    return ends[offsets[1:]] - ends[offsets[:-1]]


def crc32(table: Any, before: int = 0) -> int:
    """The CRC32 of the concatenated values, continuing from `before`."""
    for chunk in table.column("value").chunks:
        if len(chunk):
            _, places, data = chunk.buffers()
            offsets = np.frombuffer(places, np.int32, len(chunk) + 1, 4 * chunk.offset)
            if data is not None:
                before = zlib.crc32(memoryview(data)[offsets[0] : offsets[-1]], before)
    return before


def body(table: Any) -> bytes:
    """A table as the body of an append: an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
