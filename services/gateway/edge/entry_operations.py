"""The operations of /v1/ledgers/{ledger_id}/entries."""

from typing import Final

from quorumlog import errors, header
from quorumlog.net.operations import JSON, Content, Operation, Reply
from quorumlog.net.parameters import path_id, query_integer
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from services.gateway.edge import models
from services.gateway.edge.media import NDJSON, OCTETS
from services.gateway.edge.operations import (
    ALWAYS,
    BYTES,
    ENCODING,
    EXPECT,
    LAST_EVENT_ID,
    LEDGER_ID,
    LIMIT,
    MAX_BYTES,
    NOTHING_FOLLOWS,
    OF_TRANSACTION,
    PASSWORD,
    TICKET,
    USUAL,
    WAIT_MS,
    WITH_BODY,
    WITH_METADATA,
    append_forms,
    gives,
    read_forms,
)

ENTRY_ID: Final = path_id("entry_id", "The entry.")
FROM: Final = query_integer("from", 0, ID_MAX, "The first entry.", 0)
TO: Final = query_integer("to", 0, ID_MAX, "The last entry, inclusive.")
AFTER: Final = query_integer("after", NO_ENTRY, ID_MAX, "The LAC that is known already.")

_READING: Final = (
    *USUAL,
    errors.WrongPassword,
    errors.NoSuchLedger,
    errors.EntryLost,
    errors.EntryUnavailable,
)
_POSITION_HEADERS: Final = {
    header.NEXT_ENTRY_ID: "With frames, Arrow and NDJSON: where to go on.",
    header.LAST_ADD_CONFIRMED: "With frames, Arrow and NDJSON: how far the ledger is confirmed.",
    header.LEDGER_CLOSED: "With frames, Arrow and NDJSON: true or false.",
    "Lac-Source": "With frames, Arrow and NDJSON: who said how far it is confirmed.",
}

APPEND: Final = Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/entries",
    "appendEntries",
    "Entries",
    "Append an entry or a batch",
    "The answer comes when everything is durable on Qa bookies. A batch gets contiguous ids; after "
    "an unknown outcome a prefix of it may be there.",
    (LEDGER_ID, EXPECT, PASSWORD),
    append_forms(
        Content(
            {"anyOf": [models.EntryData, models.EntryText, models.EntryJson, models.Batch]},
            {
                "text": {"text": "hello"},
                "bytes": {"data": "aGVsbG8="},
                "json": {"json": {"hello": "world"}},
                "batch": {"entries": [{"text": "a"}, {"data": "Yg=="}]},
            },
        ),
        "entry",
        "the column `value` (binary or string).",
    ),
    {
        200: Reply(
            "For NDJSON: a line for each acknowledged run, all before it included; an error is the "
            "last line, a problem object.",
            {NDJSON: Content({"type": "string"})},
        ),
        **gives(
            "Acknowledged.",
            {"anyOf": [models.AppendedEntry, models.AppendedBatch]},
            {
                "one": {"ledger_id": 1, "entry_id": 7, "last_add_confirmed": 7},
                "batch": {
                    "ledger_id": 1,
                    "first_entry": 8,
                    "last_entry": 107,
                    "last_add_confirmed": 107,
                },
            },
            status=201,
        ),
    },
    (
        *USUAL,
        *WITH_BODY,
        errors.WrongPassword,
        errors.NoSuchLedger,
        errors.LedgerClosed,
        errors.LedgerFenced,
        errors.OwnedByLog,
        *OF_TRANSACTION,
        errors.WriterLost,
        errors.EntryConflict,
        errors.UnexpectedEntryId,
        errors.NotEnoughBookies,
        errors.ReadOnly,
        errors.QuorumTimeout,
    ),
    needs_body=True,
)
READ: Final = Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/entries",
    "readEntries",
    "Entries",
    "Read confirmed entries",
    "Sees every entry that was acknowledged before the read began. At or beyond the end the list is "
    "empty. `next` is where to go on; the end is `closed` and a `next` above the last entry.",
    (LEDGER_ID, FROM, TO, LIMIT, MAX_BYTES, ENCODING, WAIT_MS, PASSWORD, LAST_EVENT_ID, TICKET),
    replies={
        200: Reply(
            "Entries, maybe none.",
            read_forms(
                Content(
                    models.Entries,
                    {
                        "one": {
                            "ledger_id": 1,
                            "entries": [{"entry_id": 0, "data": "aGVsbG8="}],
                            "next": 1,
                            "last_add_confirmed": 0,
                            "closed": False,
                            "lac_source": "writer",
                        }
                    },
                ),
                "entry",
                "entry id",
                "`entry_id` and `value`",
                "`event: end` once the ledger is closed.",
            ),
            _POSITION_HEADERS,
        ),
        204: NOTHING_FOLLOWS,
    },
    errors=_READING,
)
ENTRY: Final = Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/entries/{entry_id}",
    "readEntry",
    "Entries",
    "Read one entry",
    parameters=(LEDGER_ID, ENTRY_ID, ENCODING, PASSWORD),
    replies={
        200: Reply(
            "The entry.",
            {
                JSON: Content(
                    models.OneEntry,
                    {"bytes": {"ledger_id": 1, "entry_id": 0, "data": "aGVsbG8="}},
                ),
                OCTETS: Content(BYTES | {"description": "The payload alone."}),
            },
            {"Cache-Control": "`private, immutable` where the ledger is closed, else `no-store`."},
        )
    },
    errors=(*_READING, errors.NoSuchEntry, errors.NotYetConfirmed),
)
LAST_ADD_CONFIRMED: Final = Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/last-add-confirmed",
    "lastAddConfirmed",
    "Entries",
    "How far a ledger is confirmed",
    "With `after` and `wait_ms`: answers as soon as it is above `after`, or the ledger is closed.",
    (LEDGER_ID, AFTER, WAIT_MS, PASSWORD),
    replies=gives(
        "The last add confirmed; -1: nothing yet.",
        models.LastAddConfirmed,
        {"seven": {"ledger_id": 1, "last_add_confirmed": 7, "closed": False}},
    ),
    errors=_READING,
)
SOCKET: Final = Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/ws",
    "ledgerSocket",
    "Entries",
    "Append and follow the tail over one WebSocket",
    "Send frames as binary messages, or the JSON of an append as text: each acknowledged run is "
    'told, all before it included. `{"tail":{"from":0,"encoding":"base64"}}` asks for the tail '
    "(encoding `frames` for binary messages). A problem object ends the socket. With the subprotocol "
    "`quorumlog.appends` there is no tail, and each message is one append with the answer of HTTP.",
    (LEDGER_ID, PASSWORD, TICKET),
    replies={101: Reply("The socket is open.")},
    errors=(*ALWAYS, *WITH_METADATA, errors.NoSuchLedger),
)
