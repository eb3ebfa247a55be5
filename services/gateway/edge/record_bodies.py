"""The records of an append request, whatever its form: to a log, or to a transaction's ledger."""

from aiohttp import web

from quorumlog.net.operations import JSON
from quorumlog.protocol.batch import BATCH_BYTES_MAX, Record
from services.gateway.edge import arrow
from services.gateway.edge.http import body
from services.gateway.edge.http.media import ARROW, OCTETS
from services.gateway.edge.http.room import Room
from services.gateway.edge.log_payloads import check_size, records_from_json
from services.gateway.edge.payloads import RECORDS, Item, from_frames


async def read_records(
    request: web.Request, room: Room, media: str, item: Item = RECORDS
) -> tuple[Record, ...]:
    """The records of a request that is one batch: JSON, frames, Arrow, or one record as it is. `item` is what the
    request's path calls them.
    """
    limits = room.limits
    if media == JSON:
        data = await body.read(request, room, limits.body_bytes_max)
        return await body.in_turn(
            request, room, data or b"{}", lambda body: records_from_json(body, item)
        )
    if media == OCTETS:
        value = await body.read(request, room, BATCH_BYTES_MAX)
        records: tuple[Record, ...] = (Record(value),)
    elif media == ARROW:
        data = await body.read(request, room, limits.frames_bytes_max)
        records = await body.in_turn(request, room, data, lambda body: arrow.records(body, item))
    else:
        data = await body.read(request, room, limits.frames_bytes_max)
        records = tuple(Record(value) for value in from_frames(data, BATCH_BYTES_MAX, item))
    check_size(records)
    return records
