"""Reads at executors: pages of a range, as Arrow batches of the requested columns."""

import base64
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from quorumlog import header
from quorumlog.errors import (
    EntryLost,
    EntryUnavailable,
    LogReplaced,
    NoSuchLedger,
    NoSuchLog,
    NotAcceptable,
    OffsetBeyondEnd,
    OffsetTruncated,
    QuorumLogError,
)
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import DataLoss, TaskRange
from quorumlog.wire.columns import HEADERS, MEDIA, TIME

_PAGE_ROWS: Final = 10_000
_PAGE_BYTES: Final = 8 << 20
"""Limits of one request: the API's maximum, and a size that keeps an executor's memory small."""

_LOST: Final = (OffsetTruncated, OffsetBeyondEnd, EntryLost, LogReplaced, NoSuchLog)
"""The records are gone: truncated, lost, or of a log that was deleted (and created again)."""

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
"""The Arrow types that Spark makes of the columns' types (`to_arrow_schema`); a batch must have exactly
these."""


def read_range(options: ReadOptions, partition: object) -> Iterator[Any]:
    """The rows of one range; no rows for the empty partition that Spark makes of an empty plan."""
    if not isinstance(partition, TaskRange):
        return
    with options.connection.connect() as gateways:
        yield from rows(gateways, partition, options.columns, fails_on_loss=options.fails_on_loss)


def rows(
    gateways: Gateways, part: TaskRange, columns: tuple[str, ...], *, fails_on_loss: bool
) -> Iterator[Any]:
    """A range as record batches, page by page. Raises: DataLoss where records are gone meanwhile."""
    at = part.first
    path = f"/v1/logs/{part.log}" if part.log else f"/v1/ledgers/{part.ledger_id}"
    is_log = part.log is not None
    ask = _Asker(gateways, path, is_log=is_log, created_at=part.created_at)
    while at < part.end:
        try:
            page, following = ask.page(at, part.end)
        except (*_LOST, NoSuchLedger) as error:
            if fails_on_loss:
                what = part.log or f"ledger {part.ledger_id}"
                raise DataLoss(
                    f"{at} to {part.end - 1} of {what}: {error.detail}; failOnDataLoss=false goes on"
                ) from error
            at = max(at + 1, _following(error, part))
            continue
        if page.num_rows == 0:
            # The whole range was confirmed when the plan was made.
            raise EntryUnavailable(f"nothing was read at {at} of {path}", log=part.log)
        yield _shown(page, part, columns)
        at = following


def _following(error: QuorumLogError, part: TaskRange) -> int:
    """Where a range continues after a loss; the range's end where the error does not say."""
    found = None
    if isinstance(error, OffsetTruncated):
        found = error.members.get("first_offset")
    elif isinstance(error, EntryLost):
        found = error.members.get("next_offset" if part.log else "next")
    return part.end if found is None else int(found)


def page_sizes(gateways: Gateways, log: str, first: int, bytes_max: int) -> tuple[int, int]:
    """The number of rows of a page from `first` on, and their bytes: the size of records there. Zero
    where the records are gone: the reader decides about that.
    """
    ask = _Asker(gateways, f"/v1/logs/{log}", is_log=True, bytes_max=bytes_max)
    try:
        page, _ = ask.page(first, first + _PAGE_ROWS)
    except _LOST:
        return 0, 0
    return page.num_rows, page.column("value").nbytes + page.column("key").nbytes


class _Asker:
    """Reads pages: as Arrow, or as JSON from a gateway without Arrow."""

    def __init__(
        self,
        gateways: Gateways,
        path: str,
        *,
        is_log: bool,
        bytes_max: int = _PAGE_BYTES,
        created_at: str | None = None,
    ) -> None:
        self._bytes_max = min(bytes_max, _PAGE_BYTES)
        self._only = {} if created_at is None else {"created": created_at}
        self._noun = "records" if is_log else "entries"
        self._gateways, self._path, self._is_log = gateways, f"{path}/{self._noun}", is_log
        self._speaks_arrow = True

    def page(self, first: int, end: int) -> tuple[Any, int]:
        """Rows from `first` on, below `end`, and where to continue."""
        params: dict[str, str | int] = {
            "from": first,
            "limit": min(_PAGE_ROWS, end - first),
            "max_bytes": self._bytes_max,
            **self._only,
        }
        if self._speaks_arrow:
            try:
                answer = self._gateways.request(
                    "GET",
                    self._path,
                    params=params,
                    headers={"Accept": MEDIA},
                    is_repeatable=True,
                )
            except NotAcceptable:
                self._speaks_arrow = False
            else:
                name = header.NEXT_OFFSET if self._is_log else header.NEXT_ENTRY_ID
                return pa.ipc.open_stream(answer.body).read_all(), int(answer.headers[name])
        found = self._gateways.get(self._path, params)
        return (_records if self._is_log else _entries)(found[self._noun]), int(found["next"])


def _records(found: list[dict[str, Any]]) -> Any:
    return pa.table(
        {
            "offset": pa.array([e["offset"] for e in found], pa.int64()),
            "timestamp": pa.array([datetime.fromisoformat(e["timestamp"]) for e in found], TIME),
            "key": pa.array([_bytes(e["key"]) for e in found], pa.binary()),
            "headers": pa.array([list(e["headers"].items()) or None for e in found], HEADERS),
            "value": pa.array([_bytes(e["data"]) for e in found], pa.binary()),
            "ledger_id": pa.array([e["ledger_id"] for e in found], pa.int64()),
            "entry_id": pa.array([e["entry_id"] for e in found], pa.int64()),
        }
    )


def _entries(found: list[dict[str, Any]]) -> Any:
    return pa.table(
        {
            "entry_id": pa.array([e["entry_id"] for e in found], pa.int64()),
            "value": pa.array([_bytes(e["data"]) for e in found], pa.binary()),
        }
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _shown(page: Any, part: TaskRange, columns: tuple[str, ...]) -> Any:
    """A page with Spark's columns. For plain ledgers, the columns of logs are null."""
    count = page.num_rows
    arrays = [_column(name, page, part, count) for name in columns]
    schema = pa.schema([pa.field(name, TYPES[name]) for name in columns])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, page: Any, part: TaskRange, count: int) -> Any:
    is_log = part.log is not None
    match name:
        case "key" | "value" | "timestamp" if is_log or name == "value":
            return _whole(page.column(name))
        case "offset":
            return _whole(page.column("offset" if is_log else "entry_id"))
        case "entry":
            return _whole(page.column("entry_id"))
        case "ledger":
            return (
                _whole(page.column("ledger_id"))
                if is_log
                else pa.repeat(pa.scalar(part.ledger_id, pa.int64()), count)
            )
        case "topic" if is_log:
            return pa.repeat(pa.scalar(part.log, pa.string()), count)
        case "partition":
            return pa.repeat(pa.scalar(0, pa.int32()), count)
        case "timestampType" if is_log:
            # Kafka's 0: CreateTime. A record's own time, by default the time of the append.
            return pa.repeat(pa.scalar(0, pa.int32()), count)
        case "headers" if is_log:
            return _headers(_whole(page.column("headers")))
    return pa.nulls(count, TYPES[name])


def _whole(column: Any) -> Any:
    """A column as one chunk, as a record batch needs it."""
    found = column.combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found


def _headers(found: Any) -> Any:
    """A map of strings as Kafka's list of pairs; null where a record has no headers."""
    if found.null_count == len(found):
        return pa.nulls(len(found), _HEADER_LIST)
    pairs = [
        None if row is None else [{"key": key, "value": value.encode()} for key, value in row]
        for row in found.to_pylist()
    ]
    return pa.array(pairs, _HEADER_LIST)
