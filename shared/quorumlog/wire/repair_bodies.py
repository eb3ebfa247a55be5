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
"""The form of `ledger_id:member`, which names the item after which a page of the queue begins."""

RangeEntry = Annotated[int, Field(ge=0, lt=ID_MAX)]
"""An entry id whose successor is valid, since the database's ranges exclude their upper bound."""
Range = tuple[RangeEntry, RangeEntry]
"""The first and the last entry of a range, both inclusive."""
Ranges = tuple[Range, ...]
Seconds = Annotated[float, Field(gt=0, le=LEASE_S_MAX, strict=False)]
Holder = Annotated[Text, Field(min_length=1, max_length=200)]


class RangesBody(Body):
    """A body with ranges, none of which is empty."""

    ranges: Ranges = Field(default=(), max_length=100_000)

    @model_validator(mode="after")
    def _are_ranges(self) -> Self:
        if any(first > last for first, last in self.ranges):
            raise ValueError("the first entry of a range must not be above its last entry")
        return self


class RepairItem(RangesBody):
    """A member's missing entries. `version`: the claim's fencing token, new at each change."""

    ledger_id: LedgerId
    member: Member
    version: Version
    survivors: int | None = None
    """Number of copies that are left; None if they were not counted."""
    failures: int = 0
    detail: Text = ""
    worker: Text | None = None
    created_at: Text = ""
    moves: bool = False
    """Whether another member may replace this member, which is lost or is being drained."""


class RepairAdd(RangesBody):
    """One item of `POST /v1/repairs`."""

    ledger_id: LedgerId
    member: Member
    survivors: Annotated[int, Field(ge=0, le=1000)] | None = None
    moves: bool = False


def repairs_of(ledger_id: int, missed: Iterable[tuple[str, int, int]]) -> list[RepairAdd]:
    """The items for missing entries of a ledger: a member, and a first and last entry each."""
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
    """`GET /v1/repairs`, and the answer to a claim. `next`: the next `after`; null at the end."""

    repairs: tuple[RepairItem, ...]
    next: Text | None = None


class RepairClaim(Body):
    """`POST /v1/repairs/claim`: up to `limit` unclaimed items, with the fewest survivors first. A
    claim ends after `lease_s` without progress.
    """

    worker: Holder
    lease_s: Seconds = 30.0
    limit: Annotated[int, Field(ge=1, le=100)] = 1


class RepairProgress(RangesBody):
    """`POST /v1/repairs/{ledger_id}/{member}/progress`: the member durably has `ranges` now.

    The answer has the remaining ranges; if there are none, the service deletes the item. 412 if the
    item has changed since the claim. After such a change, ranges that were already copied may have
    gaps again, so a worker that is still `current.worker` starts over.
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
    """`GET /v1/repairs/summary`: statistics of the current queue."""

    ledgers: int
    items: int
    waiting: int
    """Number of items that wait for their next attempt after a failure."""
    oldest_s: float
    """The age of the oldest item; 0 if there is none."""


class _Settings(Body):
    paused: bool = False
    """Whether copying is paused, while gaps are still detected and queued."""
    lost_bookie_delay_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    """The maximum copy rate of all processes together."""
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None
    """The maximum number of concurrent repairs in each process."""


class RepairSettings(_Settings):
    """`GET /v1/repair-settings`: operators' settings for all of autorecovery, which survive
    restarts. If a setting is null, each process uses its own configuration.
    """

    triggers: Annotated[int, Field(ge=0)] = 0
    """A counter of the requests for a full audit."""


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
    new holder, to distinguish the holder from former holders. Leases only make conflicts rare.
    """

    name: Text
    holder: Text
    token: Version
    expires_in_s: float
