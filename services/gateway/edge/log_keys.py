"""The resource /v1/logs/{name}/keys: the newest record of a key, and the keys of a log."""

from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog import errors
from quorumlog.net.budget import PEER
from quorumlog.net.parameters import Given, Parameter, query_integer
from quorumlog.protocol.ids import ID_MAX
from services.gateway.edge import log_models as models
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Named, Scope, on
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_bytes
from services.gateway.edge.http.sending import LARGE_BYTES
from services.gateway.edge.log_records import FROM, utf8
from services.gateway.edge.logs import CREATED
from services.gateway.edge.pages import LogPages, records_json
from services.gateway.edge.payloads import encoded_key
from services.gateway.logs.filters import Filter
from services.gateway.logs.manager import LogManager

_KEYS_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the records whose keys a page lists (chosen by judgement)."""

KEY: Final = Parameter(
    "key", "path", utf8, {"type": "string", "minLength": 1}, "The key (UTF-8).", b"", example="k-7"
)
BEFORE: Final = query_integer("before", 0, ID_MAX, "Only records below this offset.")
PREFIX: Final[Parameter[bytes]] = Parameter(
    "prefix", "query", utf8, {"type": "string"}, "Only keys that begin with this text.", b""
)
_RECORD: Final[dict[str, Any]] = {
    "offset": 9,
    "timestamp": "2026-01-02T03:04:05.678Z",
    "ledger_id": 1,
    "entry_id": 4,
    "key": "ay03",
    "headers": {},
    "data": "aGVsbG8=",
}
_READING: Final = (
    errors.NoSuchLog,
    errors.LogReplaced,
    errors.EntryLost,
    errors.EntryUnavailable,
    errors.RecoveryBlocked,
)


class KeyRoutes(op.Handlers, tag="Records"):
    """HTTP handlers for the keys of a log."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs, self._room = logs, room

    @op.operation(
        "GET /v1/logs/{name}/keys/{key}",
        (op.NAME, KEY, BEFORE, CREATED, op.ENCODING),
        replies=op.gives("The newest record.", models.RecordOut, {"one": _RECORD}),
        errors=(*_READING, errors.NoSuchKey, errors.KeyScanLimit),
        scope=on(Named.LOG, Scope.READ),
    )
    async def newest_record(self, request: web.Request, given: Given) -> web.Response:
        """Read the newest record of a key.

        The response is the last unexpired record with this key that was acknowledged before the
        request. The response is 404 `no-such-key` if no record before the offset `next_offset` has
        the key, or if the last record with the key is a tombstone. Large sealed ledgers have an
        index of keys. The gateway reads other ledgers backward. After 16 MiB without the key, the
        response is 503 `key-scan-limit` with the offset to send as `before` in the next request.
        """
        self._room.answers.check(PEER.get(), 1)  # refuse the request before reading
        name, key = given[op.NAME], given[KEY]
        page = await self._logs.keys.newest(
            name, key, before=given[BEFORE], created_at=given[CREATED]
        )
        if not page.batches:
            raise errors.NoSuchKey(
                f"no record before offset {page.next} has this key",
                log=name,
                next_offset=page.next,
            )
        data = next(records_json(page.batches[0], given[op.ENCODING]))
        if len(data) > LARGE_BYTES:
            self._room.keep(request, len(data))
        return json_bytes(data)

    @op.operation(
        "GET /v1/logs/{name}/keys",
        (op.NAME, PREFIX, FROM, CREATED, op.LIMIT, op.ENCODING),
        replies=op.gives(
            "A page of keys.",
            models.LogKeys,
            {
                "one": {
                    "log": "events",
                    "keys": [{"offset": 9, "key": "ay03"}],
                    "next": 10,
                    "first_offset": 0,
                    "closed": False,
                    "created_at": "2026-01-02T03:04:05.678901Z",
                }
            },
        ),
        errors=(*_READING, errors.OffsetBeyondEnd, errors.OffsetTruncated),
        scope=on(Named.LOG, Scope.READ),
    )
    async def list_keys(self, _request: web.Request, given: Given) -> web.Response:
        """List keys.

        A page covers a range of records, and lists each key in the range once, with the offset of
        the key's last record. Keys whose last record is a tombstone are left out. A later page may
        list the same key with a later offset, or have a tombstone for it. A page covers at most
        `limit` records with a key, and at most 16 MiB, so it may be empty before the log's end.
        Continue from `next` until `next` equals `from`.
        """
        self._room.answers.check(PEER.get(), 1)
        pages = LogPages(
            self._logs, given[op.NAME], given[CREATED], Filter(key_prefix=given[PREFIX])
        )
        page = await pages.read(given[FROM], limit=given[op.LIMIT], max_bytes=_KEYS_BYTES_MAX)
        newest: dict[bytes, int] = {}
        for found in page.batches:
            for number, key in enumerate(found.columns.keys):
                if key is None:
                    continue
                newest.pop(key, None)
                if number not in found.columns.tombstones:
                    newest[key] = found.first_offset + number
        keys = b",".join(
            b'{"offset":%d,%b}' % (offset, encoded_key(key, given[op.ENCODING]))
            for key, offset in newest.items()
        )
        end = orjson.dumps(pages.members(page))[1:]
        return json_bytes(b'{%b,"keys":[%b],%b' % (pages.name, keys, end))
