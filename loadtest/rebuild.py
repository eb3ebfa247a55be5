"""`make rebuild`: what a rebuild of the metadata's database costs with many ledgers.

Real processes. The bookies are given copies of rows that the database never had: three each, as after a
CLOSE, of ledgers like one that was made and closed. So a rebuild finds all of them missing, and writes them.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import aiohttp
import orjson

from loadtest.cluster import Cluster, running
from loadtest.stores import store_servers
from quorumlog.client import Client
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.net.identity import Credentials
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata

_SETTINGS: Final = {"COLLECT_S": "31536000", "AUDIT_S": "3600", "CHECK_S": "31536000"}
_FIRST_ID: Final = 1_000_000
_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class RebuildCost:
    """What was measured."""

    ledgers: int
    copies_s: float
    """Storing the copies at the bookies, which is no part of a rebuild."""
    rebuild_s: float
    again_s: float
    """The same when nothing is to be written."""
    metadata_mib: float
    """The most memory that the metadata service ever had."""
    bookie_mib: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.ledgers} ledgers (copies stored in {self.copies_s:.0f} s): rebuilt in"
            f" {self.rebuild_s:.1f} s ({self.rebuild_s / self.ledgers * 1e6:.0f} us a ledger), looked at"
            f" again in {self.again_s:.1f} s; peak memory: metadata {self.metadata_mib:.0f} MiB,"
            f" a bookie {self.bookie_mib:.0f} MiB"
        )


async def measured(cluster: Cluster, count: int) -> RebuildCost:
    """The costs of so many ledgers in this cluster."""
    async with aiohttp.ClientSession(headers=cluster.headers) as session:
        row = await _closed_row(cluster)
        began = time.perf_counter()
        await _store_copies(cluster, session, row, count)
        copies_s = time.perf_counter() - began
        rebuild_s, report = await _rebuild(cluster, session)
        assert report["ledgers"]["write"] == count, report
        again_s, report = await _rebuild(cluster, session)
        assert "write" not in report["ledgers"], report
    bookies = [name for name in cluster.names if name.startswith("bookie")]
    return RebuildCost(
        count,
        copies_s,
        rebuild_s,
        again_s,
        _peak_mib(cluster.pid("metadata-1")),
        max(_peak_mib(cluster.pid(name)) for name in bookies),
    )


async def _closed_row(cluster: Cluster) -> LedgerMetadata:
    async with Client(*cluster.gateways) as client:
        ledger = await client.create_ledger()
        await ledger.append(b"entry")
        await ledger.close()
    metadata = MetadataClient([cluster.url("metadata-1")], credentials=Credentials(cluster.headers))
    try:
        return await metadata.get(ledger.ledger_id)
    finally:
        await metadata.close()


async def _store_copies(
    cluster: Cluster, session: aiohttp.ClientSession, row: LedgerMetadata, count: int
) -> None:
    client = BookieClient(
        cluster.url,
        session,
        ChannelLimits(connect_s=60.0, slow_s=60.0),
    )
    try:
        for first in range(0, count, _AT_ONCE):
            copies = [
                replace(row, ledger_id=_FIRST_ID + number, attempt=str(uuid4()))
                for number in range(first, min(first + _AT_ONCE, count))
            ]
            left = [(copy, member) for copy in copies for member in row.last_fragment.bookies]
            while left:
                statuses = await asyncio.gather(
                    *(_keep(client, member, copy) for copy, member in left)
                )
                left = [
                    one
                    for one, status in zip(left, statuses, strict=True)
                    if status is not Status.OK
                ]
    finally:
        await client.close()


def _keep(client: BookieClient, member: str, row: LedgerMetadata) -> asyncio.Future[Status]:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    client.keep_row(member, row.ledger_key, row, answered.set_result)
    return answered


async def _rebuild(
    cluster: Cluster, session: aiohttp.ClientSession
) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=None)
    url = f"{cluster.url('metadata-1')}/v1/rebuild"
    async with session.post(url, json={}, timeout=timeout, read_bufsize=1 << 22) as answer:
        last = b""
        async for line in answer.content:
            last = line
    told = orjson.loads(last)
    assert "report" in told, told
    return time.perf_counter() - began, told["report"]


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


async def _measure(counts: list[int]) -> None:
    with store_servers() as servers:
        for count in counts:
            async with running(
                servers.fresh(), bookies=4, gateways=1, environment=_SETTINGS
            ) as cluster:
                cost = await measured(cluster, count)
            sys.stdout.write(cost.line() + "\n")
            sys.stdout.flush()


def main() -> None:
    """Measure each number of ledgers in a cluster of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledgers", type=int, nargs="*", default=[10_000, 100_000])
    asyncio.run(_measure(parser.parse_args().ledgers))


if __name__ == "__main__":
    main()
