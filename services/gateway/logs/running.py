"""Build the logs of a gateway around its engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

import aiohttp

from quorumlog.net import trace
from quorumlog.net.log_client import LogClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.timers import restarted
from quorumlog.net.transaction_client import TransactionClient
from services.gateway.engine import Engine, EngineForLogs
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import Times
from services.gateway.logs.peers import Gateways, LogPeers
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.sweep import Sweep, SweepTimes
from services.gateway.logs.transactions import Transactions

_METADATA_S: Final = 3.0
"""Then a caller is told that the metadata can't be reached, as by the engine."""


@contextlib.asynccontextmanager
async def running_logs(
    engine: Engine,
    metadata_urls: Sequence[str],
    *,
    times: Times | None = None,
    sweep_times: SweepTimes | None = None,
) -> AsyncIterator[tuple[LogManager, Transactions]]:
    """The logs of an engine that runs, with their background work. `drain` them before it."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace.config()],
    ) as session:
        client = MetadataClient(tuple(metadata_urls), session, deadline_s=_METADATA_S)
        transactions = TransactionClient(client)
        store = MetadataLogs(LogClient(client), transactions)
        logs = LogManager(
            engine=EngineForLogs(engine),
            store=store,
            peers=Gateways(LogPeers(session)),
            times=times,
        )
        sweeps = sweep_times or SweepTimes()
        engine.on_gap.append(logs.ownership.rereads.gap)
        background = [
            asyncio.create_task(restarted(work))
            for work in (Sweep(logs, store, sweeps).run, logs.ownership.rereads.run)
        ]
        try:
            yield (
                logs,
                Transactions(
                    engine=engine,
                    logs=logs,
                    store=store,
                    client=transactions,
                    orphan_age_s=sweeps.orphan_age_s,
                ),
            )
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await logs.ownership.stop()
