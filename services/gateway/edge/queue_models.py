"""Pydantic models of the request and response bodies of work queues in the public API."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StrictInt, StrictStr, StringConstraints, WithJsonSchema, model_validator

from quorumlog.net.parameters import invalid
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_requests import Refused
from quorumlog.protocol.queue_state import Queue, QueueSettings
from quorumlog.protocol.queues import IN_FLIGHT_MAX, WINDOW
from quorumlog.protocol.values import LOG_NAME, LogName
from services.gateway.edge.consumer_models import LEASE_MS_MAX
from services.gateway.edge.http.limits import WAIT_MS_MAX
from services.gateway.edge.log_models import RecordOut
from services.gateway.edge.models import DATE_TIME, Id, Model

CLAIM_MAX: Final = 1000
"""Maximum records of a claim, and maximum claims of a settlement (chosen by judgement)."""
DELAY_MS_MAX: Final = 3_600_000
"""Maximum delay of returned records. The delay restarts if the queues' log gets a new owner."""
ATTEMPTS_MAX: Final = 1000
REASON_CHARS_MAX: Final = 500

Items = tuple[tuple[int, Offsets], ...]
"""Tokens of claims, each with offsets of claimed records."""
_From = Annotated[
    StrictInt | Annotated[StrictStr, StringConstraints(max_length=64)],
    Field(description="An offset, `earliest`, `latest`, -N or an RFC 3339 time, as in a read."),
]
_Attempts = Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)]


class QueuePut(Model):
    """A queue's settings. `order` can't be changed later, nor can `dead_letter_log` once set."""

    lease_ms: Annotated[int, Field(ge=1000, le=LEASE_MS_MAX)] = 30_000
    """Duration of a claim, unless the worker extends the claim."""
    max_attempts: _Attempts | None = None
    """Maximum deliveries of a record before it goes to the dead-letter log. Null: no maximum."""
    dead_letter_log: LogName | None = None
    """The log for records that were delivered too often. Required with `max_attempts`."""
    order: Literal["none", "key"] = "none"
    """With `key`, the records of a key are delivered in order, one at a time."""
    max_in_flight: Annotated[int, Field(ge=1, le=IN_FLIGHT_MAX)] = 1000
    """Maximum delivered records that are neither acknowledged nor dead letters."""
    start: _From = Field(default="earliest", alias="from", description="Where a new queue begins.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_attempts is not None and self.dead_letter_log is None:
            raise ValueError("max_attempts requires a dead_letter_log: send both")
        return self

    @property
    def settings(self) -> QueueSettings:
        """Convert to the protocol's `QueueSettings`."""
        return QueueSettings(
            self.lease_ms,
            self.max_attempts or 0,
            self.dead_letter_log or "",
            self.order,
            self.max_in_flight,
        )


class QueueModel(Model):
    """A queue, its settings and its progress."""

    log: str
    queue: str
    state: Literal["ok", "log-replaced"]
    """`log-replaced`: the queue's log was deleted, and another log has the name."""
    log_created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    version: Id
    """The version of the settings, which is the queue's `ETag`."""
    lease_ms: Id
    max_attempts: Id | None
    dead_letter_log: str | None
    order: Literal["none", "key"]
    max_in_flight: Id
    floor: Id
    """All records below this offset are acknowledged, dead letters or lost."""
    next: Id
    """The offset of the first record that was never delivered."""
    depth: Id
    """Number of records that are neither acknowledged, nor dead letters, nor lost."""
    in_flight: Id
    """Number of records that are currently claimed."""
    unsettled: Id
    """Number of delivered, unsettled records, including records that wait for redelivery."""
    redelivered: Id
    """Number of redeliveries."""
    dead: Id
    """Number of records that were moved to the dead-letter log."""
    dying: Id
    """Number of records that the queue is moving to the dead-letter log."""
    dead_letter_error: str | None
    """The code of the last error of moving dead letters, such as `log-fenced`; null if none."""
    lost: Id
    """Number of records that truncation, retention or a loss removed before they were settled."""


class QueueList(Model):
    """A page of queues, sorted by name. `next`: the next page's `after`, or null at the end."""

    queues: list[QueueModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}$")] | None


class ClaimPart(Model):
    """Records of one claim."""

    claim: Id
    offsets: Annotated[list[Id], Field(min_length=1, max_length=CLAIM_MAX)] | None = None
    """The records' offsets. Null means all remaining records of the claim."""


class RefusedPart(Model):
    """Records that a claim's token could not settle, with the reason."""

    claim: Id
    offsets: list[Id]
    reason: Literal["acknowledged", "claim-ended"]
    """`acknowledged`: the record is already settled, perhaps by an earlier copy of this request.
    `claim-ended`: the lease ended or the record was returned. Another worker may have claimed it."""


class QueueClaim(Model):
    """Request to claim records."""

    max: Annotated[int, Field(ge=1, le=CLAIM_MAX)] = 10
    """Maximum number of records."""
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = 0
    """How long to wait if there are no records."""
    ack: Annotated[list[ClaimPart], Field(max_length=CLAIM_MAX, default_factory=list)]
    """Records of earlier claims to acknowledge first, atomically with the claim."""

    @property
    def acked(self) -> Items:
        """Convert the records to acknowledge to the protocol's values. Raises: InvalidRequest."""
        return _items(self.ack, "/ack")


class WorkRecord(RecordOut):
    """A claimed record, with its claim."""

    attempt: Id
    """The number of the record's deliveries, including this delivery."""
    claim: Id
    """The token that settles the record."""


class QueueClaimed(Model):
    """The claimed records."""

    log: str
    queue: str
    records: list[WorkRecord]
    lease_ms: Id
    limit: Literal["max-in-flight", "window", "keys"] | None
    """Why the queue delivers no more records now. `max-in-flight`: too many records are unsettled.
    `window`: the next record is too far after the first unsettled one. `keys`: all searched records
    wait for an earlier record of their key."""
    refused: list[RefusedPart]
    """Records of `ack` that were not acknowledged."""


class QueueSettle(Model):
    """Records to acknowledge or to extend."""

    claims: Annotated[list[ClaimPart], Field(min_length=1, max_length=CLAIM_MAX)]

    @property
    def items(self) -> Items:
        """Convert the claims to the protocol's values. Raises: InvalidRequest."""
        return _items(self.claims, "/claims")


class QueueNak(QueueSettle):
    """Records to return to the queue."""

    delay_ms: Annotated[int, Field(ge=0, le=DELAY_MS_MAX)] = 0
    """Time until the records may be delivered again."""
    reason: Annotated[
        str, StringConstraints(max_length=REASON_CHARS_MAX, pattern=r"^[^\x00]*$")
    ] = ""
    """The reason, which becomes a header of a dead letter."""


class QueueSettled(Model):
    """The number of settled records, and the records that could not be settled."""

    done: Id
    refused: list[RefusedPart]


class QueueRedrive(Model):
    """Request to move dead letters back to the queue's log."""

    max: Annotated[int, Field(ge=1, le=CLAIM_MAX)] = 100
    """Maximum number of dead letters. The oldest dead letters are moved first."""


class QueueRedriven(Model):
    """The number of dead letters that were moved back to the queue's log."""

    redriven: Id


def _items(parts: Sequence[ClaimPart], pointer: str) -> Items:
    return tuple(
        (part.claim, _offsets(part.offsets, f"{pointer}/{at}/offsets"))
        for at, part in enumerate(parts)
    )


def _offsets(offsets: list[int] | None, pointer: str) -> Offsets:
    if offsets is None:
        return NONE
    if max(offsets) - min(offsets) > 2 * WINDOW:
        raise invalid(pointer, f"must lie at most {2 * WINDOW} apart, as the records of a claim do")
    return Offsets.of(offsets)


def queue_json(row: Queue, end: int) -> dict[str, Any]:
    """Build the JSON object of a queue. `end` is the log's end, or -1 if the log was replaced."""
    settings = row.settings
    return {
        "log": row.log,
        "queue": row.queue,
        "state": "ok" if end >= 0 else "log-replaced",
        "log_created_at": row.created,
        "version": row.settings_version,
        "lease_ms": settings.lease_ms,
        "max_attempts": settings.max_attempts or None,
        "dead_letter_log": settings.dead_letter_log or None,
        "order": settings.order,
        "max_in_flight": settings.max_in_flight,
        "floor": row.floor,
        "next": row.next,
        "depth": row.depth(end),
        "in_flight": row.in_flight,
        "unsettled": len(row.given),
        "redelivered": row.redelivered,
        "dead": row.dead,
        "dying": len(row.moving),
        "dead_letter_error": row.failed or None,
        "lost": row.lost,
    }


def refused_json(refused: Sequence[Refused]) -> list[dict[str, Any]]:
    """Build the JSON list of records that could not be settled."""
    return [
        {"claim": one.token, "offsets": list(one.offsets), "reason": one.reason} for one in refused
    ]
