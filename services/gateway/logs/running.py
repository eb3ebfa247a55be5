"""Build the logs of a gateway around its engine."""

import contextlib
from collections.abc import AsyncIterator

from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.timers import restarted
from services.gateway.engine import Engine
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import LogTimes
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.sweep import Sweep, SweepTimes
from services.gateway.logs.transactions import Transactions


@contextlib.asynccontextmanager
async def running_logs(
    engine: Engine, sweep_times: SweepTimes, times: LogTimes | None = None
) -> AsyncIterator[tuple[LogManager, Transactions]]:
    """The logs of a running engine, with their background work. `drain` the logs before the engine."""
    transactions = TransactionClient(engine.metadata)
    store = MetadataLogs(LogClient(engine.metadata, engine.database_clock), transactions)
    logs = LogManager(engine=engine, store=store, peers=LogPeers(engine.peers), times=times)
    engine.on_gap.append(logs.ownership.rereads.gap)
    sweep = Sweep(logs, store, sweep_times)
    for work in (sweep.run, sweep.run_orphans, logs.ownership.rereads.run):
        _ = logs.ownership.task(restarted(work))
    try:
        yield (
            logs,
            Transactions(
                engine=engine,
                logs=logs,
                store=store,
                client=transactions,
                orphan_age_s=sweep_times.orphan_age_s,
            ),
        )
    finally:
        await logs.ownership.stop()
