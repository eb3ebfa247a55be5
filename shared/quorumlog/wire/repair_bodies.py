"""The repair queue and leases, as autorecovery and the metadata service exchange them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.bodies import Body, LedgerId, Member, Text, Version

LEASE_S_MAX = 3600.0

RangeEntry = Annotated[int, Field(ge=0, lt=ID_MAX)]
"""The database's ranges end before their upper bound, which must be an id as well."""
Range = tuple[RangeEntry, RangeEntry]
"""First and last entry, inclusive."""
Ranges = tuple[Range, ...]
Seconds = Annotated[float, Field(gt=0, le=LEASE_S_MAX, strict=False)]
Holder = Annotated[Text, Field(min_length=1, max_length=200)]


class RangesBody(Body):
    """What has ranges; none of them is empty."""

    ranges: Ranges = Field(default=(), max_length=100_000)

    @model_validator(mode="after")
    def _are_ranges(self) -> Self:
        if any(first > last for first, last in self.ranges):
            raise ValueError("a range's first is above its last")
        return self


class Repair(RangesBody):
    """What a member lacks. `version` is the claim's fencing token: any change gives a new one."""

    ledger_id: LedgerId
    member: Member
    version: Version
    survivors: int | None = None
    """Copies that are left, where somebody counted."""
    failures: int = 0
    detail: Text = ""
    worker: Text | None = None
    created_at: Text = ""


class RepairAdd(RangesBody):
    """One item of `POST /v1/repairs`."""

    ledger_id: LedgerId
    member: Member
    survivors: Annotated[int, Field(ge=0, le=1000)] | None = None


class RepairsAdd(Body):
    """`POST /v1/repairs`: added to what is queued; ledgers that are gone are passed over."""

    items: tuple[RepairAdd, ...] = Field(max_length=10_000)


class RepairList(Body):
    """`GET /v1/repairs`; `next` is the next `after`, null at the end. Also what a claim gives."""

    repairs: tuple[Repair, ...]
    next: Text | None = None


class RepairClaim(Body):
    """`POST /v1/repairs/claim`: up to `limit` items that nobody works on, the ones with the fewest
    survivors first. A claim ends after `lease_s` without progress.
    """

    worker: Holder
    lease_s: Seconds = 30.0
    limit: Annotated[int, Field(ge=1, le=100)] = 1


class RepairProgress(RangesBody):
    """`POST /v1/repairs/{ledger_id}/{member}/progress`: `ranges` are on the member now, durable.

    When nothing remains the item is gone. 412 when the item changed since it was claimed: new
    gaps may be among what was copied, so a worker that still is `current.worker` begins anew.
    """

    worker: Holder
    version: Version
    lease_s: Seconds = 30.0


class RepairRemaining(RangesBody):
    """The answer to progress: what is still to be done; nothing, when the item is done."""


class RepairFail(Body):
    """`POST /v1/repairs/{ledger_id}/{member}/fail`: let go of it; it comes again after a pause
    that doubles with each failure.
    """

    worker: Holder
    version: Version
    detail: Text = ""


class LeaseTake(Body):
    """`PUT /v1/leases/{name}`: take it or hold on to it."""

    holder: Holder
    ttl_s: Seconds = 5.0


class Lease(Body):
    """Who holds a lease now: compare `holder` with yourself. `token` grows with each new holder,
    so whoever acts under a lease can be told from its successor. It spares duels, no more.
    """

    name: Text
    holder: Text
    token: Version
    expires_in_s: float


class LeaseGive(Body):
    """`DELETE /v1/leases/{name}`: give it back, if this holder still has it."""

    holder: Holder
    token: Version
