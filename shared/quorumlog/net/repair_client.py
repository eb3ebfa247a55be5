"""The repair queue and leases of the metadata service, for autorecovery."""

from collections.abc import Sequence
from urllib.parse import quote

from quorumlog.errors import NoSuchRepair
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.wire.bodies import Body
from quorumlog.wire.repair_bodies import (
    Lease,
    LeaseGive,
    LeaseTake,
    Ranges,
    Repair,
    RepairAdd,
    RepairClaim,
    RepairFail,
    RepairList,
    RepairProgress,
    RepairRemaining,
    RepairsAdd,
    RepairSettings,
    RepairSettingsPut,
    RepairSummary,
)


class RepairClient:
    """Works on the queue. All methods may raise MetadataUnavailable; each may be repeated."""

    def __init__(self, client: MetadataClient, worker: str) -> None:
        """`worker` names this process: drawn at random at each start."""
        self._client = client
        self._worker = worker

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[tuple[Repair, ...], str | None]:
        """One page of the queue, and the `after` of the next one."""
        query = {"limit": str(limit), **({} if after is None else {"after": after})}
        page = await self._client.ask("GET", "/v1/repairs", gives=RepairList, query=query)
        return page.repairs, page.next

    async def add(self, items: Sequence[RepairAdd]) -> None:
        """Add to what members lack."""
        body = RepairsAdd(items=tuple(items))
        await self._client.ask("POST", "/v1/repairs", body, gives=Body)

    async def claim(self, *, lease_s: float, limit: int = 1) -> tuple[Repair, ...]:
        """Items to work on. Of a claim whose answer got lost the lease runs out by itself."""
        body = RepairClaim(worker=self._worker, lease_s=lease_s, limit=limit)
        path = "/v1/repairs/claim"
        return (await self._client.ask("POST", path, body, gives=RepairList)).repairs

    async def progress(self, item: Repair, done: Ranges, *, lease_s: float) -> Ranges:
        """Say that `done` is on the member, durable; what remains comes back.

        Raises: VersionConflict when the claim is over or the item changed since.
        """
        body = RepairProgress(
            ranges=done, worker=self._worker, version=item.version, lease_s=lease_s
        )
        try:
            answer = await self._client.ask(
                "POST", _path(item, "progress"), body, gives=RepairRemaining
            )
        except NoSuchRepair:
            return ()  # an earlier try of this call ended the item
        return answer.ranges

    async def fail(self, item: Repair, detail: str) -> None:
        """Let go of an item. Raises: VersionConflict when it is no longer ours."""
        body = RepairFail(worker=self._worker, version=item.version, detail=detail)
        await self._client.ask("POST", _path(item, "fail"), body, gives=Body)

    async def summary(self) -> RepairSummary:
        """The queue in numbers."""
        return await self._client.ask("GET", "/v1/repairs/summary", gives=RepairSummary)

    async def hurry(self) -> None:
        """Have what waits after a failure tried again now."""
        await self._client.ask("POST", "/v1/repairs/hurry", Body(), gives=Body)

    async def settings(self) -> RepairSettings:
        """What operators set for all of autorecovery."""
        return await self._client.ask("GET", "/v1/repair-settings", gives=RepairSettings)

    async def change_settings(self, change: RepairSettingsPut) -> RepairSettings:
        """Change what is named, for all processes and over restarts."""
        path = "/v1/repair-settings"
        return await self._client.ask("PATCH", path, change, gives=RepairSettings)

    async def trigger(self) -> RepairSettings:
        """Have everything looked at now, by whoever audits, and tried again what waits."""
        return await self._client.ask("POST", "/v1/repairs/trigger", Body(), gives=RepairSettings)

    async def take_lease(self, name: str, *, ttl_s: float) -> Lease:
        """Take or keep a lease; the answer's holder may be somebody else."""
        body = LeaseTake(holder=self._worker, ttl_s=ttl_s)
        return await self._client.ask("PUT", f"/v1/leases/{name}", body, gives=Lease)

    async def give_lease(self, lease: Lease) -> None:
        """Give a lease back."""
        body = LeaseGive(holder=self._worker, token=lease.token)
        await self._client.ask("DELETE", f"/v1/leases/{lease.name}", body, gives=Body)


def _path(item: Repair, verb: str) -> str:
    return f"/v1/repairs/{item.ledger_id}/{quote(item.member)}/{verb}"
