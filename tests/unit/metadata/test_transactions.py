"""Transactions in the database: ended once, by whoever comes first; nothing of a loser stays."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from pydantic import ValidationError

from loadtest.stores import Stores
from quorumlog.errors import (
    InvalidRequest,
    LogClosed,
    NoSuchLog,
    NoSuchTransaction,
    OwnedByLog,
    QuorumLogError,
    TransactionAborted,
    TransactionCommitted,
)
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionState
from quorumlog.wire.log_bodies import TransactionCommitBody
from services.metadata import transactions
from services.metadata.database import Connection
from services.metadata.transactions import end_aborted
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, WAITING, Service, serving

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))


class World:
    """A log with one open ledger, and those who write transactions onto it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.logs = LogClient(service.client)
        self.transactions = TransactionClient(service.client)
        self.log = LOG

    async def begin(self, app: str | None = None, version: int | None = None) -> Transaction:
        found, _ = await self.transactions.begin(
            "a-log", app=app, version=version, expires_in_s=3600
        )
        return found

    async def ledger(self, transaction: str | None, last: int | None = 0) -> int:
        """A ledger, closed at `last` where that is given."""
        extra = () if transaction is None else (("transaction", transaction), ("partition", "3"))
        row = await self.service.client.create(replace(DRAFT, log="a-log", extra=extra))
        if last is not None:
            await self.close(row, last)
        return row.ledger_id

    async def close_open(self) -> None:
        """Close the log's open ledger, which is empty."""
        for item in self.log.unsealed:
            row = await self.service.client.get(item.ledger_id)
            if row.state is State.OPEN:
                await self.close(row, last=-1)

    async def close(self, row: LedgerMetadata, last: int = 0) -> None:
        closed = row.closed(last_entry=last, length=10 * (last + 1))
        assert (await self.service.client.cas(closed))[0] is CasStatus.OK

    def published(self, new: int, ledgers: Sequence[int], records: int = 5) -> LogMetadata:
        """The log's row with these ledgers on it, each of so many records, and a new open one."""
        sizes = [(ledger_id, records, 10) for ledger_id in ledgers]
        ends = {item.ledger_id: (0, 0) for item in self.log.unsealed}
        row = self.log.with_ends(ends, producers=(), now_ms=1)
        row = row.with_published(sizes, now_ms=1, published_ms=1).with_ledger(new)
        return row.with_ends({}, producers=(), now_ms=1)

    async def commit(
        self, transaction: str, ledgers: Sequence[int], *, row: LogMetadata | None = None
    ) -> Transaction:
        """Commit as an owner does whose open ledger is empty."""
        await self.close_open()
        new = await self.ledger(None, last=None)
        wanted = self.published(new, ledgers) if row is None else row
        sealed = tuple(map(Sealed, ledgers))
        done, log = await self.transactions.commit(transaction, sealed, wanted)
        assert done is not None
        self.log = log or self.log
        return done

    async def orphans(self) -> set[int]:
        """Ledgers that wait for their deletion though they are new."""
        return set(await self.logs.orphans(older_than_s=3600))


@pytest.fixture
async def world(service: Service) -> World:
    made = World(service)
    made.log, _ = await made.logs.create(LOG)
    return made


async def test_a_commit_publishes_what_it_names_and_queues_the_rest(world: World) -> None:
    begun = await world.begin()
    one, two, loser = [await world.ledger(begun.id) for _ in range(3)]
    still_open = await world.ledger(begun.id, last=None)

    done = await world.commit(begun.id, [two, one])

    assert (done.state, done.first_offset, done.last_offset) == (TransactionState.COMMITTED, 0, 9)
    assert [(item.ledger_id, item.first_offset) for item in done.ledgers] == [(two, 0), (one, 5)]
    assert done.ledgers[0].partition == 3
    assert world.log == await world.logs.get("a-log")
    assert [item.ledger_id for item in world.log.items[:2]] == [two, one]
    assert await world.orphans() == {loser, still_open}
    await world.logs.delete_unnamed(loser)
    for kept in (one, two):
        with pytest.raises(OwnedByLog):
            await world.logs.delete_unnamed(kept)


async def test_a_commit_places_what_it_publishes(world: World, stores: Stores) -> None:
    begun = await world.begin()
    one, two, loser = [await world.ledger(begun.id) for _ in range(3)]
    before = [await world.service.client.get(ledger) for ledger in (one, two, loser)]

    await world.commit(begun.id, [two, one])

    found = [await world.service.client.get(ledger) for ledger in (one, two, loser)]
    assert [row.first_offset for row in found] == [5, 0, None]
    assert [row.version - old.version for row, old in zip(found, before, strict=True)] == [1, 1, 0]
    async with connected(stores) as connection:
        target = "SELECT target FROM attempts WHERE attempt = $1"
        targets = [await connection.fetchval(target, row.attempt) for row in found[:2]]
    assert targets == [f"transaction {begun.id}"] * 2, "a witness of the commit (rule 18a)"
    last = world.log.items[-1]
    assert (await world.service.client.get(last.ledger_id)).first_offset == last.first_offset


async def test_a_repeated_commit_gets_its_answer_and_others_are_refused(world: World) -> None:
    begun = await world.begin()
    one, two = [await world.ledger(begun.id) for _ in range(2)]
    done = await world.commit(begun.id, [one])
    version = world.log.version

    for row in (None, world.log):
        again, log = await world.transactions.commit(begun.id, (Sealed(one),), row)
        assert (again, log) == (done, None)
    with pytest.raises(TransactionCommitted):
        await world.transactions.commit(begun.id, (Sealed(two),), None)
    with pytest.raises(TransactionCommitted):
        await world.transactions.abort(begun.id)

    assert (await world.logs.get("a-log")).version == version
    assert await world.transactions.get(begun.id) == done


async def test_of_concurrent_ends_one_wins_and_all_get_its_answer(world: World) -> None:
    for _ in range(8):
        begun = await world.begin()
        one = await world.ledger(begun.id)
        await world.close_open()
        new = await world.ledger(None, last=None)
        row, sealed = world.published(new, [one]), (Sealed(one),)

        answers = await asyncio.gather(
            world.transactions.commit(begun.id, sealed, row),
            world.transactions.abort(begun.id),
            world.transactions.commit(begun.id, sealed, row),
            world.transactions.abort(begun.id),
            return_exceptions=True,
        )

        end = (await world.transactions.get(begun.id)).state
        world.log = await world.logs.get("a-log")
        commits, aborts = answers[::2], answers[1::2]
        if end is TransactionState.COMMITTED:
            assert all(isinstance(answer, TransactionCommitted) for answer in aborts)
            assert not any(isinstance(answer, BaseException) for answer in commits)
            assert world.log.item_of(one) is not None
            assert one not in await world.orphans()
        else:
            assert end is TransactionState.ABORTED
            assert all(isinstance(answer, TransactionAborted) for answer in commits)
            assert not any(isinstance(answer, BaseException) for answer in aborts)
            assert world.log.item_of(one) is None
            assert one in await world.orphans()


async def test_a_transaction_is_read_at_one_moment(world: World, stores: Stores) -> None:
    begun = await world.begin()
    await world.ledger(begun.id)
    connection = await asyncpg.connect(stores.postgres_dsn, connection_class=Connection)

    async def is_waiting() -> bool:
        return bool(await connection.fetchval(WAITING))

    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE transaction_ledgers IN ACCESS EXCLUSIVE MODE")
            asked = asyncio.ensure_future(world.transactions.get(begun.id))
            await until(is_waiting, "the question waits")
            await end_aborted(connection, [begun.id])
        found = await asked
    finally:
        await connection.close()

    assert (found.state, found.ledgers) == (TransactionState.ABORTED, ())


async def test_a_ledger_of_an_ending_transaction_is_refused_or_released(world: World) -> None:
    for end in ("abort", "commit") * 5:
        begun = await world.begin()
        ending = (
            world.transactions.abort(begun.id)
            if end == "abort"
            else world.transactions.commit(begun.id, (), None)
        )

        made, ended = await asyncio.gather(
            world.ledger(begun.id, last=None), ending, return_exceptions=True
        )

        assert not isinstance(ended, BaseException)
        if isinstance(made, BaseException):
            assert isinstance(made, TransactionAborted | TransactionCommitted)
        else:
            assert made in await world.orphans()


async def test_an_aborted_transaction_accepts_no_ledger(world: World) -> None:
    begun = await world.begin()
    one = await world.ledger(begun.id)

    first = await world.transactions.abort(begun.id)
    again = await world.transactions.abort(begun.id)

    assert first == again
    assert first.state is TransactionState.ABORTED
    assert await world.transactions.renew(begun.id) is TransactionState.ABORTED
    assert await world.orphans() == {one}
    with pytest.raises(TransactionAborted):
        await world.ledger(begun.id)
    with pytest.raises(TransactionAborted):
        await world.commit(begun.id, [one])


async def test_an_apps_version_is_published_once(world: World) -> None:
    begun = await world.begin("app", 3)
    assert (await world.begin("app", 3)).id == begun.id
    one, two = [await world.ledger(begun.id) for _ in range(2)]

    done = await world.commit(begun.id, [one])
    other = await world.transactions.commit(begun.id, (Sealed(two),), None)

    # Another driver of the same version: it is told that the version is there, and whose it is.
    assert (other[0], other[1]) == (replace(done, is_duplicate=True), None)
    assert await world.begin("app", 3) == done
    older = await world.begin("app", 2)
    assert (older.state, older.is_duplicate) == (TransactionState.COMMITTED, True)
    assert (await world.begin("app", 4)).is_open
    assert (await world.begin("else", 3)).is_open
    assert await world.orphans() == {two}


async def test_concurrent_begins_of_one_version_share_a_transaction(world: World) -> None:
    begun = await asyncio.gather(*(world.begin("app", 1) for _ in range(12)))

    assert len({transaction.id for transaction in begun}) == 1


async def test_a_lower_version_committed_last_is_dropped(world: World) -> None:
    low, high = await world.begin("app", 1), await world.begin("app", 2)
    one, two = await world.ledger(low.id), await world.ledger(high.id)
    await world.commit(high.id, [two])

    late = await world.commit(low.id, [one])
    again = await world.commit(low.id, [one])

    assert (late.state, late.is_duplicate, late.ledgers) == (TransactionState.COMMITTED, True, ())
    assert again == late
    assert world.log.item_of(one) is None
    assert one in await world.orphans()


async def test_only_closed_ledgers_with_the_stated_end_are_published(world: World) -> None:
    begun, other = await world.begin(), await world.begin()
    closed = await world.ledger(begun.id, last=7)
    still_open = await world.ledger(begun.id, last=None)
    foreign, free = await world.ledger(other.id), await world.ledger(None)
    new = await world.ledger(None, last=None)

    for wrong in ([still_open], [foreign], [free], [12345], [closed, closed], [closed, new]):
        with pytest.raises((InvalidRequest, ValidationError)):
            await world.commit(begun.id, wrong)
    for sealed, row in (
        (Sealed(closed, 6), world.published(new, [closed])),
        (Sealed(closed, 7), None),
    ):
        with pytest.raises(InvalidRequest):
            await world.transactions.commit(begun.id, (sealed,), row)

    assert (await world.transactions.get(begun.id)).is_open
    assert (await world.logs.get("a-log")).version == world.log.version


async def test_nothing_is_published_behind_a_ledger_that_is_not_closed(world: World) -> None:
    one = await world.service.client.create(replace(DRAFT, log="a-log"))
    done, world.log = await world.logs.cas(
        world.log.with_ledger(one.ledger_id).with_ends({}, producers=(), now_ms=1)
    )
    assert done
    begun = await world.begin()
    two = await world.ledger(begun.id)
    ended = world.log.with_ends({one.ledger_id: (4, 10)}, producers=(), now_ms=1)
    new = await world.ledger(None, last=None)
    row = ended.with_published([(two, 5, 10)], now_ms=1, published_ms=1).with_ledger(new)
    row = row.with_ends({}, producers=(), now_ms=1)

    with pytest.raises(InvalidRequest, match="must be CLOSED"):
        await world.transactions.commit(begun.id, (Sealed(two),), row)

    await world.close(one, last=0)
    published, _ = await world.transactions.commit(begun.id, (Sealed(two),), row)
    assert published is not None
    assert (published.first_offset, published.last_offset) == (4, 8)


async def test_a_row_that_breaks_rule_28_is_refused(world: World) -> None:
    begun = await world.begin()
    one, two = [await world.ledger(begun.id) for _ in range(2)]
    new = await world.ledger(None, last=None)
    good = world.published(new, [one, two])
    first, second, last = good.items

    for row in (
        good,  # `two` was not asked for
        replace(good, items=(first,)),
        replace(good, items=(first, replace(last, first_offset=5, last_offset=9))),
        replace(good, items=(first, replace(last, first_offset=5)), state=LogState.CLOSED),
    ):
        with pytest.raises(InvalidRequest):
            await world.transactions.commit(begun.id, (Sealed(one),), row)
    with pytest.raises(InvalidRequest):
        await world.transactions.commit(begun.id, (Sealed(two), Sealed(one)), good)
    assert second.ledger_id == two

    # A plain change of the row names none of them either.
    with pytest.raises(InvalidRequest):
        await world.logs.cas(replace(world.log, items=(LogItem(one, 0),)))
    assert (await world.transactions.get(begun.id)).is_open


async def test_a_commit_from_an_older_row_of_the_log_changes_nothing(world: World) -> None:
    begun = await world.begin()
    one = await world.ledger(begun.id)
    new = await world.ledger(None, last=None)
    row = world.published(new, [one])
    _, now = await world.logs.cas(world.log)

    assert await world.transactions.commit(begun.id, (Sealed(one),), row) == (None, now)

    assert (await world.transactions.get(begun.id)).is_open
    row = replace(row, version=now.version, attempt=now.attempt)
    done, _ = await world.transactions.commit(begun.id, (Sealed(one),), row)
    assert done is not None
    assert done.state is TransactionState.COMMITTED


async def test_deleting_a_log_aborts_its_transactions(world: World) -> None:
    begun = await world.begin("app", 5)
    one = await world.ledger(begun.id)
    await world.commit(begun.id, [one])
    left = await world.begin("app", 6)
    two = await world.ledger(left.id, last=None)

    await world.logs.delete(world.log)

    assert (await world.transactions.get(left.id)).state is TransactionState.ABORTED
    assert two in await world.orphans()
    with pytest.raises(NoSuchLog):
        await world.begin()
    await world.logs.create(LOG)
    assert (await world.begin("app", 5)).is_open


async def test_a_closed_log_begins_no_transaction(world: World) -> None:
    await world.logs.cas(replace(world.log, state=LogState.CLOSED, next_offset=0))

    with pytest.raises(LogClosed):
        await world.begin()


async def test_unknown_transactions_are_reported(world: World) -> None:
    calls = (
        world.transactions.get("nothing"),
        world.transactions.renew("nothing"),
        world.transactions.abort("nothing"),
        world.transactions.commit("nothing", (), None),
        world.ledger("nothing"),
    )

    for call in calls:
        with pytest.raises(NoSuchTransaction):
            await call


async def test_an_ended_transaction_that_is_forgotten_is_not_said_to_have_never_been(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one of an app is kept for ever, so that no version is committed twice."""
    plain, last = await world.begin(), await world.begin("app", 2)
    for begun in (plain, last):
        await world.transactions.commit(begun.id, (), None)
    monkeypatch.setattr(transactions, "_KEPT_S", -1)

    async def is_forgotten() -> bool:
        try:
            await world.transactions.get(plain.id)
        except NoSuchTransaction:
            return True
        return False

    await until(is_forgotten, "its time is over")
    monkeypatch.undo()

    with pytest.raises(NoSuchTransaction, match="or it ended more than 7 days ago"):
        await world.transactions.commit(plain.id, (), None)
    again, is_new = await world.transactions.begin("a-log", app="app", version=1, expires_in_s=60)
    assert (again.state, is_new) == (TransactionState.COMMITTED, False)


async def test_an_unrenewed_transaction_expires_and_leaves_no_ledger(service: Service) -> None:
    world = World(service)
    await world.logs.create(LOG)
    lives, _ = await world.transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    two = await world.ledger(lives.id, last=None)

    async def written() -> tuple[Transaction, int] | None:
        """One that expires soon; on a slow machine maybe before its ledger is made."""
        begun, _ = await world.transactions.begin("a-log", app=None, version=None, expires_in_s=1)
        try:
            return begun, await world.ledger(begun.id, last=None)
        except TransactionAborted:
            return None

    made = await until(written, "a ledger is made in time")
    assert made is not None
    expired, one = made

    async def is_ended() -> bool:
        return not (await world.transactions.get(expired.id)).is_open

    await until(is_ended, "the transaction is ended")

    assert await world.orphans() == {one}
    assert await world.transactions.renew(lives.id) is TransactionState.OPEN
    with pytest.raises(QuorumLogError):
        await world.logs.delete_unnamed(two)


async def a_commit(world: World) -> tuple[str, dict[str, Any]]:
    """A request that commits one ledger: its path and body."""
    begun = await world.begin()
    one = await world.ledger(begun.id)
    new = await world.ledger(None, last=None)
    commit = TransactionCommitBody(
        ledgers=(Sealed(one),),
        row=world.published(new, [one]),
        attempt=new_attempt(),
    )
    return f"/v1/transactions/{begun.id}/commit", commit.model_dump(mode="json")


async def test_a_commit_with_a_lost_answer_gets_the_logs_row(world: World) -> None:
    path, body = await a_commit(world)

    answers = [await world.service.send("POST", path, body) for _ in range(2)]
    other = await world.service.send("POST", path, body | {"attempt": new_attempt()})

    for _, row in answers:
        del row["row"]["read_ms"]  # the time at which it was told
    assert answers[0] == answers[1]
    status, reported = answers[0]
    assert (status, reported["row"]["items"][0]["ledger_id"]) == (
        200,
        body["ledgers"][0]["ledger_id"],
    )
    # Another attempt at the same: the transaction is the same, but this one did not change the log.
    assert other == (200, reported | {"row": None})


async def test_a_commit_is_answered_again_after_its_log_was_deleted(world: World) -> None:
    path, body = await a_commit(world)
    status, first = await world.service.send("POST", path, body)
    assert status == 200
    await world.logs.delete(await world.logs.get("a-log"))

    assert await world.service.send("POST", path, body) == (200, first | {"row": None})


async def test_the_metrics_count_transactions_and_orphan_ledgers(stores: Stores) -> None:
    async with serving(stores, expiry_every_s=0.1) as service:
        world = World(service)
        world.log, _ = await world.logs.create(LOG)
        lives, aborted, committed = [await world.begin() for _ in range(3)]
        await world.ledger(aborted.id)
        await world.transactions.abort(aborted.id)
        await world.commit(committed.id, [await world.ledger(committed.id)])
        await world.transactions.begin("a-log", app=None, version=None, expires_in_s=1)

        async def counted() -> dict[str, float]:
            async with service.session.get(service.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            return {
                name.removeprefix("quorumlog_metadata_"): float(value)
                for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")
                if "transactions_" in name or "orphan" in name
            }

        wanted = {
            "transactions_open": 1.0,
            "transactions_committed_total": 1.0,
            "transactions_aborted_total": 1.0,
            "transactions_expired_total": 1.0,
            "orphan_ledgers": 1.0,
        }

        async def is_counted() -> bool:
            return await counted() == wanted

        await until(is_counted, "all are counted")
        assert (await world.transactions.get(lives.id)).is_open
