"""The names of the headers that quorumlog adds to HTTP. Clients and servers share these names."""

from typing import Final

REQUEST_ID: Final = "X-Request-Id"
"""The request's id, on every response. The service chooses the id if the client does not."""
RETRY_AFTER: Final = "Retry-After"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""A key that all copies of a retried request share, so that it is carried out once (rule 6a)."""

LEDGER_PASSWORD: Final = "Ledger-Password"  # noqa: S105
LEDGER_CLOSED: Final = "Ledger-Closed"
LAST_ADD_CONFIRMED: Final = "Last-Add-Confirmed"
NEXT_ENTRY_ID: Final = "Next-Entry-Id"
"""The id at which a reader continues, or that the next appended entry gets."""
NEXT_OFFSET: Final = "Next-Offset"

WRITER_TOKEN: Final = "Writer-Token"  # noqa: S105
FENCING_TOKEN: Final = "Fencing-Token"  # noqa: S105
"""The fencing token of a consumer's lease."""
CONSUMERS_VERSION: Final = "Consumers-Version"
"""A version that grows with each change of a consumer. Requests contain the highest one seen."""
PRODUCER_ID: Final = "Producer-Id"
PRODUCER_EPOCH: Final = "Producer-Epoch"
PRODUCER_SEQ: Final = "Producer-Seq"
PRODUCER_EXPECTED_SEQ: Final = "Producer-Expected-Seq"
PRODUCER_SINCE: Final = "Producer-Since"
PRODUCER_DUPLICATE: Final = "Producer-Duplicate"

APPENDS_PROTOCOL: Final = "quorumlog.appends"
"""WebSocket subprotocol (`Sec-WebSocket-Protocol`) in which each message is one append."""

AUDITED: Final = "Quorumlog-Audited"
"""Between processes: the client's audited request that caused this change."""
FORWARDED_WRITER: Final = "X-Forwarded-Writer"
"""Between processes: the id of the instance that must be the ledger's or log's writer (rule 11)."""
WITNESSES: Final = "Quorumlog-Witnesses"
"""Between processes: the witnesses that the database must contain. The metadata service checks
these in the request's transaction or snapshot. The response contains the sender's new witnesses
(rule 18a)."""
