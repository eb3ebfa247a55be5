"""`application/vnd.apache.arrow.stream` on the append and read routes, if pyarrow is installed.

pyarrow takes up 170 MB, so gateways don't require it. Without pyarrow, the error names the packages
to install. Reads and appends need no Python call per record, except for headers.
"""

import asyncio
import gc
import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Final

from aiohttp import hdrs, web

from quorumlog.errors import BadRequest, NotAcceptable, UnsupportedMediaType
from quorumlog.net.parameters import invalid
from quorumlog.protocol.batch import EncodedRecords, StoredBatch
from quorumlog.protocol.record import Run
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.http.media import ARROW
from services.gateway.edge.payloads import (
    ENTRIES,
    RECORDS,
    Item,
    check_count,
    check_size,
    headers_of,
    too_large,
)

_INSTALL: Final = "pip install 'quorumlog[arrow]'"
_LEDGER: Final = ("value",)
_LOG: Final = ("value", "key", "headers", "timestamp")


@cache
def _columns() -> ModuleType | str:
    """Import the module that uses pyarrow and numpy, or return the name of the missing package."""
    try:
        columns = importlib.import_module("quorumlog.wire.columns")
    except ImportError as error:
        return error.name or "pyarrow"
    # Use the C library's allocator, which returns the memory of large pages to the system
    # (net/memory.py). pyarrow's own allocator keeps the memory.
    pyarrow = importlib.import_module("pyarrow")
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    # Create the first array in this thread: pyarrow then imports pandas, if installed (0.3 s).
    pyarrow.array(())
    # The modules are never freed, so the garbage collector need not visit their objects.
    gc.freeze()
    return columns


async def load(request: web.Request) -> None:
    """Import pyarrow if the request names Arrow's media type. The import takes 1 s, in a thread."""
    if not _columns.cache_info().currsize and any(
        ARROW in request.headers.get(name, "") for name in (hdrs.ACCEPT, hdrs.CONTENT_TYPE)
    ):
        await asyncio.to_thread(_columns)


def _for_bodies() -> ModuleType:
    found = _columns()
    if isinstance(found, str):
        raise UnsupportedMediaType(f"this gateway can't read {ARROW}: install {found} ({_INSTALL})")
    return found


def check_acceptable(media: str) -> None:
    """Raise NotAcceptable if the response must be Arrow and pyarrow is not installed."""
    if media == ARROW and isinstance(found := _columns(), str):
        raise NotAcceptable(f"this gateway can't write {ARROW}: install {found} ({_INSTALL})")


def check_supported(media: str) -> None:
    """Raise UnsupportedMediaType if the request body is Arrow and pyarrow is not installed."""
    if media == ARROW:
        _for_bodies()


def payloads(data: bytes, entry_bytes_max: int) -> list[bytes]:
    """Parse the payloads of an append to a ledger from the column `value` of an Arrow stream."""
    values: list[bytes] = _table(data, _LEDGER, ENTRIES).column("value").to_pylist()
    largest = max(map(len, values))
    if largest > entry_bytes_max:
        index = next(n for n, value in enumerate(values) if len(value) > entry_bytes_max)
        raise too_large(largest, entry_bytes_max, f"/entries/{index}")
    return values


def records(data: bytes, item: Item = RECORDS) -> EncodedRecords:
    """Parse the records of an append to a log from an Arrow stream."""
    columns = _for_bodies()
    found: EncodedRecords
    try:
        found, size = columns.encoded(
            _table(data, _LOG, item),
            lambda headers, index: headers_of(headers, f"/{item.many}/{index}/headers"),
        )
    except columns.BadColumns as error:
        raise invalid("", str(error)) from error
    check_size(size)
    return found


def _table(data: bytes, allowed: Sequence[str], item: Item) -> Any:
    columns = _for_bodies()
    try:
        table = columns.table(data, allowed, BATCH_ENTRIES_MAX)
    except columns.BadColumns as error:
        raise BadRequest(str(error)) from error
    check_count(table.num_rows, item)
    return table


def entries_stream(runs: Iterable[Run]) -> bytes:
    """Encode the entries of `runs` as an Arrow stream with the columns `entry_id` and `value`."""
    columns = _for_bodies()
    body: bytes = columns.stream(columns.ENTRIES, map(columns.entries, runs))
    return body


def records_stream(batches: Iterable[StoredBatch]) -> bytes:
    """Encode a log's records as an Arrow stream with all columns."""
    columns = _for_bodies()
    body: bytes = columns.stream(columns.RECORDS, map(columns.records, batches))
    return body
