"""The client of the metadata service's repair queue and leases, for autorecovery."""

from collections.abc import Sequence
from urllib.parse import quote

from quorumlog.errors import NoSuchRepair
from quorumlog.net.metadata_requests import MetadataRequests, query_of
from quorumlog.wire import repair_bodies as bodies
from quorumlog.wire.bodies import Body


class RepairClient:
    """The queue for one worker. All methods may be repeated, and may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests, worker: str) -> None:
        """`worker` is this process's name, drawn at random at each start."""
        self._client = client
        self._worker = worker

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[tuple[bodies.RepairItem, ...], str | None]:
        """One page of the queue, and the `after` of the next page."""
        query = query_of(limit=limit, after=after)
        page = await self._client.ask("GET", "/v1/repairs", gives=bodies.RepairList, query=query)
        return page.repairs, page.next

    async def add(self, items: Sequence[bodies.RepairAdd]) -> None:
        """Queue ranges of entries that members lack."""
        body = bodies.RepairsAdd(items=tuple(items))
        await self._client.ask("POST", "/v1/repairs", body, gives=Body)

    async def claim(self, *, lease_s: float, limit: int = 1) -> tuple[bodies.RepairItem, ...]:
        """Claim items to work on. If the answer is lost, the claim ends with its lease."""
        body = bodies.RepairClaim(worker=self._worker, lease_s=lease_s, limit=limit)
        path = "/v1/repairs/claim"
        return (await self._client.ask("POST", path, body, gives=bodies.RepairList)).repairs

    async def progress(
        self, item: bodies.RepairItem, done: bodies.Ranges, *, lease_s: float
    ) -> bodies.Ranges:
        """Record that the member durably has the ranges `done`; return the ranges that remain.

        Raises: VersionConflict if the claim has ended or the item has changed.
        """
        body = bodies.RepairProgress(
            ranges=done, worker=self._worker, version=item.version, lease_s=lease_s
        )
        try:
            answer = await self._client.ask(
                "POST", _path(item, "progress"), body, gives=bodies.RangesBody
            )
        except NoSuchRepair:
            return ()  # an earlier try of this call completed the item
        return answer.ranges

    async def fail(self, item: bodies.RepairItem, detail: str) -> None:
        """Release an item after a failure. Raises: VersionConflict if the claim has ended."""
        body = bodies.RepairFail(worker=self._worker, version=item.version, detail=detail)
        await self._client.ask("POST", _path(item, "fail"), body, gives=Body)

    async def summary(self) -> bodies.RepairSummary:
        """The current queue in numbers."""
        return await self._client.ask("GET", "/v1/repairs/summary", gives=bodies.RepairSummary)

    async def hurry(self) -> None:
        """Retry at once all items that wait after a failure."""
        await self._client.ask("POST", "/v1/repairs/hurry", Body(), gives=Body)

    async def settings(self) -> bodies.RepairSettings:
        """The settings that operators chose for all of autorecovery."""
        return await self._client.ask("GET", "/v1/repair-settings", gives=bodies.RepairSettings)

    async def change_settings(self, change: bodies.RepairSettingsPut) -> bodies.RepairSettings:
        """Change the given settings, for all processes; they survive restarts."""
        path = "/v1/repair-settings"
        return await self._client.ask("PATCH", path, change, gives=bodies.RepairSettings)

    async def trigger(self) -> bodies.RepairSettings:
        """Make the auditor check everything now, and retry the items that wait."""
        return await self._client.ask(
            "POST", "/v1/repairs/trigger", Body(), gives=bodies.RepairSettings
        )

    async def take_lease(self, name: str, *, ttl_s: float) -> bodies.Lease:
        """Take or renew a lease; the returned lease may have another holder."""
        body = bodies.LeaseTake(holder=self._worker, ttl_s=ttl_s)
        return await self._client.ask("PUT", f"/v1/leases/{name}", body, gives=bodies.Lease)


def _path(item: bodies.RepairItem, verb: str) -> str:
    return f"/v1/repairs/{item.ledger_id}/{quote(item.member)}/{verb}"
