"""A standby takes over from a killed primary: what it lacks is noticed, and what it has goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import QuorumLogError
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.bodies import LedgerCreateBody
from quorumlog.wire.log_bodies import LogCreateBody
from tests.support.proxy import Proxy, proxy_to
from tests.support.standby import Pair, Server, dsn_of, pair
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, is_ready, serving, swapped
from tests.unit.metadata.test_inquiry import bookie_at, learns
from tests.unit.metadata.test_went_back import (
    LOG,
    MEMBERS,
    all_refused,
    closed,
    cookie,
    is_reported,
    newcomer,
    refused,
)

Change = Callable[[], Coroutine[Any, Any, Any]]
TOKENS = "SELECT attempt FROM attempts"
CHANGES = "SELECT count(*) FROM attempts"
WAITS_FOR_STANDBY = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query = 'COMMIT;'"
)


@pytest.fixture
async def asynchronous() -> AsyncIterator[Pair]:
    async with pair() as both:
        yield both


@pytest.fixture
async def synchronous() -> AsyncIterator[Pair]:
    async with pair(is_synchronous=True) as both:
        yield both


def on(stores: Stores, dsn: str) -> Stores:
    return replace(stores, postgres_dsn=dsn)


@contextlib.asynccontextmanager
async def serving_two(stores: Stores, **settings: Any) -> AsyncIterator[tuple[Service, Service]]:
    async with serving(stores, **settings) as one, serving(stores, **settings) as two:
        yield one, two


@dataclass(frozen=True)
class Lost:
    """A failover to a standby that lacks the last changes."""

    row: LedgerMetadata
    changed: LedgerMetadata
    transaction: str


async def lose(both: Pair, service: Service) -> Lost:
    """Make changes that only the primary has, and fail over."""
    client = service.client
    await LogClient(client).create(LOG)
    transactions = TransactionClient(client)
    begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    row = await client.create(DRAFT)
    await both.standby.has_all_of(both.primary)
    await both.standby.stop_following()
    await transactions.commit(begun.id, (), None)
    changed = await swapped(client, row.with_ensemble(10, ("b1@1", "b2@1", "b4@1")))
    await both.fail_over()
    return Lost(row, changed, begun.id)


async def told_by(service: Service) -> None:
    await until(lambda: is_reported(service), "`ready` tells that the database went back")


async def test_changes_that_a_standby_lacks_stop_all(stores: Stores, asynchronous: Pair) -> None:
    async with serving_two(on(stores, asynchronous.dsn), expiry_every_s=0.05) as (one, two):
        lost = await lose(asynchronous, one)
        await told_by(one)
        # The second process learns it as it does from bookies and gateways: once a second they confirm.
        holder = MetadataClient([two.url], two.session, deadline_s=PATIENT_S)
        holder.witnesses = one.client.witnesses
        with pytest.raises(QuorumLogError):
            await holder.confirm()
        await told_by(two)
        await asynchronous.primary.sql("UPDATE transactions SET expires_at = now()")

        for service in (one, two):
            async with newcomer(service) as nobody:
                await all_refused(nobody, lost.row)
                assert await nobody.get(lost.row.ledger_id) == lost.row, "plain reads go on"
                assert (await TransactionClient(nobody).get(lost.transaction)).state == "OPEN"


async def test_an_unaware_process_asks_about_a_standby(stores: Stores, tmp_path: Path) -> None:
    """D4 without a restart: the process that answered the lost commit is gone."""
    async with contextlib.AsyncExitStack() as stack:
        asynchronous = await stack.enter_async_context(pair())
        on_both = on(stores, asynchronous.dsn)
        other = await stack.enter_async_context(serving(on_both, expiry_every_s=0.05))
        async with serving(on_both) as service:
            bookie = await stack.enter_async_context(bookie_at(service, tmp_path))
            await LogClient(service.client).create(LOG)
            transactions = TransactionClient(service.client)
            begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
            await asynchronous.standby.has_all_of(asynchronous.primary)
            await asynchronous.standby.stop_following()
            known = set((await asynchronous.primary.sql(TOKENS)).split())
            await transactions.commit(begun.id, (), None)
            await learns(bookie, known)
        await asynchronous.fail_over()
        await asynchronous.primary.sql("UPDATE transactions SET expires_at = now()")

        async def is_over() -> bool:
            return await is_reported(other) or (await state()) != "OPEN"

        async def state() -> str:
            return (await TransactionClient(other.client).get(begun.id)).state

        await until(is_over, "the loss is told", passing=(QuorumLogError,))
        assert await state() == "OPEN", "a committed transaction was expired"
        async with newcomer(other) as nobody:
            await refused(nobody.create(DRAFT))


async def test_the_old_primary_ends_the_state_of_loss(stores: Stores, asynchronous: Pair) -> None:
    async with serving(on(stores, asynchronous.dsn)) as service:
        lost = await lose(asynchronous, service)
        await told_by(service)

        await asynchronous.primary.stop()
        await asynchronous.standby.start()

        await until(lambda: is_ready(service), "the newest database is back")
        assert await service.client.get(lost.row.ledger_id, proof=True) == lost.changed
        await service.client.create(DRAFT)


async def test_an_operator_may_accept_a_lagging_standby(stores: Stores, asynchronous: Pair) -> None:
    async with serving(on(stores, asynchronous.dsn)) as service:
        lost = await lose(asynchronous, service)
        await told_by(service)
        _, state = await service.send("GET", "/v1/witnesses")
        witnesses = [missing["witness"] for missing in state["missing"]]

        accept = {"witnesses": witnesses, "lost": MEMBERS}
        await service.send("POST", "/v1/witnesses/accept", accept)

        await until(lambda: is_ready(service), "the loss is accepted")
        assert (await service.client.cas(lost.row.in_recovery()))[0] is CasStatus.OK


async def test_a_synchronous_failover_needs_no_operator(stores: Stores, synchronous: Pair) -> None:
    async with serving_two(on(stores, synchronous.dsn)) as (one, two):
        rows = [await service.client.create(DRAFT) for service in (one, two, one, two)]

        await synchronous.fail_over()

        for service in (one, two):
            await until(partial(is_ready, service), "the service has the new primary")
            for row in rows:
                assert await service.client.get(row.ledger_id, proof=True) == row
            await closed(service.client)
        assert not any([await is_reported(service) for service in (one, two)])
        assert (await two.client.cas(rows[0].closed(last_entry=-1, length=0)))[0] is CasStatus.OK


async def test_changes_in_a_failover_happen_once(stores: Stores, synchronous: Pair) -> None:
    async with serving_two(on(stores, synchronous.dsn)) as (one, two):
        urls = [one.url, two.url]
        clients = [
            MetadataClient(urls, one.session, deadline_s=PATIENT_S, try_s=PATIENT_S)
            for _ in range(4)
        ]
        answered: list[LedgerMetadata] = []
        is_over = False

        async def change(client: MetadataClient) -> None:
            row = await client.create(DRAFT)
            more = 3
            while more:
                more -= is_over
                border = row.last_fragment.first_entry + 10
                wanted = row.with_ensemble(border, ("b1@1", "b2@1", f"b{border}@1"))
                now = await swapped(client, wanted)
                assert now.fragments == wanted.fragments
                assert now.version == row.version + 1
                row = now
                answered.append(now)
            assert await client.get(row.ledger_id) == row

        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(change(client))
            await until(lambda: len(answered) > 20, "changes are under way")
            await synchronous.fail_over()
            is_over = True

        ledgers = int(await synchronous.primary.sql("SELECT count(*) FROM ledgers"))
        assert ledgers == len(clients), "no create was done twice"
        assert not any([await is_reported(service) for service in (one, two)])


# --- a commit whose answer is lost with its primary ----------------------------------------------


@contextlib.asynccontextmanager
async def by_proxies(both: Pair) -> AsyncIterator[tuple[Proxy, str]]:
    """The proxy in front of the primary, and a DSN by way of it, with the standby behind it."""
    async with proxy_to(both.primary.postgres.dsn()) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        yield proxy, dsn_of(both.primary.postgres.dsn(), address, both.standby.address)


async def cut_off_after_its_commit(both: Pair, proxy: Proxy, change: asyncio.Task[Any]) -> None:
    """The primary commits `change` and is killed; nobody has heard of the commit."""
    await until(lambda: proxy.cuts == 1, "the COMMIT is sent, and its answer cut off")

    async def is_committed() -> bool:
        return await both.primary.sql("SELECT count(*) FROM ledgers WHERE version = 2") == "1"

    await until(is_committed, "it is committed")
    assert not change.done()


async def ambiguous(
    stores: Stores, both: Pair, *, is_on_standby: bool
) -> tuple[LedgerMetadata, LedgerMetadata]:
    """A change whose answer dies with the primary, and its row on the promoted standby."""
    async with (
        by_proxies(both) as (proxy, dsn),
        # One connection: no other one may learn the outcome while the primary lives.
        serving(on(stores, dsn), connections_max=1) as service,
    ):
        row = await service.client.create(DRAFT)
        await both.standby.has_all_of(both.primary)
        if not is_on_standby:
            await both.standby.stop_following()
        proxy.down_after_cut = True
        proxy.cut_around = [(b"COMMIT", True)]
        change = asyncio.create_task(service.client.cas(row.in_recovery()))
        await cut_off_after_its_commit(both, proxy, change)
        if is_on_standby:
            await both.standby.has_all_of(both.primary)

        await both.fail_over()

        status, now = await change
        assert status is CasStatus.OK
        assert now is not None
        assert await service.client.get(row.ledger_id, proof=True) == now
        assert await is_ready(service), "nothing that was answered is missing"
        return row, now


async def test_a_commit_on_the_standby_is_settled(stores: Stores, asynchronous: Pair) -> None:
    row, now = await ambiguous(stores, asynchronous, is_on_standby=True)

    assert now == row.in_recovery().changed_by(now.attempt, row)


async def test_an_unheard_of_commit_is_done_there(stores: Stores, asynchronous: Pair) -> None:
    row, now = await ambiguous(stores, asynchronous, is_on_standby=False)

    assert now == row.in_recovery().changed_by(now.attempt, row)


async def test_no_repeat_is_answered_before_the_standby(stores: Stores, synchronous: Pair) -> None:
    """A restarted primary shows a commit that no standby has: its repeat must wait for one."""
    async with serving(on(stores, synchronous.dsn), expiry_every_s=1000) as service:
        client = service.client
        await client.put_cookie("b1", (first := await cookie(client)), version=None)
        row = await client.create(DRAFT)
        log, _ = await LogClient(client).create(LOG)
        begun, _ = await TransactionClient(client).begin(
            "a-log", app=None, version=None, expires_in_s=3600
        )
        changes: tuple[Change, ...] = (
            lambda: client.create(DRAFT),
            lambda: client.cas(row.in_recovery()),
            lambda: client.put_cookie("b1", first.model_copy(update={"incarnation": 2}), version=1),
            lambda: LogClient(client).create(replace(LOG, name="another")),
            lambda: TransactionClient(client).commit(begun.id, (), None),
            lambda: LogClient(client).delete(log),
        )
        for change in changes:
            await repeated_without_standby(synchronous, change)
        await synchronous.fail_over()
        await until(lambda: is_ready(service), "the service has the new primary")
        await client.confirm()


async def repeated_without_standby(both: Pair, work: Change) -> None:
    """A change is committed while there is no standby, and repeated after the primary's restart."""
    primary, standby = both.primary, both.standby
    changes = await primary.sql(CHANGES)
    await standby.kill()
    change = asyncio.create_task(work())
    await until(lambda: waits(primary), "the commit waits for the standby")
    await primary.kill()
    await primary.start()
    assert await primary.sql(CHANGES) != changes, "it is committed here"

    async def is_repeated() -> bool:
        return change.done() or await waits(primary)

    await until(is_repeated, "its repeat waits for the standby")
    assert not change.done(), "it was answered, and the standby lacks it"

    await standby.start()
    await change
    await primary.until_followed()


async def waits(server: Server) -> bool:
    return await server.sql(WAITS_FOR_STANDBY) != "0"


SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'quorumlog-metadata'"
    " AND wait_event_type IN ('IPC', 'Lock')"
)


async def test_changes_without_a_standby_let_reads_go_on(stores: Stores, synchronous: Pair) -> None:
    slots, primary, standby = 3, synchronous.primary, synchronous.standby
    async with serving(
        on(stores, synchronous.dsn),
        connections_max=slots,
        database_deadline_s=1,
        expiry_every_s=1000,
    ) as service:
        row = await service.client.create(DRAFT)
        await standby.kill()
        tries = [ledger_try] * slots + [log_try] * slots
        first = await asyncio.gather(*(one(service, f"log-{at}") for at, one in enumerate(tries)))

        async def is_refused() -> bool:
            _, problem = await log_try(service, "another")
            return problem["outcome"] == "not-done" and "standby" in problem["detail"]

        await until(is_refused, "changes are refused")
        assert await service.client.get(row.ledger_id) == row, "reads go on"
        await until(lambda: few(primary, slots), "who waits for another commit's lock ends")
        assert [await is_refused() for _ in range(slots)] == [True] * slots
        assert await few(primary, slots)
        assert "unknown" in {problem["outcome"] for _, problem in first}

        await standby.start()
        await primary.until_followed()
        logs = LogClient(service.client)

        async def is_taken() -> bool:
            await logs.create(replace(LOG, name="another"))
            return True

        await until(is_taken, "changes are taken", passing=(QuorumLogError,))


async def few(server: Server, most: int) -> bool:
    """Whether so many sessions wait, one at least."""
    return 1 <= int(await server.sql(SESSIONS)) <= most


async def ledger_try(service: Service, _name: str) -> tuple[int, Any]:
    body = LedgerCreateBody(row=DRAFT, attempt=new_attempt())
    return await service.send("POST", "/v1/ledgers", body.model_dump_json().encode())


async def log_try(service: Service, name: str) -> tuple[int, Any]:
    """A change that notifies nobody: several can wait for the standby at once."""
    body = LogCreateBody(row=replace(LOG, name=name), attempt=new_attempt())
    return await service.send("POST", "/v1/logs", body.model_dump_json().encode())


# --- primaries that are gone, and primaries that come back ---------------------------------------


async def test_a_silent_primary_hides_no_standby(stores: Stores, synchronous: Pair) -> None:
    # The deadline is the shipped one.
    async with serving(on(stores, synchronous.dsn), database_deadline_s=1.8) as service:
        row = await service.client.create(DRAFT)
        synchronous.primary.freeze()
        await synchronous.standby.promote()

        await until(lambda: is_ready(service), "the service has the new primary")
        assert await service.client.get(row.ledger_id, proof=True) == row
        await service.client.create(DRAFT)


END_SESSIONS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE application_name = 'quorumlog-metadata'"
)


async def split(both: Pair, service: Service) -> tuple[LedgerMetadata, LedgerMetadata]:
    """The standby is promoted and has a change; the old primary comes back as a second primary, and
    all connections end. Returns the row on the old primary and on the new one.
    """
    row = await service.client.create(DRAFT)
    await both.standby.has_all_of(both.primary)
    await both.fail_over()
    await until(lambda: is_ready(service), "the service has the new primary")
    now = await swapped(service.client, row.in_recovery())
    await both.standby.start()
    await both.primary.sql(END_SESSIONS)
    return row, now


async def test_a_process_stays_with_the_new_primary(stores: Stores, asynchronous: Pair) -> None:
    async with serving(on(stores, asynchronous.dsn)) as service:
        row, now = await split(asynchronous, service)

        assert await service.client.get(row.ledger_id) == now, "the old primary has an older row"
        assert await service.client.get(row.ledger_id, proof=True) == now
        created = await service.client.create(DRAFT)
        await closed(service.client)
        assert await is_ready(service)
    old, new = asynchronous.standby, asynchronous.primary
    assert await old.sql("SELECT max(version) FROM ledgers") == "1"
    assert await old.sql("SELECT count(*) FROM ledgers") == "1", "nothing is written there"
    assert await new.sql("SELECT max(ledger_id) FROM ledgers") > str(created.ledger_id)


async def test_of_two_primaries_a_start_waits_for_one(stores: Stores, asynchronous: Pair) -> None:
    async with serving(on(stores, asynchronous.dsn)) as service:
        row, now = await split(asynchronous, service)
    async with serving(on(stores, asynchronous.dsn), wait=False) as service:
        assert not await is_ready(service)
        await asynchronous.standby.stop()
        await until(lambda: is_ready(service), "there is one primary")

        assert await service.client.get(row.ledger_id) == now
