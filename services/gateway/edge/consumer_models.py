"""Pydantic models of the request and response bodies of consumers in the public API."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, StringConstraints, WithJsonSchema

from quorumlog.protocol.positions import Position
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge.models import DATE_TIME, Id, Model
from services.gateway.edge.pages import time_text
from services.gateway.logs.consumers import ConsumerView

LEASE_MS_MAX: Final = 600_000
"""Maximum lease. A new owner of the offsets' log waits this long before it grants a lease."""
HOLDER_CHARS_MAX: Final = 200

_From = Annotated[
    StrictInt | Annotated[StrictStr, StringConstraints(max_length=64)],
    Field(description="An offset, `earliest`, `latest`, -N or an RFC 3339 time, as in a read."),
]


class ConsumerCommit(Model):
    """The offset to commit, which is the offset of the first unprocessed record."""

    offset: Id


class ConsumerReset(Model):
    """Request to reset a consumer, with the offset at which the consumer continues."""

    to: _From


class LeaseAcquire(Model):
    """Request for a lease, with the holder and the time until the lease ends without a renewal."""

    holder: Annotated[
        str,
        StringConstraints(min_length=1, max_length=HOLDER_CHARS_MAX, pattern=r"^[^\x00]*$"),
        Field(description="The worker's name, which stays the same when the worker restarts."),
    ]
    started: Id = Field(
        default=0,
        description="When the worker started, for example in microseconds since 1970. A worker "
        "takes over a held lease at once if the holder has the same name and an earlier start. "
        "Other workers wait until the lease ends.",
    )
    lease_ms: Annotated[int, Field(ge=1000, le=LEASE_MS_MAX)] = 30_000
    start: _From = Field(
        default="earliest",
        alias="from",
        description="Where a consumer without a committed offset begins, like `to` of a reset.",
    )


class LeaseModel(Model):
    """A lease and its last holder. The lease may have expired."""

    holder: str
    fencing_token: Id
    lease_ms: Id


class LagModel(Model):
    """A consumer's lag. `bytes` counts whole batches, and `ms` is the age of the first unprocessed
    record. Both are null if they can't be determined now.
    """

    records: Id
    bytes: Id | None
    ms: Id | None


class PositionModel(Model):
    """A consumer's committed offset and lease."""

    log: str
    consumer: str
    offset: Id
    """The offset of the first unprocessed record."""
    version: Id
    log_created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    committed_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None
    lease: LeaseModel | None


class ConsumerModel(PositionModel):
    """A consumer with its state and lag."""

    state: Literal["ok", "log-replaced", "offset-truncated"]
    """`log-replaced`: a new log has the name. `offset-truncated`: unread records were dropped."""
    lag: LagModel | None


class ConsumerList(Model):
    """A page of consumers, sorted by name. `next`: the next page's `after`, or null at the end."""

    consumers: list[ConsumerModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}$")] | None


class PositionList(Model):
    """A page of consumers without lags, sorted by log and name. `next`: the next page's `after`."""

    consumers: list[PositionModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}/{LOG_NAME}$")] | None


def position_json(row: Position) -> dict[str, Any]:
    """Build the JSON object of a consumer's committed offset and lease."""
    lease = {"holder": row.holder, "fencing_token": row.token, "lease_ms": row.lease_ms}
    return {
        "log": row.log,
        "consumer": row.consumer,
        "offset": row.offset,
        "version": row.version,
        "log_created_at": row.created,
        "committed_at": time_text(row.committed_ms) if row.committed_ms else None,
        "lease": lease if row.holder else None,
    }


def consumer_json(view: ConsumerView) -> dict[str, Any]:
    """Build the JSON object of a consumer with its state and lag."""
    lag = view.lag
    shown = None if lag is None else {"records": lag.records, "bytes": lag.bytes, "ms": lag.ms}
    return position_json(view.position) | {"state": view.state, "lag": shown}
