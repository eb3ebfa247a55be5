"""The repair queue and leases, as autorecovery and the metadata service exchange them."""

from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

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
    moves: bool = False
    """Another member may take the place: this one is lost, or is to be emptied."""


class RepairAdd(RangesBody):
    """One item of `POST /v1/repairs`."""

    ledger_id: LedgerId
    member: Member
    survivors: Annotated[int, Field(ge=0, le=1000)] | None = None
    moves: bool = False


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


class RepairSummary(Body):
    """`GET /v1/repairs/summary`: the whole queue in numbers, as it is now."""

    ledgers: int
    items: int
    waiting: int
    """Of the items, those whose next try is yet to come after a failure."""
    oldest_s: float
    """For how long the oldest item has been there; 0 where there is none."""


class RepairSettings(Body):
    """`GET /v1/repair-settings`: what operators set for all of autorecovery, kept over restarts.
    Null is what each process was told at its start.
    """

    paused: bool = False
    """Nothing is copied; what is found is queued all the same."""
    lost_bookie_delay_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    """Of all processes together."""
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None
    """Repairs at a time in each process."""
    triggers: Annotated[int, Field(ge=0)] = 0
    """Grows each time that somebody asks to have everything looked at now."""


class RepairSettingsPut(Body):
    """`PATCH /v1/repair-settings`: what it names is changed, null goes back to the default."""

    paused: bool = False
    lost_bookie_delay_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_named(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: v for name, v in handler(self).items() if name in self.model_fields_set}


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
