"""Bodies of the metadata service's API for the repair queue and leases, which autorecovery uses."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.values import MEMBER, LedgerId, Member, Text, Version
from quorumlog.wire.bodies import Body

LEASE_S_MAX = 3600.0

REPAIR_PLACE = rf"(0|[1-9][0-9]{{0,18}}):{MEMBER}"
"""A page of the queue begins after the item of this `ledger_id:member`."""

RangeEntry = Annotated[int, Field(ge=0, lt=ID_MAX)]
"""The database's ranges exclude their upper bound, so the id after a range must be valid too."""
Range = tuple[RangeEntry, RangeEntry]
"""The first and the last entry, both inclusive."""
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
    """A member's missing entries. `version`: the claim's fencing token, renewed by each change."""

    ledger_id: LedgerId
    member: Member
    version: Version
    survivors: int | None = None
    """How many copies are left; None if they were not counted."""
    failures: int = 0
    detail: Text = ""
    worker: Text | None = None
    created_at: Text = ""
    moves: bool = False
    """Whether another member may replace this one, which is lost or is being drained."""


class RepairAdd(RangesBody):
    """One item of `POST /v1/repairs`."""

    ledger_id: LedgerId
    member: Member
    survivors: Annotated[int, Field(ge=0, le=1000)] | None = None
    moves: bool = False


def repairs_of(ledger_id: int, missed: Iterable[tuple[str, int, int]]) -> list[RepairAdd]:
    """The items for what members of a ledger lack: a member, and its first and last entry each."""
    ranges = defaultdict[str, list[Range]](list)
    for member, first, last in missed:
        ranges[member].append((first, last))
    return [
        RepairAdd(ledger_id=ledger_id, member=member, ranges=tuple(found))
        for member, found in ranges.items()
    ]


class RepairsAdd(Body):
    """`POST /v1/repairs`: add items to the queue; items of deleted ledgers are ignored."""

    items: tuple[RepairAdd, ...] = Field(max_length=10_000)


class RepairList(Body):
    """`GET /v1/repairs`, and the answer to a claim; `next` is the next `after`, null at the end."""

    repairs: tuple[RepairItem, ...]
    next: Text | None = None


class RepairClaim(Body):
    """`POST /v1/repairs/claim`: up to `limit` unclaimed items, those with the fewest survivors
    first. A claim ends after `lease_s` without progress.
    """

    worker: Holder
    lease_s: Seconds = 30.0
    limit: Annotated[int, Field(ge=1, le=100)] = 1


class RepairProgress(RangesBody):
    """`POST /v1/repairs/{ledger_id}/{member}/progress`: the member durably has `ranges` now.

    The answer has the ranges that remain; if there are none, the service deletes the item. 412 if
    the item changed since it was claimed: new gaps may be among the copied ranges, so a worker that
    is still `current.worker` starts over.
    """

    worker: Holder
    version: Version
    lease_s: Seconds = 30.0


class RepairFail(Body):
    """`POST /v1/repairs/{ledger_id}/{member}/fail`: release the item, which can be claimed again
    after a pause that doubles with each failure.
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
    """The age of the oldest item; 0 if there is none."""


class _Settings(Body):
    paused: bool = False
    """Whether copying is paused; gaps that are found are queued all the same."""
    lost_bookie_delay_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    """The rate of all processes together."""
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None
    """The number of concurrent repairs in each process."""


class RepairSettings(_Settings):
    """`GET /v1/repair-settings`: operators' settings for all of autorecovery, which survive
    restarts. If a setting is null, each process uses its own configuration.
    """

    triggers: Annotated[int, Field(ge=0)] = 0
    """Grows with each request to check everything now."""


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
    """The current holder of a lease, which the caller compares with itself. `token` grows with each
    new holder, to distinguish it from former ones. Leases only avoid conflicts.
    """

    name: Text
    holder: Text
    token: Version
    expires_in_s: float
