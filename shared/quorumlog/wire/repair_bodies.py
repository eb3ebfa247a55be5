"""Bodies of the metadata service's API about the repair queue and leases, which autorecovery uses."""

from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.values import MEMBER, LedgerId, Member, Text, Version
from quorumlog.wire.bodies import Body

LEASE_S_MAX = 3600.0

REPAIR_PLACE = rf"(0|[1-9][0-9]{{0,18}}):{MEMBER}"
"""Where a page of the queue begins: after the item of this `ledger_id:member`."""

RangeEntry = Annotated[int, Field(ge=0, lt=ID_MAX)]
"""The database's ranges exclude their upper bound, which must be a valid id too."""
Range = tuple[RangeEntry, RangeEntry]
"""First and last entry, inclusive."""
Ranges = tuple[Range, ...]
Seconds = Annotated[float, Field(gt=0, le=LEASE_S_MAX, strict=False)]
Holder = Annotated[Text, Field(min_length=1, max_length=200)]


class RangesBody(Body):
    """A body with ranges, none of which is empty."""

    ranges: Ranges = Field(default=(), max_length=100_000)

    @model_validator(mode="after")
    def _are_ranges(self) -> Self:
        if any(first > last for first, last in self.ranges):
            raise ValueError("a range's first is above its last")
        return self


class RepairItem(RangesBody):
    """What a member lacks. `version` is the claim's fencing token: any change gives a new one."""

    ledger_id: LedgerId
    member: Member
    version: Version
    survivors: int | None = None
    """Copies that are left, where they were counted."""
    failures: int = 0
    detail: Text = ""
    worker: Text | None = None
    created_at: Text = ""
    moves: bool = False
    """Another member may take the place: this one is lost, or is being drained."""


class RepairAdd(RangesBody):
    """One item of `POST /v1/repairs`."""

    ledger_id: LedgerId
    member: Member
    survivors: Annotated[int, Field(ge=0, le=1000)] | None = None
    moves: bool = False


class RepairsAdd(Body):
    """`POST /v1/repairs`: add items to the queue; items of deleted ledgers are ignored."""

    items: tuple[RepairAdd, ...] = Field(max_length=10_000)


class RepairList(Body):
    """`GET /v1/repairs`; `next` is the next `after`, null at the end. Also the answer to a claim."""

    repairs: tuple[RepairItem, ...]
    next: Text | None = None


class RepairClaim(Body):
    """`POST /v1/repairs/claim`: up to `limit` unclaimed items, those with the fewest survivors first. A
    claim ends after `lease_s` without progress.
    """

    worker: Holder
    lease_s: Seconds = 30.0
    limit: Annotated[int, Field(ge=1, le=100)] = 1


class RepairProgress(RangesBody):
    """`POST /v1/repairs/{ledger_id}/{member}/progress`: the member durably has `ranges` now.

    The service deletes the item when nothing remains. 412 when the item changed since it was claimed:
    new gaps may be among the copied ranges, so a worker that still is `current.worker` starts over. The answer has the ranges
    that remain, none when the item is done.
    """

    worker: Holder
    version: Version
    lease_s: Seconds = 30.0


class RepairFail(Body):
    """`POST /v1/repairs/{ledger_id}/{member}/fail`: release the item; it can be claimed again after a
    pause that doubles with each failure.
    """

    worker: Holder
    version: Version
    detail: Text = ""


class RepairSummary(Body):
    """`GET /v1/repairs/summary`: the current queue in numbers."""

    ledgers: int
    items: int
    waiting: int
    """Items that wait for their next try after a failure."""
    oldest_s: float
    """The age of the oldest item; 0 where there is none."""


class _Settings(Body):
    paused: bool = False
    """Copying is paused; findings are queued all the same."""
    lost_bookie_delay_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    """For all processes together."""
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None
    """Repairs at a time in each process."""


class RepairSettings(_Settings):
    """`GET /v1/repair-settings`: operators' settings for all of autorecovery, which survive restarts.
    Null stands for each process's own configuration.
    """

    triggers: Annotated[int, Field(ge=0)] = 0
    """Grows with each request to look at everything now."""


class RepairSettingsPut(_Settings):
    """`PATCH /v1/repair-settings`: changes the given settings; null restores the default."""

    @model_serializer(mode="wrap")
    def _only_what_is_named(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: v for name, v in handler(self).items() if name in self.model_fields_set}


class LeaseTake(Body):
    """`PUT /v1/leases/{name}`: take or renew a lease."""

    holder: Holder
    ttl_s: Seconds = 5.0


class Lease(Body):
    """The current holder of a lease, which the caller compares with itself. `token` grows with each new
    holder, so that a former holder can be told from its successor. Leases only avoid duels.
    """

    name: Text
    holder: Text
    token: Version
    expires_in_s: float
