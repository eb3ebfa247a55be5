"""What metadata deletes by age waits while Postgres' clock may be wrong (rule 26c)."""

import contextlib
from dataclasses import replace

from loadtest.stores import Stores
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.wire.log_bodies import LedgerIds
from services.metadata.database import Database
from services.metadata.logs import LogStore
from services.metadata.tokens import AuditStore
from services.metadata.transactions import TransactionStore
from tests.support.database import connected, sql
from tests.support.once import once
from tests.support.shadowed_clock import move, shadow
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, serving
from tests.unit.metadata.test_audit import make_token
from tests.unit.metadata.test_logs import LOG

TABLES = ("transactions", "audit", "access_tokens")


async def counts(stores: Stores) -> list[int]:
    async with connected(stores) as connection:
        return [await connection.fetchval(f"SELECT count(*) FROM {name}") for name in TABLES]


async def filled(service: Service) -> str:
    """One of each that is deleted by age; returns the open transaction."""
    logs, transactions = LogClient(service.client), TransactionClient(service.client)
    await logs.create(LOG)
    await make_token(service)
    begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    done, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    await transactions.abort(done.id)
    await service.client.create(replace(DRAFT, log="a-log"))
    return begun.id


async def test_nothing_is_deleted_by_age_while_the_clock_is_wrong(stores: Stores) -> None:
    """Rule 26c."""
    await shadow(stores)
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=PATIENT_S)
    async with (
        contextlib.AsyncExitStack() as at_exit,
        serving(stores, expiry_every_s=1000) as service,
    ):
        at_exit.push_async_callback(database.close)
        open_one = await filled(service)
        made = await service.client.create(DRAFT, once=once("key"))
        await sql(stores, "UPDATE access_tokens SET expires_at = now() + interval '1 hour'")
        database.is_open = True
        expiry, audit = TransactionStore(database), AuditStore(database, days=7, rows_max=1000)
        orphans = LogStore(database).orphans
        await database.run(lambda connection: connection.fetchval("SELECT 1"))
        database.asked_about = database.server
        assert await expiry.expire(100) == 0, "it hears the clock"
        before = await counts(stores)

        await move(stores, "300 days")
        assert await expiry.expire(100) == 0
        await audit.trim()
        assert await orphans(older_than_s=300, after=-1, limit=10) == LedgerIds(ledgers=())
        again = await service.client.create(DRAFT, once=once("key"))
        await make_token(service)

        assert again == made
        assert await counts(stores) == [before[0], before[1] + 1, before[2] + 1]
        assert "jumped" in database.clock.doubt

        await move(stores, "0")
        await sql(stores, "UPDATE transactions SET expires_at = now() - interval '1 s'")
        assert await expiry.expire(100) == 1
        assert (await TransactionClient(service.client).get(open_one)).state.value == "ABORTED"
        assert database.clock.doubt == ""
