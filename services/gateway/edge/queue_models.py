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
"""Maximum records of a claim, and claims of a settlement. Chosen by judgement."""
DELAY_MS_MAX: Final = 3_600_000
"""Maximum delay of records that are given back. A new owner of the queues' log waits it anew."""
ATTEMPTS_MAX: Final = 1000
REASON_CHARS_MAX: Final = 500

Items = tuple[tuple[int, Offsets], ...]
"""Tokens, each with offsets of its claim."""
_From = Annotated[
    StrictInt | Annotated[StrictStr, StringConstraints(max_length=64)],
    Field(description="An offset, `earliest`, `latest`, -N or an RFC 3339 time, as in a read."),
]
_Attempts = Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)]


class QueuePut(Model):
    """A queue's settings. `order`, and a `dead_letter_log` that is set, can't be changed later."""

    lease_ms: Annotated[int, Field(ge=1000, le=LEASE_MS_MAX)] = 30_000
    """How long a worker has for a claim, unless it extends the claim."""
    max_attempts: _Attempts | None = None
    """How often a record is given before it goes to the dead-letter log; null: without limit."""
    dead_letter_log: LogName | None = None
    """The log for records that were given too often; required with `max_attempts`."""
    order: Literal["none", "key"] = "none"
    """`key`: the records of a key are given in their order, one at a time."""
    max_in_flight: Annotated[int, Field(ge=1, le=IN_FLIGHT_MAX)] = 1000
    """The most records that were given and are neither acknowledged nor dead letters."""
    start: _From = Field(default="earliest", alias="from", description="Where a new queue begins.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_attempts is not None and self.dead_letter_log is None:
            raise ValueError("max_attempts requires a dead_letter_log: no record is dropped")
        return self

    @property
    def settings(self) -> QueueSettings:
        """The settings as the protocol has them."""
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
    """`log-replaced`: the queue is of a deleted log, and another log has the name."""
    log_created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    version: Id
    """The version of the settings: the queue's `ETag`."""
    lease_ms: Id
    max_attempts: Id | None
    dead_letter_log: str | None
    order: Literal["none", "key"]
    max_in_flight: Id
    floor: Id
    """All records below this offset are done."""
    next: Id
    """No record from this offset on was given yet."""
    depth: Id
    """How many records are not done."""
    in_flight: Id
    """How many records workers have."""
    unsettled: Id
    """How many records were given and are not done, including those that wait to be given again."""
    redelivered: Id
    """How often records were given again."""
    dead: Id
    """How many records went to the dead-letter log."""
    dying: Id
    """How many records are on their way there."""
    dead_letter_error: str | None
    """The code of the error for which records can't be sent there now, such as `log-fenced`."""
    lost: Id
    """How many records truncation, retention or a loss took before they were done."""


class QueueList(Model):
    """A page of queues, sorted by name. `next`: the next page's `after`, or null at the end."""

    queues: list[QueueModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}$")] | None


class ClaimPart(Model):
    """Records of one claim."""

    claim: Id
    offsets: Annotated[list[Id], Field(min_length=1, max_length=CLAIM_MAX)] | None = None
    """The records; null: all that the claim still has."""


class RefusedPart(Model):
    """Records that a token does not settle, and why."""

    claim: Id
    offsets: list[Id]
    reason: Literal["acknowledged", "claim-ended"]
    """`acknowledged`: the record is done, perhaps by an earlier copy of this request.
    `claim-ended`: the lease ended or the record was given back; another worker may have it."""


class QueueClaim(Model):
    """Request for records."""

    max: Annotated[int, Field(ge=1, le=CLAIM_MAX)] = 10
    """The most records."""
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = 0
    """How long to wait while there is none."""
    ack: Annotated[list[ClaimPart], Field(max_length=CLAIM_MAX, default_factory=list)]
    """Records of earlier claims to acknowledge first, in the same change."""

    @property
    def acked(self) -> Items:
        """The records to acknowledge, as the protocol has them. Raises: InvalidRequest."""
        return _items(self.ack, "/ack")


class WorkRecord(RecordOut):
    """A claimed record: the members of a record that was read, and its claim."""

    attempt: Id
    """How often the record was given, with this time."""
    claim: Id
    """The token that settles the record."""


class QueueClaimed(Model):
    """The claimed records."""

    log: str
    queue: str
    records: list[WorkRecord]
    lease_ms: Id
    limit: Literal["max-in-flight", "window", "keys"] | None
    """The bound that keeps the queue from giving more: too many records are unsettled, the first
    one that is not done lies too far back, or all records that a claim looks at wait for their
    keys."""
    refused: list[RefusedPart]
    """Records of `ack` that were not acknowledged."""


class QueueSettle(Model):
    """Records to acknowledge or to extend."""

    claims: Annotated[list[ClaimPart], Field(min_length=1, max_length=CLAIM_MAX)]

    @property
    def items(self) -> Items:
        """The claims as the protocol has them. Raises: InvalidRequest."""
        return _items(self.claims, "/claims")


class QueueNak(QueueSettle):
    """Records to give back."""

    delay_ms: Annotated[int, Field(ge=0, le=DELAY_MS_MAX)] = 0
    """When the records may be given again."""
    reason: Annotated[
        str, StringConstraints(max_length=REASON_CHARS_MAX, pattern=r"^[^\x00]*$")
    ] = ""
    """Why; a dead letter has it as a header."""


class QueueSettled(Model):
    """How many records were settled, and those that were not."""

    done: Id
    refused: list[RefusedPart]


class QueueRedrive(Model):
    """Request to send dead letters back."""

    max: Annotated[int, Field(ge=1, le=CLAIM_MAX)] = 100
    """The most dead letters, oldest first."""


class QueueRedriven(Model):
    """How many dead letters went back to the queue's log."""

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
        raise invalid(pointer, f"lie more than {2 * WINDOW} apart: no claim has such records")
    return Offsets.of(offsets)


def queue_json(row: Queue, end: int) -> dict[str, Any]:
    """Build the JSON object of a queue; `end`: its log's end, -1 if the log was replaced."""
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
    """Build the JSON list of records that a settlement refused."""
    return [
        {"claim": one.token, "offsets": list(one.offsets), "reason": one.reason} for one in refused
    ]
