"""The public bodies of consumers."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, StringConstraints, WithJsonSchema

from quorumlog.protocol.positions import Position
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge.models import DATE_TIME, Id, Model
from services.gateway.edge.pages import time_text
from services.gateway.logs.consumers import ConsumerView

LEASE_MS_MAX: Final = 600_000
"""A new owner of the positions waits for as long before another worker gets a lease (taste)."""
HOLDER_CHARS_MAX: Final = 200

_From = Annotated[
    StrictInt | Annotated[StrictStr, StringConstraints(max_length=64)],
    Field(description="An offset, `earliest`, `latest`, -N or an RFC 3339 time, as in a read."),
]


class ConsumerCommit(Model):
    """A position: the first record that is not processed yet."""

    offset: Id


class ConsumerReset(Model):
    """Where to go on."""

    to: _From


class LeaseAcquire(Model):
    """Who takes the lease, and for how long without a renewal or a commit."""

    holder: Annotated[
        str,
        StringConstraints(min_length=1, max_length=HOLDER_CHARS_MAX, pattern=r"^[^\x00]*$"),
        Field(description="The worker's name, the same one after a restart."),
    ]
    started: Id = Field(
        default=0,
        description="When the worker was started, for example in microseconds since 1970. A worker takes a held lease over at"
        " once if the holder has the same name and an earlier start. All others wait until the lease ends.",
    )
    lease_ms: Annotated[int, Field(ge=1000, le=LEASE_MS_MAX)] = 30_000
    start: _From = Field(
        default="earliest",
        alias="from",
        description="Where a consumer begins that has no position yet: as `to` of a reset.",
    )


class LeaseModel(Model):
    """Who holds the lease, perhaps beyond its time."""

    holder: str
    fencing_token: Id
    lease_ms: Id


class LagModel(Model):
    """What is not processed. `bytes` (of whole batches) and `ms` (the age of the first record) are null where they
    can't be read now.
    """

    records: Id
    bytes: Id | None
    ms: Id | None


class PositionModel(Model):
    """A consumer's position."""

    log: str
    consumer: str
    offset: Id
    """The first record that is not processed yet."""
    version: Id
    log_created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    committed_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None
    lease: LeaseModel | None


class ConsumerModel(PositionModel):
    """A consumer as it is now."""

    state: Literal["ok", "log-replaced", "offset-truncated"]
    """`log-replaced`: the position is one of a log that was deleted. `offset-truncated`: the log begins beyond it."""
    lag: LagModel | None


class ConsumerList(Model):
    """One page of consumers by name; `next` is the next `after`, null at the end."""

    consumers: list[ConsumerModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}$")] | None


class PositionList(Model):
    """One page of consumers, sorted by log and consumer, without lags; `next` is the next `after`, null at the end."""

    consumers: list[PositionModel]
    next: Annotated[str, StringConstraints(pattern=f"^{LOG_NAME}/{LOG_NAME}$")] | None


def position_json(row: Position) -> dict[str, Any]:
    """A position as the API shows it."""
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
    """A consumer as the API shows it."""
    lag = view.lag
    shown = None if lag is None else {"records": lag.records, "bytes": lag.bytes, "ms": lag.ms}
    return position_json(view.position) | {"state": view.state, "lag": shown}
