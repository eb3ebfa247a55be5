"""The cost of a rebuild of the metadata's database with many ledgers. LEDGERS= sets the numbers.

The processes are real. The bookies get copies of ledger metadata that the database never had: three
copies of each ledger, as after a close. All ledgers are variants of one closed ledger. The rebuild
must find and write all of them.
"""

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import aiohttp
import orjson

from loadtest.bench.measure import Figures
from loadtest.bench.plan import Columns, Plan, Work, cluster_of
from loadtest.cluster import Cluster
from loadtest.program import Teller
from quorumlog.client import Client
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.net.identity import Credentials
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata

_SETTINGS: Final = {"COLLECT_S": "31536000", "AUDIT_S": "3600", "CHECK_S": "31536000"}
_FIRST_ID: Final = 1_000_000
_AT_ONCE: Final = 500


async def _measured(cluster: Cluster, count: int) -> Figures:
    """Measure a rebuild with `count` ledgers, and separately the storing of the copies."""
    async with aiohttp.ClientSession(headers=cluster.headers) as session:
        row = await _closed_row(cluster)
        began = time.perf_counter()
        await _store_copies(cluster, session, row, count)
        copies_s = time.perf_counter() - began
        rebuild_s, report = await _rebuild(cluster, session)
        assert report["ledgers"]["write"] == count, report
        again_s, report = await _rebuild(cluster, session)
        assert "write" not in report["ledgers"], report
    bookies = cluster.pids({"bookie": "bookies"})["bookies"]
    return {
        "copies stored s": copies_s,
        "rebuilt s": rebuild_s,
        "us a ledger": rebuild_s / count * 1e6,
        "looked at again s": again_s,
        "peak of metadata MiB": _peak_mib(cluster.pid("metadata-1")),
        "peak of a bookie MiB": max(map(_peak_mib, bookies)),
    }


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
    reported = orjson.loads(last)
    assert "report" in reported, reported
    return time.perf_counter() - began, reported["report"]


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


OPTIONS: Final = {
    "ledgers": ((10_000, 100_000), "numbers of ledgers; each number gets a new cluster")
}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan a rebuild for each number of ledgers."""
    names = {f"{count:,} ledgers": count for count in asked.ledgers}
    return Plan(
        [Work(name, "a rebuild", _measured, (count,)) for name, count in names.items()],
        dict.fromkeys(names, cluster_of(bookies=4, gateways=1, environment=_SETTINGS)),
        [Columns("a rebuild of the metadata", is_turned=True)],
        is_apart=True,
        loop=asyncio.new_event_loop,
    )
