"""Builds the metadata service: its stores, routes and background work."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Final
from uuid import uuid4

import asyncpg
from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.operations import add_routes
from quorumlog.net.service import add_shared_routes, answers_problems
from quorumlog.net.settings import with_password
from quorumlog.net.timers import restarted
from quorumlog.wire.repair_bodies import LeaseTake
from services.metadata import handlers, operator_handlers
from services.metadata.audit import FOR_CLIENTS, keeps_audited
from services.metadata.config import Config
from services.metadata.database import Database
from services.metadata.http import PARTS, MetadataParts
from services.metadata.metrics import REQUEST_METRICS, MetadataMetrics, measures
from services.metadata.migrate import (
    KeyMissing,
    TablesTooNew,
    check_keys,
    migrate,
    migration_files,
    number_of,
)

log = logging.getLogger(__name__)

ROUTES: Final = (*handlers.ROUTES, *operator_handlers.ROUTES)

_WATCH_S: Final = 1.0
_LEASE: Final = "transactions"
_EXPIRED_AT_ONCE: Final = 100
"""Maximum transactions that a round of expiry aborts: each may have thousands of ledgers."""
_RETRY_S: Final = 0.5
_NEWER_RETRY_S: Final = 5.0
_LOCKED_RETRY_S: Final = 5.0
"""Pause in which other processes can use the table that the migration waits for."""
_MIGRATION_S: Final = 3600.0
"""Time limit of a migration, which may rewrite the largest table, or wait for another process's
migration. With a shorter limit, the migration of a large cluster's tables might never succeed."""


def build(config: Config) -> web.Application:
    """Build the application, which starts without its databases and serves once they respond."""
    database = Database(
        with_password(config.postgres_dsn, config.postgres_password),
        connections_max=config.connections_max,
        deadline_s=config.database_deadline_s,
        key_ring=config.key_ring,
        clock_difference_s=config.clock_difference_s,
    )
    parts = MetadataParts(config, database)
    app = web.Application(
        middlewares=[
            measures,
            operator_handlers.presents_witnesses,
            answers_problems,
            keeps_audited,
        ],
        client_max_size=config.body_bytes_max,
    )
    app[PARTS] = parts

    async def background(_app: web.Application) -> AsyncIterator[None]:
        async def work() -> None:
            await _migrate_with_retries(database, config.contract_through)
            watch = partial(_watch_database, database, parts)
            expire = partial(_expire, parts, config.expiry_every_s, str(uuid4()))
            metrics = app[REQUEST_METRICS]
            works = (parts.changes.run, parts.inquiry.run, expire, metrics.run, watch)
            await asyncio.gather(*(restarted(each) for each in works))

        tasks = (
            asyncio.create_task(work(), name="database"),
            asyncio.create_task(parts.liveness.check_commands(), name="redis"),
        )
        yield
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await database.close()
        await parts.liveness.close()

    app[FOR_CLIENTS] = frozenset(
        route.operation.key
        for route in ROUTES
        if route.operation.is_audited or route.operation.is_audited_for_clients
    )
    add_shared_routes(
        app,
        (route.operation for route in ROUTES),
        ready=database.probe,
        title="quorumlog metadata",
        drain=parts.changes.end,
        hosts=config.hosts,
        authenticator=config.authenticator,
        formats={"tables": str(number_of(migration_files()[-1]))},
    )
    app.on_shutdown.append(lambda _app: parts.changes.end())
    add_routes(app, ROUTES)
    app.cleanup_ctx.append(background)
    app[REQUEST_METRICS] = MetadataMetrics(app, parts, database)
    return app


async def _migrate_with_retries(database: Database, contract_through: int) -> None:
    """Migrate the tables to this version as soon as the database responds."""
    while True:
        pause_s = _RETRY_S
        try:
            connection = await database.connect(statement_timeout=str(int(_MIGRATION_S * 1000)))
            try:
                migrated = await migrate(connection, contract_through=contract_through)
                await check_keys(connection)
                cluster_id = await connection.fetchval("SELECT cluster_id::text FROM cluster")
            finally:
                connection.terminate()
        except asyncpg.LockNotAvailableError as error:
            log.warning("migration-waits", extra={"error": str(error)})
            pause_s = _LOCKED_RETRY_S
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            database.reach.lost(error)
        except (TablesTooNew, KeyMissing) as error:
            # Retry slowly, because an operator must act first.
            event = "key-missing" if isinstance(error, KeyMissing) else "database-is-newer"
            log.error(event, extra={"error": str(error)})  # noqa: TRY400
            pause_s = _NEWER_RETRY_S
        except Exception:
            # If a connection breaks between two steps of a statement, asyncpg may raise an internal
            # error. The service must also retry after this error.
            log.exception("database-away")
        else:
            log.info(
                "database-open", extra={"applied": migrated.applied, "waiting": migrated.waiting}
            )
            database.memory.cluster_id = cluster_id
            database.is_open = True
            return
        await asyncio.sleep(pause_s)


async def _expire(parts: MetadataParts, every_s: float, holder: str) -> None:
    """Abort expired transactions, trim the audit log and update the gauges, in an endless loop.
    The next round retries failed steps. `holder` identifies this process.
    """
    while True:
        await asyncio.sleep(every_s)
        await parts.inquiry.is_over.wait()
        try:
            # The lease only avoids duplicate work. Safety rests on row locks.
            lease = await parts.leases.take(_LEASE, LeaseTake(holder=holder, ttl_s=3 * every_s))
            if lease.holder == holder:
                if ended := await parts.transactions.expire(_EXPIRED_AT_ONCE):
                    log.info("transactions-expired", extra={"count": ended})
                await parts.audit.trim()
            await parts.transactions.count()
        except QuorumLogError as error:
            log.warning("expiry-put-off", extra={"why": error.detail})


async def _watch_database(database: Database, parts: MetadataParts) -> None:
    """Probe the database, to detect an outage or a loss of history even without requests."""
    while True:
        await asyncio.sleep(_WATCH_S)
        with contextlib.suppress(QuorumLogError):  # `ready` and the gauges report the error
            await database.probe()
            # Read the id again, because another process's rebuild may have set it.
            database.memory.cluster_id = await parts.cookies.cluster_id()
            if database.key_ring.ids:
                await parts.sealing.note_key()
