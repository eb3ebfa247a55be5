"""The names of the headers that quorumlog adds to HTTP, for both sides."""

from typing import Final

REQUEST_ID: Final = "X-Request-Id"
"""On every answer: the client's id of the request, or one that the service drew."""
RETRY_AFTER: Final = "Retry-After"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""Identifies a request that its sender may retry: copies with the same key are carried out once (rule 6a)."""

LEDGER_PASSWORD: Final = "Ledger-Password"  # noqa: S105
LEDGER_CLOSED: Final = "Ledger-Closed"
LAST_ADD_CONFIRMED: Final = "Last-Add-Confirmed"
NEXT_ENTRY_ID: Final = "Next-Entry-Id"
"""Where to go on reading, or the id that the next entry gets."""
NEXT_OFFSET: Final = "Next-Offset"

WRITER_TOKEN: Final = "Writer-Token"  # noqa: S105
FENCING_TOKEN: Final = "Fencing-Token"  # noqa: S105
"""Of the lease of a consumer."""
CONSUMERS_VERSION: Final = "Consumers-Version"
"""In answers about consumers: how far their log has come. In a request: the highest one that the sender has seen."""
PRODUCER_ID: Final = "Producer-Id"
PRODUCER_EPOCH: Final = "Producer-Epoch"
PRODUCER_SEQ: Final = "Producer-Seq"
PRODUCER_EXPECTED_SEQ: Final = "Producer-Expected-Seq"
PRODUCER_SINCE: Final = "Producer-Since"
PRODUCER_DUPLICATE: Final = "Producer-Duplicate"

APPENDS_PROTOCOL: Final = "quorumlog.appends"
"""Of WebSockets (`Sec-WebSocket-Protocol`): each message is one append, which gets one answer."""

AUDITED: Final = "Quorumlog-Audited"
"""Between processes: the audited request of a client that a change is made for."""
FORWARDED_WRITER: Final = "X-Forwarded-Writer"
"""Between processes: the instance that the sender takes for the ledger's or log's writer (rule 11)."""
WITNESSES: Final = "Quorumlog-Witnesses"
"""Between processes, in a request: witnesses to look for in the database, in the same transaction or
snapshot. In the answer: the database has them, and these witnesses stand for them from now on."""
