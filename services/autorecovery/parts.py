"""The parts of an autorecovery process, and their lifetimes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final
from uuid import uuid4

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import MachineTimes, Ports
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.sessions import service_session
from quorumlog.net.timers import Tasks, Timers, awake, restarted
from quorumlog.wire.bodies import ServiceHeartbeat
from services.autorecovery.auditor import Auditor
from services.autorecovery.checker import Checker
from services.autorecovery.config import Config
from services.autorecovery.losses import KnownLosses
from services.autorecovery.pace import EndlessTimers, PacedBookies
from services.autorecovery.steering import Steering
from services.autorecovery.worker import RepairCounts, Worker, Workers
from services.autorecovery.writers import Writers

_HEARTBEAT_S: Final = 1.0
_COPY_BYTES: Final = 1 << 20
"""Read at a time, so that with a limit on the rate no larger burst is sent."""


@dataclass(frozen=True, slots=True)
class AutorecoveryParts:
    """The parts that handlers use; `running` builds them once."""

    auditor: Auditor
    checker: Checker
    counts: RepairCounts
    losses: KnownLosses
    metadata: MetadataClient
    pace: PacedBookies
    repairs: RepairClient
    steering: Steering
    workers: Workers


PARTS: Final = web.AppKey("parts", AutorecoveryParts)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[AutorecoveryParts]:
    """One auditor, a checker and some workers, at work until the end of the block."""
    name = str(uuid4())
    tasks, timers = Tasks(), Timers(asyncio.get_running_loop(), awake().time)
    async with service_session(config.credentials) as session:
        metadata = MetadataClient(config.metadata_urls, session)
        directory = Directory(metadata.bookies)
        bookies = BookieClient(directory.address, session, failed=directory.quarantine.failed)
        ports = Ports(bookies, metadata, directory, timers, tasks)
        pace = PacedBookies(bookies)
        paced = Ports(
            pace,
            metadata,
            directory,
            EndlessTimers(timers),
            tasks,
            MachineTimes(quorum_s=inf),
            read_bytes_max=_COPY_BYTES,
        )
        counts = RepairCounts()
        repairs = RepairClient(metadata, name)
        steering = Steering(config, metadata, repairs, pace)
        losses = KnownLosses(HoldingsClient(directory, session))
        worker = Worker(repairs, directory, paced, session, counts, losses)
        parts = AutorecoveryParts(
            Auditor(name, config, metadata, repairs, ports, Writers(session), steering),
            Checker(config, metadata, repairs, directory, session, losses, ports),
            counts,
            losses,
            metadata,
            pace,
            repairs,
            steering,
            Workers(worker, repairs, steering),
        )
        for work in (
            partial(_send_heartbeats, metadata, name, config.url),
            partial(metadata.keep_confirmed, _HEARTBEAT_S),
            partial(parts.steering.follow, parts.auditor.trigger),
            directory.follow,
            parts.auditor.run,
            partial(parts.checker.run, lambda: parts.auditor.is_auditor),
            parts.pace.run,
            partial(parts.workers.run, tasks),
        ):
            tasks.start(restarted(work))
        try:
            yield parts
        finally:
            await tasks.close()
            timers.close()
            await bookies.close()


async def _send_heartbeats(metadata: MetadataClient, name: str, url: str) -> None:
    while True:
        with contextlib.suppress(QuorumLogError):  # the client logs that the service is away
            await metadata.send_service_heartbeat("autorecovery", name, ServiceHeartbeat(url=url))
        await asyncio.sleep(_HEARTBEAT_S)
