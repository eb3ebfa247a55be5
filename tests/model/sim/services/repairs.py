"""The repair queue, leases and settings of the simulated metadata service."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quorumlog.errors import NoSuchRepair, VersionConflict
from quorumlog.wire.repair_bodies import (
    Lease,
    LeaseTake,
    Ranges,
    RangesBody,
    RepairClaim,
    RepairFail,
    RepairItem,
    RepairList,
    RepairProgress,
    RepairsAdd,
    RepairSettings,
    RepairSettingsPut,
    RepairSummary,
)
from tests.model.sim.plan import SECOND
from tests.model.sim.services.net import Answer, Request
from tests.model.sim.services.tables import Held, Item, Tables

if TYPE_CHECKING:
    from tests.model.sim.services.metadata import Metadata

ModelRoute = tuple[str, str, Callable[..., object], str]
"""Method, path, work, and by which of its ways the service asks its database."""

RUNS: Final = "run"
"""No witness is looked for (`services.metadata.database.Database.run`)."""
READS: Final = "read"
"""What the request presents is (`read`)."""
CHANGES: Final = "transact"
"""All that the service knows of is (`transact`)."""

_PAUSE_S_MAX: Final = 300
_UNCOUNTED: Final = 32767


class RepairQueue:
    """What members lack, and who works on it."""

    def __init__(self, metadata: "Metadata") -> None:
        self._metadata = metadata
        item = r"/v1/repairs/(?P<id>\d+)/(?P<member>[^/]+)"
        lease = r"/v1/leases/(?P<name>\w+)"
        self.routes: tuple[ModelRoute, ...] = (
            ("GET", "/v1/repairs", self._list, RUNS),
            ("POST", "/v1/repairs", self._add, CHANGES),
            ("POST", "/v1/repairs/claim", self._claim, CHANGES),
            ("GET", "/v1/repairs/summary", lambda _request: self._summary(), RUNS),
            ("POST", "/v1/repairs/hurry", lambda _request: self._hurry(), CHANGES),
            ("POST", "/v1/repairs/trigger", lambda _request: self._trigger(), CHANGES),
            ("POST", item + "/progress", self._progress, CHANGES),
            ("POST", item + "/fail", self._fail, CHANGES),
            ("GET", "/v1/repair-settings", lambda _request: self._tables.settings, RUNS),
            ("PATCH", "/v1/repair-settings", self._change_settings, CHANGES),
            ("PUT", lease, self._take_lease, CHANGES),
        )

    @property
    def _tables(self) -> Tables:
        return self._metadata.tables

    @property
    def _now(self) -> int:
        return self._metadata.net.now

    def add(
        self,
        ledger_id: int,
        member: str,
        ranges: Ranges,
        *,
        survivors: int | None = None,
        moves: bool = False,
    ) -> None:
        """Merge ranges into an item, or make it; a ledger that is gone lacks nothing."""
        if self._tables.rows.get(ledger_id) is None:
            return
        item = self._tables.repairs.get((ledger_id, member))
        if item is None:
            item = Item([], created_at=self._now)
            self._tables.repairs[ledger_id, member] = item
        elif item.worker is not None or (moves and not item.moves):
            # Neither a claim that this ends nor a pause keeps others from it.
            item.next_try_at = self._now
        item.ranges = _joined([*item.ranges, *ranges])
        item.version, item.worker = self._new_version(), None
        item.moves |= moves
        if survivors is not None:
            item.survivors = survivors

    def _new_version(self) -> int:
        self._tables.repair_version += 1
        return self._tables.repair_version

    def _list(self, request: Request) -> RepairList:
        limit, after = int(request.query.get("limit", 100)), (-1, "")
        if "after" in request.query:
            ledger_id, _, member = request.query["after"].partition(":")
            after = int(ledger_id), member
        keys = sorted(key for key in self._tables.repairs if key > after)
        page = keys[:limit]
        return RepairList(
            repairs=tuple(self._repair(*key) for key in page),
            next=f"{page[-1][0]}:{page[-1][1]}" if len(keys) > limit else None,
        )

    def _repair(self, ledger_id: int, member: str) -> RepairItem:
        item = self._tables.repairs[ledger_id, member]
        return RepairItem(
            ledger_id=ledger_id,
            member=member,
            ranges=tuple(item.ranges),
            version=item.version,
            survivors=item.survivors,
            moves=item.moves,
            failures=item.failures,
            detail=item.detail,
            worker=item.worker,
        )

    def _add(self, request: Request) -> Answer:
        for item in RepairsAdd.model_validate_json(request.body).items:
            self.add(
                item.ledger_id,
                item.member,
                item.ranges,
                survivors=item.survivors,
                moves=item.moves,
            )
        return Answer(204)

    def _claim(self, request: Request) -> RepairList:
        body = RepairClaim.model_validate_json(request.body)
        due = sorted(
            (_survivors(item), item.next_try_at, *key)
            for key, item in self._tables.repairs.items()
            if item.next_try_at <= self._now
        )
        taken = []
        for survivors, _, ledger_id, member in due[: body.limit]:
            item = self._tables.repairs[ledger_id, member]
            item.worker, item.version = body.worker, self._new_version()
            item.next_try_at = self._now + round(body.lease_s * SECOND)
            taken.append((survivors, ledger_id, member))
        keys = [(ledger_id, member) for _, ledger_id, member in sorted(taken)]
        return RepairList(repairs=tuple(self._repair(*key) for key in keys))

    def _summary(self) -> RepairSummary:
        repairs, now = self._tables.repairs, self._now
        waiting = [
            item
            for item in repairs.values()
            if item.worker is None and item.failures > 0 and item.next_try_at > now
        ]
        oldest = min((item.created_at for item in repairs.values()), default=now)
        return RepairSummary(
            ledgers=len({ledger_id for ledger_id, _ in repairs}),
            items=len(repairs),
            waiting=len(waiting),
            oldest_s=(now - oldest) / SECOND,
        )

    def _hurry(self) -> Answer:
        for item in self._tables.repairs.values():
            if item.worker is None:
                item.next_try_at = min(item.next_try_at, self._now)
        return Answer(204)

    def _mine(self, ledger_id: int, member: str, worker: str, version: int) -> Item:
        item = self._tables.repairs.get((ledger_id, member))
        if item is None:
            raise NoSuchRepair("no such item", ledger_id=ledger_id, bookie=member)
        if (item.version, item.worker) != (version, worker):
            current = self._repair(ledger_id, member).model_dump(mode="json")
            raise VersionConflict("the claim is over", ledger_id=ledger_id, current=current)
        return item

    def _progress(self, request: Request, id: str, member: str) -> RangesBody:  # noqa: A002
        body = RepairProgress.model_validate_json(request.body)
        item = self._mine(int(id), member, body.worker, body.version)
        item.ranges = _without(item.ranges, body.ranges)
        item.failures = 0
        item.next_try_at = self._now + round(body.lease_s * SECOND)
        if not item.ranges:
            del self._tables.repairs[int(id), member]
            self._metadata.net.note("repaired", id, member)
        return RangesBody(ranges=tuple(item.ranges))

    def _fail(self, request: Request, id: str, member: str) -> Answer:  # noqa: A002
        body = RepairFail.model_validate_json(request.body)
        item = self._mine(int(id), member, body.worker, body.version)
        pause_s = min(_PAUSE_S_MAX, 2 ** min(item.failures, 20))
        item.worker, item.version, item.failures = None, self._new_version(), item.failures + 1
        item.detail, item.next_try_at = body.detail, self._now + pause_s * SECOND
        self._metadata.net.note("repair-put-off", id, member, body.detail)
        return Answer(204)

    # --- settings and leases ---------------------------------------------------------------------

    def _change_settings(self, request: Request) -> RepairSettings:
        change = RepairSettingsPut.model_validate_json(request.body)
        return self._set(**{name: getattr(change, name) for name in change.model_fields_set})

    def _trigger(self) -> RepairSettings:
        self._hurry()
        return self._set(triggers=self._tables.settings.triggers + 1)

    def _set(self, **changes: object) -> RepairSettings:
        self._tables.settings = self._tables.settings.model_copy(update=changes)
        return self._tables.settings

    def _take_lease(self, request: Request, name: str) -> Lease:
        body = LeaseTake.model_validate_json(request.body)
        now, ttl = self._now, round(body.ttl_s * SECOND)
        held = self._tables.leases.get(name)
        if held is None or held.expires_at <= now or held.holder == body.holder:
            token = 1 if held is None else held.token + (held.holder != body.holder)
            held = self._tables.leases[name] = Held(body.holder, token, now + ttl)
        left_s = (held.expires_at - now) / SECOND
        return Lease(name=name, holder=held.holder, token=held.token, expires_in_s=left_s)


def _survivors(item: Item) -> int:
    return _UNCOUNTED if item.survivors is None else item.survivors


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ids in disjoint ranges, ascending."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(last, out[-1][1])
        else:
            out.append((first, last))
    return out


def _without(ranges: list[tuple[int, int]], gone: Ranges) -> list[tuple[int, int]]:
    for low, high in gone:
        kept = []
        for first, last in ranges:
            kept += [(first, min(last, low - 1)), (max(first, high + 1), last)]
        ranges = [(first, last) for first, last in kept if first <= last]
    return ranges
