"""The cluster of a storm: on disks that can lose power, in a network that can be parted."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from loadtest.cluster import Cluster, running
from loadtest.stores import scratch
from tests.cluster.chaos.disks import disks
from tests.cluster.chaos.faults import World
from tests.cluster.chaos.machine import Unusable, own_mounts, own_network
from tests.cluster.chaos.network import ROOT, Network
from tests.cluster.chaos.stores import StoreHands
from tests.cluster.chaos.syscalls import usable
from tests.support.proxy import Proxy, proxy_to

BOOKIES: Final = 5
GATEWAYS: Final = 3

_SMALL: Final = {
    # Many segments and checkpoints, so that faults meet their beginnings and ends.
    "SEGMENT_BYTES": str(64 << 10),
    "CHECKPOINT_BYTES": str(256 << 10),
    # The disks are small.
    "WARN_BELOW_BYTES": str(16 << 20),
    "READ_ONLY_BELOW_BYTES": str(8 << 20),
    "RESERVE_BYTES": str(256 << 10),
    # A bookie is killed before it would look for garbage.
    "COLLECT_S": "1",
    "COLLECT_GRACE_S": "1",
    # Autorecovery is killed before it has waited for long.
    "ABANDONED_S": "5",
    "SILENT_S": "50",
    "IN_RECOVERY_S": "5",
    "AUDIT_S": "1",
}


class Machine:
    """What this machine allows. Make it before any thread starts, once in a process."""

    def __init__(self, *, only: str = "") -> None:
        """`only`: `processes` leaves alone what needs root."""
        self.lacks: dict[str, str] = {}
        self._has_network = False
        self._network: Network | None = None
        """Of all worlds, one after another: it lasts as long as the process."""
        try:
            if only == "processes":
                raise Unusable("not asked for")
            own_mounts()
        except Unusable as error:
            self.lacks |= {"power cut": str(error), "partition": str(error)}
        else:
            try:
                own_network()
                self._has_network = True
            except Unusable as error:
                self.lacks["partition"] = str(error)
        try:
            if only == "processes":
                raise Unusable("not asked for")
            usable()
        except Unusable as error:
            self.lacks["failing call"] = str(error)

    @asynccontextmanager
    async def world(self, *, is_deferred: bool, is_tls: bool) -> AsyncIterator[World]:
        """A cluster of its own, and the hands that hurt it."""
        lacks = dict(self.lacks)
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(scratch("ql-chaos-"))
            data = folder / "data"
            stores = StoreHands(stack)
            network = None
            if self._has_network:
                network = self._connected(lacks)
            mounted = {}
            if "power cut" not in lacks:
                try:
                    mounted = stack.enter_context(disks(folder, _folders(data)))
                except Unusable as error:
                    lacks["power cut"] = str(error)
            cluster = await stack.enter_async_context(
                running(
                    None,
                    bookies=BOOKIES,
                    gateways=GATEWAYS,
                    data=data,
                    durability="deferred" if is_deferred else "fsync",
                    auto_fix_cookies=is_deferred,
                    lost_bookie_delay_s=2,
                    tls=is_tls,
                    # Hosts of their own, which nobody else reaches.
                    environment={**_SMALL, "ALLOW_ANONYMOUS": "1", "ALLOW_PLAIN": "1"},
                    places=network.places() if network else {},
                    reach=stores.reach,
                )
            )
            yield World(
                cluster=cluster,
                stores=stores,
                failovers=await stores.follow(cluster),
                disks=mounted,
                network=network,
                links=await _linked(stack, cluster, network),
                can_trace="failing call" not in lacks,
                is_deferred=is_deferred,
                lacks=lacks,
            )

    def _connected(self, lacks: dict[str, str]) -> Network | None:
        """The network, all links of which are there."""
        if self._network is not None:
            self._network.heal()
            return self._network
        names = [
            "metadata-1",
            *(f"gateway-{number + 1}" for number in range(GATEWAYS)),
            *(f"bookie-{number + 1}" for number in range(BOOKIES)),
            "autorecovery-1",
        ]
        try:
            self._network = Network(names)
        except Unusable as error:
            lacks["partition"] = str(error)
        return self._network


async def _linked(
    stack: AsyncExitStack, cluster: Cluster, network: Network | None
) -> dict[str, Proxy]:
    """Each gateway's own way to metadata, on which it is started again."""
    host = network.places()[ROOT].host if network else "127.0.0.1"
    links = {}
    scheme = cluster.url("metadata-1").partition(":")[0]
    for name in (name for name in cluster.names if name.startswith("gateway")):
        link = await stack.enter_async_context(proxy_to(cluster.url("metadata-1"), host))
        cluster.notify(name, METADATA_URLS=f"{scheme}://{host}:{link.port}")
        await cluster.kill(name)
        cluster.start(name)
        links[name] = link
    for name in links:
        await cluster.until_up(name)
    return links


def _folders(data: Path) -> list[Path]:
    return [data / f"bookie-{number + 1}" for number in range(BOOKIES)]
