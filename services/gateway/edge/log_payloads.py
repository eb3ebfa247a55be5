"""Parse the records of an append to a log or to a transaction's ledger, in any media type.

In JSON, a record's key is base64 if the record has `data`, and otherwise text. A record whose `data`
or `text` is null is a tombstone (rule 27d).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from quorumlog.errors import BadRequest
from quorumlog.net.operations import JSON
from quorumlog.net.parameters import escaped, invalid
from quorumlog.protocol.batch import BATCH_BYTES_MAX, TTL_S_MAX, EncodedRecords, Record
from quorumlog.wire import strict
from services.gateway.edge import arrow, payloads
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import ARROW, OCTETS
from services.gateway.edge.starts import microseconds_of

_FIELDS: Final = frozenset((*payloads.FORMS, "key", "headers", "timestamp", "ttl_s"))


def records_from_json(
    data: bytes, item: payloads.Item = payloads.RECORDS, *, count: int | None = None
) -> tuple[Record, ...]:
    """Parse the records of a JSON body: one record, or a batch in the member `item.many`. `count`
    is the number of the body's `strict.marks`, if known.
    """
    return strict.kept(data, lambda body: _records(data, body, item), count=count)


def _records(data: bytes, body: Any, item: payloads.Item) -> tuple[Record, ...]:
    strict.check_strings(data, strict.count_strings(body))
    found = payloads.batch_of(body, item)
    if found is None:
        records: tuple[Record, ...] = (_record(body, ""),)
    else:
        records = tuple(_record(each, f"/{item.many}/{n}") for n, each in enumerate(found))
    payloads.check_size(sum(record.size for record in records))
    return records


def record_of_line(line: bytes, number: int, entry_bytes_max: int) -> Record:
    """Parse a line of NDJSON to a record. Errors point to /lines/<number>."""
    pointer = f"/lines/{number}"

    def checked(record: Any) -> Record:
        strict.check_strings(line, strict.count_strings(record))
        return _record(record, pointer)

    try:
        record = strict.kept(line, checked)
    except BadRequest as error:
        raise BadRequest(f"{pointer}: {error.detail}") from error
    if len(record.value) > entry_bytes_max:
        raise payloads.too_large(len(record.value), entry_bytes_max, pointer, payloads.RECORDS)
    return record


def _record(record: object, pointer: str) -> Record:
    if not isinstance(record, dict):
        raise invalid(pointer, "must be an object with `data`, `text` or `json`")
    for name in record:
        if name not in _FIELDS:
            raise invalid(f"{pointer}/{escaped(name)}", "is not a field of a record")
    forms = [form for form in payloads.FORMS if form in record]
    if len(forms) != 1:
        raise invalid(pointer, f"must have exactly one of {', '.join(payloads.FORMS)}")
    (form,) = forms
    is_tombstone = form != "json" and record[form] is None
    if is_tombstone and record.get("key") is None:
        raise invalid(f"{pointer}/key", f"is required for a tombstone ({form} is null)")
    value = b""
    if not is_tombstone:
        value = payloads.value_of(form, record[form], f"{pointer}/{form}")
    key, time = record.get("key"), record.get("timestamp")
    if key is not None:
        key = payloads.value_of("data" if form == "data" else "text", key, f"{pointer}/key")
    headers = payloads.headers_of(record.get("headers"), f"{pointer}/headers")
    if time is not None:
        time = microseconds_of(time, f"{pointer}/timestamp") // 1000
    ttl_s = record.get("ttl_s") or 0
    if "ttl_s" in record and not (type(ttl_s) is int and 1 <= ttl_s <= TTL_S_MAX):
        raise invalid(f"{pointer}/ttl_s", f"must be an integer from 1 to {TTL_S_MAX}")
    return Record(value, key, headers, time, is_tombstone, ttl_s)


def with_ttl(
    records: Sequence[Record] | EncodedRecords, ttl_s: int | None
) -> Sequence[Record] | EncodedRecords:
    """Set the request's `ttl_s` on the records that have no `ttl_s` of their own."""
    if not ttl_s:
        return records
    if isinstance(records, EncodedRecords):
        return records.with_ttl(ttl_s)
    return [record if record.ttl_s else replace(record, ttl_s=ttl_s) for record in records]


async def read_records(
    request: web.Request, room: Room, media: str, item: payloads.Item = payloads.RECORDS
) -> tuple[Record, ...] | EncodedRecords:
    """Read a request's batch of records from JSON, frames or Arrow, or one record as bytes. `item`
    names the records in error messages. Raises: InvalidRequest, and the errors of `body.read`.
    """
    limits = room.limits
    if media == JSON:
        data = await body.read(request, room, limits.body_bytes_max)
        return await body.in_turn(
            request,
            room,
            data or b"{}",
            lambda text, count: records_from_json(text, item, count=count),
        )
    if media == OCTETS:
        value = await body.read(request, room, BATCH_BYTES_MAX)
        records: tuple[Record, ...] = (Record(value),)
    elif media == ARROW:
        data = await body.read(request, room, limits.frames_bytes_max)
        return await body.in_turn(
            request, room, data, lambda stream, _: arrow.records(stream, item), is_json=False
        )
    else:
        data = await body.read(request, room, limits.frames_bytes_max)
        records = tuple(
            Record(value) for value in payloads.from_frames(data, BATCH_BYTES_MAX, item)
        )
    payloads.check_size(sum(record.size for record in records))
    return records
