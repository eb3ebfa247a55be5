"""The cluster's Postgres and a synchronous standby: either may be the primary."""

import asyncio
from urllib.parse import urlsplit

from loadtest.cluster import Cluster
from loadtest.waiting import until
from services.local.embedded import Postgres, _postgres_for, _processes_in
from services.local.process import Program
from tests.support.standby import Server, copied

NAME = "postgres"
"""The cluster's one."""


class Failovers:
    """Both servers."""

    def __init__(self, cluster: Cluster, theirs: Server, ours: Server) -> None:
        self._cluster = cluster
        self._theirs, self._ours = theirs, ours
        self._is_ours_primary = False

    @classmethod
    async def of(cls, cluster: Cluster, dsn: str, port: int) -> "Failovers":
        """Add a standby to the cluster's Postgres, for which all commits wait from now on."""
        folder = cluster.data / NAME
        login, _, servers = urlsplit(dsn).netloc.rpartition("@")
        theirs = Postgres(
            Program(NAME, ()),
            await asyncio.to_thread(_postgres_for, folder / "data"),
            int(servers.partition(",")[0].rpartition(":")[2]),
            login.partition(":")[2],
        )
        primary = Server(theirs, folder)
        standby = await primary.follower(cluster.data / "standby", port)
        await standby.start()
        await primary.require_standby()
        return cls(cluster, primary, standby)

    async def end(self) -> None:
        """Stop the standby."""
        await self._ours.stop()

    async def fail_over(self) -> None:
        """Kill the primary and promote the standby."""
        if self._is_ours_primary:
            await self._ours.kill()
            await self._theirs.promote()
        else:
            await self._cluster.kill(NAME)
            await self._ours.promote()
        self._is_ours_primary = not self._is_ours_primary

    async def follow(self) -> None:
        """Make the killed server a standby of the new primary; commits wait for it again."""
        if self._is_ours_primary:
            primary, folder = self._ours, self._theirs.folder
            data = folder / "data"
            await until(lambda: not _processes_in(data), "its backends are gone")
            await copied(primary.postgres, folder, self._theirs.postgres.port)
            self._cluster.start(NAME)
            await self._cluster.until_up(NAME)
        else:
            primary = self._theirs
            self._ours = await primary.follower(self._ours.folder, self._ours.postgres.port)
            await self._ours.start()
        await primary.require_standby()
