"""Converts records to Spark's rows, page by page, and rows to records, as Arrow tables."""

import base64
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

from quorumlog import errors, header
from quorumlog.protocol.offset_set import Offsets
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import DataLoss, TaskRange
from quorumlog.wire.columns import ENTRIES, HEADERS, MEDIA, RECORDS, TIME

_PAGE_ROWS: Final = 10_000
_PAGE_BYTES: Final = 8 << 20
"""Limits of one request: the API's maximum, and a size that saves an executor's memory."""

_LOST: Final = (
    errors.OffsetTruncated,
    errors.OffsetBeyondEnd,
    errors.EntryLost,
    errors.LogReplaced,
    errors.NoSuchLog,
)
"""Errors for missing records: truncated, lost, or of a log that was deleted (and created again)."""

_HEADER_LIST: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
TYPES: Final = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": TIME,
    "timestampType": pa.int32(),
    "headers": _HEADER_LIST,
    "ledger": pa.int64(),
    "entry": pa.int64(),
}
"""The Arrow types of the columns, which batches must have: those of Spark's `to_arrow_schema`."""
_NAMED: Final = 10
"""Maximum number of columns that an error lists."""
_KINDS: Final = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "topic": ("string",),
    "timestamp": ("timestamp",),
    "partition": ("int",),
    "headers": (
        "map<string,string>",
        *(f"array<struct<key:string,value:{kind}>>" for kind in ("string", "binary")),
        *(f"array<struct<value:{kind},key:string>>" for kind in ("string", "binary")),
    ),
}
"""The columns of a write, with their possible types. A string may have any collation."""
_COLLATION: Final = re.compile(r" collate \w+")
_WANTED: Final = (
    "a row needs value (string or binary), and may have key, topic, headers (a map of strings, or "
    "array<struct<key,value>>), timestamp and partition; put other columns into the value: "
    'df.selectExpr("to_json(struct(*)) AS value")'
)


def read_range(options: ReadOptions, partition: object) -> Iterator[Any]:
    """The rows of one range. Yields nothing for the empty partition of an empty plan."""
    if not isinstance(partition, TaskRange):
        return
    with options.connection.connect() as gateways:
        yield from rows(gateways, partition, options.columns, fails_on_loss=options.fails_on_loss)


def rows(
    gateways: Gateways, part: TaskRange, columns: tuple[str, ...], *, fails_on_loss: bool
) -> Iterator[Any]:
    """Read a range as record batches, page by page. Raises: DataLoss if records are gone."""
    at = part.first
    path = f"/v1/logs/{part.log}" if part.log else f"/v1/ledgers/{part.ledger_id}"
    is_log = part.log is not None
    while at < part.end:
        try:
            page, following = _page(
                gateways,
                path,
                at,
                part.end,
                is_log=is_log,
                created_at=part.created_at,
                filters=part.filters,
            )
        except (*_LOST, errors.NoSuchLedger) as error:
            end = max(at + 1, _following(error, part))
            # A batch of a queue needs only its own records of the range.
            is_needed = part.records is None or part.records & Offsets.span(at, end)
            if fails_on_loss and is_needed:
                what = part.log or f"ledger {part.ledger_id}"
                raise DataLoss(
                    f"records {at} to {part.end - 1} of {what} are gone: {error.detail}; set failOnDataLoss=false to skip lost records"
                ) from error
            at = end
            continue
        if following <= at:
            # All records of the range were confirmed before the plan was made.
            raise errors.EntryUnavailable(f"no record was read at {at} of {path}", log=part.log)
        if is_log and following > part.end:  # a filtered or compacted page
            page = page.filter(pc.field("offset") < part.end)
        if part.records is not None:
            page = page.filter(pc.is_in(page.column("offset"), pa.array(part.records, pa.int64())))
        if page.num_rows:
            yield _shown(page, part, columns)
        at = following


def _following(error: errors.QuorumLogError, part: TaskRange) -> int:
    """The offset after lost records, according to the error; by default the range's end."""
    found = None
    if isinstance(error, errors.OffsetTruncated):
        found = error.members.get("first_offset")
    elif isinstance(error, errors.EntryLost):
        found = error.members.get("next_offset" if part.log else "next")
    return part.end if found is None else int(found)


def page_sizes(gateways: Gateways, log: str, first: int, bytes_max: int) -> tuple[int, int]:
    """The number of rows in a page that begins at `first`, and their bytes, as a sample of record
    sizes. Returns zeros if the records are gone, because the read itself handles a loss.
    """
    path, end = f"/v1/logs/{log}", first + _PAGE_ROWS
    try:
        page, _ = _page(gateways, path, first, end, is_log=True, bytes_max=bytes_max)
    except _LOST:
        return 0, 0
    return page.num_rows, page.column("value").nbytes + page.column("key").nbytes


def _page(
    gateways: Gateways,
    path: str,
    first: int,
    end: int,
    *,
    is_log: bool,
    bytes_max: int = _PAGE_BYTES,
    created_at: str | None = None,
    filters: Iterable[tuple[str, str]] = (),
) -> tuple[Any, int]:
    """Read rows from `first` on, below `end`. Returns the rows and the offset that follows."""
    noun = "records" if is_log else "entries"
    params: dict[str, str | int] = {"from": first, "limit": min(_PAGE_ROWS, end - first)}
    params |= filters
    params["max_bytes"] = min(bytes_max, _PAGE_BYTES)
    if created_at is not None:
        params["created"] = created_at
    if gateways.speaks_arrow:
        wanted: dict[str, Any] = {"params": params, "headers": {"Accept": MEDIA}}
        try:
            answer = gateways.request("GET", f"{path}/{noun}", is_repeatable=True, **wanted)
        except errors.NotAcceptable:
            gateways.speaks_arrow = False
        else:
            name = header.NEXT_OFFSET if is_log else header.NEXT_ENTRY_ID
            return pa.ipc.open_stream(answer.body).read_all(), int(answer.headers[name])
    found = gateways.get(f"{path}/{noun}", params)
    return _table_of(found[noun], is_log=is_log), int(found["next"])


def _table_of(items: Sequence[Mapping[str, Any]], *, is_log: bool) -> Any:
    """Convert a page of JSON to the table that an Arrow response has."""
    rows = [
        {**item, "value": None if item["data"] is None else base64.b64decode(item["data"])}
        for item in items
    ]
    for row in rows if is_log else ():
        row["timestamp"] = datetime.fromisoformat(row["timestamp"])
        row["key"] = None if row["key"] is None else base64.b64decode(row["key"])
        row["headers"] = list(row["headers"].items()) or None
    return pa.Table.from_pylist(rows, RECORDS if is_log else ENTRIES)


def _shown(page: Any, part: TaskRange, columns: tuple[str, ...]) -> Any:
    """A page with Spark's columns. For plain ledgers, the columns of logs are null."""
    is_log = part.log is not None
    sources = {
        "offset": "offset" if is_log else "entry_id",
        "ledger": "ledger_id",
        "entry": "entry_id",
    }
    # A timestampType of 0 is Kafka's CreateTime: a record's own time, by default the append's.
    constants = {"topic": part.log, "partition": 0, "timestampType": 0 if is_log else None}
    constants["ledger"] = part.ledger_id
    arrays = []
    for name in columns:
        source = sources.get(name, name)
        if source in page.column_names:
            array = _whole(page.column(source))
            arrays.append(_headers(array) if name == "headers" else array)
        else:
            value = pa.scalar(constants.get(name), TYPES[name])
            arrays.append(pa.repeat(value, page.num_rows))
    schema = pa.schema([pa.field(name, TYPES[name]) for name in columns])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _whole(column: Any) -> Any:
    """A column as one chunk, which a record batch requires."""
    found = column.combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found


def _headers(found: Any) -> Any:
    """Convert maps of headers to Kafka's lists of pairs; null if a record has no headers."""
    if found.null_count == len(found):
        return pa.nulls(len(found), _HEADER_LIST)
    pairs = [
        None if row is None else [{"key": key, "value": value.encode()} for key, value in row]
        for row in found.to_pylist()
    ]
    return pa.array(pairs, _HEADER_LIST)


# --- writes ----------------------------------------------------------------------------------------


class BadRows(ValueError):
    """Rows that can't become records; the message says why."""


def check_schema(schema: types.StructType, *, has_log: bool) -> None:
    """Raise BadRows for columns that can't become records. `has_log`: the option `topic` is set."""
    kinds = {
        field.name: _COLLATION.sub("", field.dataType.simpleString()) for field in schema.fields
    }
    wrong = [name for name, kind in kinds.items() if kind not in _KINDS.get(name, ())]
    if len(kinds) < len(schema.fields):
        raise BadRows(f"two columns have the same name: rename one ({', '.join(schema.names)})")
    if wrong or "value" not in kinds:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise BadRows(f"{', '.join(wrong[:_NAMED]) or 'value is missing'}{more}: {_WANTED}")
    if not has_log and "topic" not in kinds:
        raise BadRows("no log is named: set the option topic, or add a column topic")


def by_log(batch: Any, log: str | None) -> Iterable[tuple[str, Any]]:
    """Split a batch by log: the name of each log, and its rows as a table for an append."""
    table = _table(batch)
    if log is not None:
        yield log, table
        return
    topics = batch.column("topic")
    if topics.null_count:
        raise BadRows("a row has null in the column `topic`: set it to a log's name")
    for topic in pc.unique(topics).to_pylist():
        yield topic, table.filter(pc.equal(topics, topic))


def _table(batch: Any) -> Any:
    names = batch.schema.names
    value = batch.column("value")
    if value.null_count:
        raise BadRows("a row has null in the column `value`: filter out such rows")
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
        raise BadRows("a header has null as its key or value: remove this header")
    if len({key for key, _ in found}) < len(found):
        raise BadRows("a record has two headers with the same name: remove one")
    try:
        return [(key, value if isinstance(value, str) else value.decode()) for key, value in found]
    except UnicodeDecodeError:
        raise BadRows("a header's value is not UTF-8: encode it as text") from None


def sizes(table: Any) -> Any:
    """The bytes of value, key and headers in each row, as a numpy array."""
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
    """The bytes of each row of an array of maps. The array's offsets show where a row's pairs end."""
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
