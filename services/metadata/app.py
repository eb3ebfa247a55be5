"""Builds the metadata service: its stores, its routes, its background work."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import asyncpg
from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.operations import add_routes
from quorumlog.net.service import add_shared_routes, answers_problems
from quorumlog.net.settings import with_password
from quorumlog.net.timers import restarted
from services.metadata import (
    handlers,
    log_handlers,
    operator_handlers,
    repair_handlers,
    witness_handlers,
)
from services.metadata.audit import FOR_CLIENTS, keeps_audited
from services.metadata.audit_store import AuditStore
from services.metadata.changes import ChangeHub
from services.metadata.config import Config
from services.metadata.cookies import CookieStore
from services.metadata.copies import CopyInquiry
from services.metadata.database import Database
from services.metadata.expiry import Expiry
from services.metadata.handlers import PARTS, MetadataParts
from services.metadata.inquiry import Inquiry
from services.metadata.kept import KeptStore
from services.metadata.ledgers import LedgerStore
from services.metadata.liveness import Liveness
from services.metadata.logs import LogStore
from services.metadata.metrics import REQUEST_METRICS, MetadataMetrics, measures
from services.metadata.migrate import TablesTooNew, migrate, migration_files, number_of
from services.metadata.rebuild import Rebuilder
from services.metadata.rebuild_store import RebuildStore
from services.metadata.repairs import LeaseStore, RepairSettingsStore, RepairStore
from services.metadata.resealing import KeyMissing, SealingStore, check_keys
from services.metadata.tokens import TokenStore
from services.metadata.transactions import TransactionStore
from services.metadata.witnesses import WitnessStore

log = logging.getLogger(__name__)

ROUTES: Final = (
    *handlers.ROUTES,
    *log_handlers.ROUTES,
    *repair_handlers.ROUTES,
    *operator_handlers.ROUTES,
    *witness_handlers.ROUTES,
)

_WATCH_S: Final = 1.0
_RETRY_S: Final = 0.5
_NEWER_RETRY_S: Final = 5.0
_LOCKED_RETRY_S: Final = 5.0
"""In between, the other processes go on with the table that the migration waits for."""
_MIGRATION_S: Final = 3600.0
"""A migration may rewrite the largest table, or wait for another process's: under a
shorter limit the tables of a large cluster would never reach this version."""


def build(config: Config) -> web.Application:
    """Build the application. It starts without its databases, and serves once they answer."""
    database = Database(
        with_password(config.postgres_dsn, config.postgres_password),
        connections_max=config.connections_max,
        deadline_s=config.database_deadline_s,
        key_ring=config.key_ring,
        clock_difference_s=config.clock_difference_s,
    )
    liveness = Liveness(
        with_password(config.redis_url, config.redis_password),
        prefix=config.redis_prefix,
        deadline_s=config.redis_deadline_s,
    )
    changes = ChangeHub(database)
    leases, transactions = LeaseStore(database), TransactionStore(database)
    cookies = CookieStore(database)
    inquiry = Inquiry(database, cookies, liveness, config.credentials)
    rebuilder = Rebuilder(RebuildStore(database), cookies, liveness, config.credentials)
    audit = AuditStore(database, days=config.audit_days, rows_max=config.audit_rows_max)
    expiry = Expiry(transactions, leases, audit, inquiry, every_s=config.expiry_every_s)
    app = web.Application(
        middlewares=[
            measures,
            witness_handlers.presents_witnesses,
            answers_problems,
            keeps_audited,
        ],
        client_max_size=config.body_bytes_max,
    )
    cookies = CookieStore(database)
    app[PARTS] = MetadataParts(
        ledgers=LedgerStore(database),
        cookies=cookies,
        liveness=liveness,
        changes=changes,
        logs=LogStore(database),
        repairs=RepairStore(database),
        repair_settings=RepairSettingsStore(database),
        leases=leases,
        audit=audit,
        sealing=SealingStore(database),
        tokens=TokenStore(database),
        transactions=transactions,
        witnesses=WitnessStore(database, inquiry, rebuilder),
        kept=KeptStore(database),
        copies=CopyInquiry(database, inquiry),
        rebuilder=rebuilder,
        change_heartbeat_s=config.change_heartbeat_s,
        allowed_bookies=config.allowed_bookies,
    )

    async def background(_app: web.Application) -> AsyncIterator[None]:
        async def work() -> None:
            await _migrate_with_retries(database, config.contract_through)
            watch = partial(_watch_database, database, cookies, app[PARTS].sealing)
            parts = (changes.run, inquiry.run, expiry.run, app[REQUEST_METRICS].run, watch)
            await asyncio.gather(*(restarted(part) for part in parts))

        tasks = (
            asyncio.create_task(work(), name="database"),
            asyncio.create_task(liveness.check_commands(), name="redis"),
        )
        yield
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await database.close()
        await liveness.close()

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
        drain=changes.end,
        hosts=config.hosts,
        authenticator=config.authenticator,
        formats={"tables": str(number_of(migration_files()[-1]))},
    )
    app.on_shutdown.append(lambda _app: changes.end())
    add_routes(app, ROUTES)
    app.cleanup_ctx.append(background)
    app[REQUEST_METRICS] = MetadataMetrics(app, app[PARTS], database, expiry)
    return app


async def _migrate_with_retries(database: Database, contract_through: int) -> None:
    """Migrate the tables to this version as soon as the database answers."""
    while True:
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
            await asyncio.sleep(_LOCKED_RETRY_S)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            database.reach.lost(error)
            await asyncio.sleep(_RETRY_S)
        except TablesTooNew as error:
            # An operator must act.
            log.error("database-is-newer", extra={"error": str(error)})  # noqa: TRY400
            await asyncio.sleep(_NEWER_RETRY_S)
        except KeyMissing as error:
            log.error("key-missing", extra={"error": str(error)})  # noqa: TRY400
            await asyncio.sleep(_NEWER_RETRY_S)
        except Exception:
            # If a connection is cut between two steps of a statement, asyncpg may raise an internal
            # error; the service must still open in the end.
            log.exception("database-away")
            await asyncio.sleep(_RETRY_S)
        else:
            log.info(
                "database-open", extra={"applied": migrated.applied, "waiting": migrated.waiting}
            )
            database.memory.cluster_id = cluster_id
            database.is_open = True
            return


async def _watch_database(database: Database, cookies: CookieStore, sealing: SealingStore) -> None:
    """Notice a database that went back in time, or returned, without any requests too."""
    while True:
        await asyncio.sleep(_WATCH_S)
        try:
            await database.probe()
            # A rebuild through another process may have made an empty database its cluster's.
            database.memory.cluster_id = await cookies.cluster_id()
            if database.key_ring.ids:
                await sealing.note_key()
        except QuorumLogError:
            pass  # `ready` and the gauges report it
        except Exception:
            log.exception("watch-failed")
