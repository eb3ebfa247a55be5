"""Undoes what a test did to the processes of a cluster that several tests share."""

import subprocess
from functools import partial

from loadtest.cluster import Cluster
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError
from tests.support.waiting import until


async def revive(cluster: Cluster, token: str | None = None) -> None:
    """Restart every killed process, resume every paused one, and wait until each gateway can place a ledger on all
    bookies.

    `token`: for gateways that require tokens; it must allow its bearer to create ledgers.
    """
    for name in cluster.names:
        if cluster.is_alive(name):
            cluster.resume(name)
        else:
            cluster.start(name)
        is_up = partial(cluster.is_up, name)
        await until(is_up, f"{name} is up again", passing=(subprocess.TimeoutExpired,))
    bookies = sum(name.startswith("bookie-") for name in cluster.names)
    for gateway in cluster.gateways:
        async with Client(gateway, token=token) as client:
            on_all = partial(client.create_ledger, ensemble_size=bookies, allow_degraded=False)
            await until(on_all, f"{gateway} knows every bookie", passing=(QuorumLogError,))
