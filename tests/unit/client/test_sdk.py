"""The SDK's public names, async and sync, against a whole cluster."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from quorumlog import client as sdk
from quorumlog.client import Batching, Client, ClientClosed, Entry, Record, sync
from quorumlog.errors import (
    KeyRequired,
    LedgerClosed,
    LogClosed,
    LogExists,
    LogFenced,
    LogProtected,
    LossNotProven,
    NoSuchLedger,
    NoSuchLog,
    NoSuchToken,
    OffsetTruncated,
    StaleProducer,
    UnexpectedEntryId,
    UnexpectedOffset,
    VersionConflict,
    WrongPassword,
)
from tests.support.waiting import SETTLED_S, turns, until

pytestmark = pytest.mark.asyncio(loop_scope="package")


def new_name() -> str:
    return f"log-{uuid4().hex[:8]}"


def nobody() -> str:
    """The URL of a gateway that is gone."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


async def test_a_ledger_from_its_creation_to_its_end(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as one, Client(nobody(), cluster.gateways[1]) as two:
        ledger = await one.create_ledger(
            ensemble_size=3, write_quorum=3, ack_quorum=2, digest="hmac-sha256",
            metadata={"for": "sdk"}, password="secret", allow_degraded=False,
        )  # fmt: skip
        reader = two.ledger(ledger.ledger_id, password="secret")
        with pytest.raises(WrongPassword):
            await two.ledger(ledger.ledger_id).append(b"x")

        assert await ledger.append(b"\x00first") == 0
        done = await reader.append_batch([b"", b"third"], expect=1)
        assert (done.first_entry, done.last_entry, done.last_add_confirmed) == (1, 2, 2)
        with pytest.raises(UnexpectedEntryId):
            await ledger.append(b"x", expect=7)
        tailing = asyncio.ensure_future(anext(reader.tail(3)))
        assert await ledger.append(b"fourth", expect=3) == 3
        assert await tailing == Entry(3, b"fourth")
        page = await reader.read(1, limit=2, last=3)
        assert ([e.payload for e in page.entries], page.next, page.is_end) == (
            [b"", b"third"], 3, False,
        )  # fmt: skip
        assert await reader.last_add_confirmed() == 3
        assert [e.entry_id async for e in reader.entries(1, last=2)] == [1, 2]
        assert (await ledger.close())["state"] == "CLOSED"

        with pytest.raises(LedgerClosed):
            await reader.append(b"x")
        assert [e.payload async for e in reader.tail()] == [b"\x00first", b"", b"third", b"fourth"]
        assert (await ledger.recover())["last_entry"] == 3
        with pytest.raises(LossNotProven):
            await ledger.accept_loss(0, 3)
        assert [entry["ledger_id"] async for entry in one.ledgers(metadata={"for": "sdk"})] == [
            ledger.ledger_id
        ]
        await one.delete_ledger(ledger.ledger_id, password="secret")
        with pytest.raises(NoSuchLedger):
            await ledger.info()


async def test_appends_of_many_tasks_are_gathered_and_keep_their_order(cluster: Cluster) -> None:
    async with Client(*cluster.gateways, batching=Batching(count_max=64, linger_ms=1)) as client:
        ledger = await client.create_ledger()
        submitted = [await ledger.submit(b"%d" % n) for n in range(1000)]
        gathered = await asyncio.gather(*(ledger.append(b"%d" % n) for n in range(1000, 1100)))
        await ledger.flush()

        assert [(await future).first_entry for future in submitted] == list(range(1000))
        assert gathered == list(range(1000, 1100))
        assert [int(e.payload) async for e in ledger.entries()] == list(range(1100))
        pages = [page async for page in ledger.entries().pages()]
        assert sum(map(len, pages)) == 1100
        assert len(pages) < 1100


async def test_the_end_of_a_client_waits_for_what_is_on_its_way(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        ledger = await client.create_ledger()
        future = await ledger.submit(b"last words")

    assert (await future).first_entry == 0


async def test_a_compacted_log_keeps_the_newest_record_of_each_key(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name(), cleanup_policy="compact", max_dirty_percent=0)
        settings = (await log.info())["settings"]
        assert (settings["cleanup_policy"], settings["delete_retention_s"]) == ("compact", 86_400)
        with pytest.raises(KeyRequired):
            await log.append(b"x")
        with pytest.raises(ValueError, match="must have a key"):
            Record(None)
        await log.append(Record(b"1", b"a"), Record(b"2", b"b"), Record(b"3", b"a"))
        await log.append(Record(None, b"b", {"h": "v"}))
        await log.roll()

        async def is_compacted() -> bool:
            return [record.offset async for record in log.records()] == [2, 3]

        await until(is_compacted, "the log is compacted", SETTLED_S)
        page = await log.read(0)
        kept, gone = page.records
        assert (kept.value, kept.is_tombstone, page.next) == (b"3", False, 4)
        assert (gone.value, gone.key, gone.headers, gone.is_tombstone) == (
            b"",
            b"b",
            {"h": "v"},
            True,
        )
        changed = await log.change(cleanup_policy="compact,delete", min_compaction_lag_s=5)
        assert changed["settings"]["cleanup_policy"] == "compact,delete"
        assert changed["settings"]["min_compaction_lag_s"] == 5
        async with log.consumer("c") as consumer:
            found = [record.offset async for record in consumer.records(follow=False)]
        assert found == [2, 3]


async def test_a_log_from_its_creation_to_its_end(cluster: Cluster) -> None:
    name = new_name()
    async with Client(*cluster.gateways) as client, Client(cluster.gateways[1]) as other:
        log = await client.create_log(
            name, ensemble_size=3, write_quorum=3, ack_quorum=2, digest="crc32c",
            metadata={"for": "sdk"}, roll_bytes=1 << 20, roll_entries=0, roll_seconds=0,
            retention_bytes=0, retention_seconds=0, merge_below_bytes=64 << 20,
        )  # fmt: skip
        with pytest.raises(LogExists):
            await client.create_log(name)
        record = Record(b"c", b"key", {"h": "v"}, "2026-01-02T03:04:05.000Z")
        first = await log.append(b"a", b"", record)
        assert (first.first_offset, first.last_offset, first.is_duplicate) == (0, 2, False)
        with pytest.raises(UnexpectedOffset):
            await log.append(b"x", expect=7)
        futures = [await log.submit(b"%d" % n) for n in range(3, 50)]
        await log.flush()
        assert [(await future).first_offset for future in futures] == list(range(3, 50))

        found = [r async for r in other.log(name).records()]
        assert [r.offset for r in found] == list(range(50))
        assert (found[2].value, found[2].key, found[2].headers) == (b"c", b"key", {"h": "v"})
        assert found[2].timestamp == "2026-01-02T03:04:05.000Z"
        assert (found[0].ledger_id, found[0].entry_id) == (first.ledger_id, first.entry_id)
        page = await log.read(48, limit=5)
        assert ([r.value for r in page.records], page.next, page.closed) == (
            [b"48", b"49"],
            50,
            False,
        )
        tailing = asyncio.ensure_future(anext(other.log(name).tail("latest")))
        await turns()
        while not tailing.done():
            await log.append(b"tick")
            await asyncio.wait([tailing], timeout=0.1)
        assert (await tailing).value == b"tick"

        before = (await log.info())["next_offset"]
        assert len((await log.roll())["ledgers"]) == 2
        await log.append(b"in the new ledger")
        assert (await log.archived(before))["archived_through"] == before
        assert (await log.truncate(before))["first_offset"] == before
        with pytest.raises(OffsetTruncated):
            await log.read(0)
        assert await log.open("me") == before + 1
        await client.log(name, writer_token=log.writer_token).append(b"y")
        with pytest.raises(LogFenced):
            await other.log(name).append(b"z")
        assert (await log.close())["state"] == "CLOSED"
        with pytest.raises(LogClosed):
            await log.append(b"x")
        assert [r.value async for r in log.tail()] == [b"in the new ledger", b"y"]
        assert name in [info["name"] async for info in client.logs()]
        await log.delete()
        with pytest.raises(NoSuchLog):
            await log.info()


async def test_a_producer_appends_once_and_a_later_one_ends_it(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client, Client(cluster.gateways[1]) as other:
        log = await client.create_log(new_name())
        producer = log.producer("p", epoch=1)
        futures = [await producer.submit(b"%d" % n) for n in range(100)]
        await producer.flush()
        assert [(await future).first_offset for future in futures] == list(range(100))
        assert await producer.settle() is None
        assert producer.seq < 100

        again = other.log(log.name).producer("p", epoch=2)
        assert (again.producer_id, again.epoch) == ("p", 2)
        first = await again.append(b"100", b"101")
        repeat = client.log(log.name).producer("p", epoch=2)
        reported = await repeat.append(b"100", b"101")
        assert (first.first_offset, reported.first_offset, reported.is_duplicate) == (
            100,
            100,
            True,
        )
        with pytest.raises(StaleProducer):
            await producer.append(b"late")
        assert [int(r.value) async for r in log.records()] == list(range(102))


async def test_the_cluster_shows_its_services(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        bookies = {bookie["id"] for bookie in await client.bookies()}

        async def are_shown() -> bool:
            kinds = {service["kind"] for service in (await client.cluster())["services"]}
            return {"gateway", "metadata"} <= kinds

        await until(are_shown, "a gateway and a metadata service are shown")
        states = [ledger["state"] async for ledger in client.ledgers(state="OPEN")]

    assert bookies == {"bookie-1@1", "bookie-2@1", "bookie-3@1"}
    assert set(states) <= {"OPEN"}


def use_a_ledger(urls: list[str]) -> None:
    with sync.Client(nobody(), *urls, batching=Batching(linger_ms=1)) as client:
        ledger = client.create_ledger(metadata={"for": "sync"}, password="secret")
        assert ledger.append(b"0") == 0
        assert ledger.append_batch([b"1", b"2"], expect=1).last_entry == 2
        with ThreadPoolExecutor(8) as threads:
            ids = sorted(threads.map(lambda n: ledger.append(b"%d" % n), range(200)))
        assert ids == list(range(3, 203))
        futures = [ledger.submit(b"%d" % n) for n in range(203, 300)]
        ledger.flush()
        assert [future.result(60).first_entry for future in futures] == list(range(203, 300))

        reader = client.ledger(ledger.ledger_id, password="secret")
        assert reader.read(298).next == 300
        assert len(list(reader.entries(first=250, last=259))) == 10
        tailing = reader.tail(299)
        assert next(tailing) == Entry(299, b"299")
        ledger.append(b"300")
        assert next(tailing).entry_id == 300
        assert reader.last_add_confirmed() == 300
        assert ledger.close()["last_entry"] == 300
        assert list(tailing) == []
        assert ledger.recover()["state"] == ledger.info()["state"] == "CLOSED"
        with pytest.raises(LossNotProven):
            ledger.accept_loss(300, 300)
        with pytest.raises(LedgerClosed):
            ledger.append(b"x")
        assert repr(ledger) == f"Ledger({ledger.ledger_id})"
        listed = [shown["ledger_id"] for shown in client.ledgers(metadata={"for": "sync"})]
        assert listed == [ledger.ledger_id]
        assert len(client.bookies()) == 3
        assert client.cluster()["bookies"]
        client.delete_ledger(ledger.ledger_id, password="secret")


def use_a_log(urls: list[str]) -> None:
    with sync.Client(*urls) as client:
        log = client.create_log(new_name())
        assert log.append(b"0", Record(b"1", key=b"k")).last_offset == 1
        assert log.submit(b"2").result(60).first_offset == 2
        log.flush()
        producer = log.producer("p")
        assert producer.append(b"3").first_offset == 3
        assert producer.submit(b"4").result(60).first_offset == 4
        producer.flush()
        assert (producer.settle(), producer.seq, producer.producer_id) == (None, 2, "p")
        assert [record.offset for record in log.records()] == list(range(5))
        assert log.read(4).next == 5
        tailing = log.tail(5)
        log.append(b"5")
        assert next(tailing).value == b"5"
        tailing.close()  # type: ignore[attr-defined]
        assert len(log.roll()["ledgers"]) == 2
        assert log.archived(6)["archived_through"] == 6
        assert log.truncate(6)["first_offset"] == 6
        assert log.open("me") == 6
        assert client.log(log.name, writer_token=log.writer_token).append(b"6").first_offset == 6
        assert log.info()["next_offset"] == 7
        assert log.name in [shown["name"] for shown in client.logs()]
        assert log.close()["state"] == "CLOSED"
        given_up = log.tail()
        next(given_up)
        log.delete()
    given_up.close()  # type: ignore[attr-defined]
    with pytest.raises(ClientClosed):
        log.info()


async def test_a_producer_appends_at_an_expected_offset_or_not_at_all(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        producer = log.producer("p", epoch=1)
        assert (await producer.append(b"a", b"b", expect=0)).first_offset == 0
        with pytest.raises(UnexpectedOffset):
            await producer.append(b"c", expect=7)
        assert (await producer.append(b"c", expect=2)).first_offset == 2

        # A repeat is told where the records are, wherever the log has come to since.
        again = log.producer("p", epoch=1)
        repeat = await again.append(b"a", b"b", expect=0)
        assert (repeat.first_offset, repeat.is_duplicate) == (0, True)


async def test_a_token_from_its_creation_to_its_revocation(cluster: Cluster) -> None:
    name = new_name()
    async with Client(*cluster.gateways) as client:
        made = await client.create_token(name, ["read:logs/*"], expires_in_s=3600)
        shown = [token for token in await client.tokens() if token["name"] == name]
        await client.revoke_token(made["id"])
        left = [token["name"] for token in await client.tokens()]
        done = [entry async for entry in client.audit(target=f"tokens/{made['id']}")]

    assert [token["id"] for token in shown] == [made["id"]]
    assert "token" not in shown[0], "nobody can show it again"
    assert name not in left
    assert len(done) == 2


def use_a_token(urls: list[str]) -> None:
    with sync.Client(*urls) as client:
        made = client.create_token(new_name(), ["append:ledgers/*"])
        assert made["id"] in [token["id"] for token in client.tokens()]
        client.revoke_token(made["id"])
        with pytest.raises(NoSuchToken):
            client.revoke_token(made["id"])
        assert len(list(client.audit(target=f"tokens/{made['id']}"))) == 2


async def test_records_and_tails_may_ask_for_keys_and_headers(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        for number in range(20):
            key, kind = b"user-%d" % (number % 4), {"kind": "login" if number % 3 else "logout"}
            await log.append(Record(b"%d" % number, key, kind))
        await log.append(b"without a key")
        await log.close()

        assert [r.offset async for r in log.records(key="user-1")] == [1, 5, 9, 13, 17]
        assert [r.offset async for r in log.tail(key="user-1", headers={"kind": "logout"})] == [9]
        assert [r.offset async for r in log.records(key_prefix="user-")] == [*range(20)]
        assert [r.offset async for r in log.records(key="")] == []
        assert [r.offset async for r in log.records(-9, key="user-0")] == [12, 16]
        page = await log.read(key="user-3", limit=2)
        assert ([r.offset for r in page.records], page.next, page.closed) == ([3, 7], 8, False)


async def test_a_changed_password_and_a_protected_log(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        ledger = await client.create_ledger(password="old")
        await ledger.append(b"0")
        await ledger.change_password("new")
        assert await ledger.append(b"1") == 1
        with pytest.raises(WrongPassword):
            await client.ledger(ledger.ledger_id, password="old").append(b"2")
        log = await client.create_log(new_name())
        seen = (await log.change(retention_seconds=60, roll_bytes=0))["version"]
        assert (await log.info())["settings"]["retention_seconds"] == 60
        changed = await log.change(
            roll_entries=5, roll_seconds=6, retention_bytes=7, merge_below_bytes=0, if_version=seen
        )
        assert changed["settings"]["retention_seconds"] == 60
        with pytest.raises(VersionConflict):
            await log.change(roll_bytes=1, if_version=seen)
        with pytest.raises(ValueError, match="no limits given"):
            await log.change()
        assert [shown["name"] async for shown in client.logs(prefix=log.name)] == [log.name]
        await log.protect()
        with pytest.raises(LogProtected):
            await log.delete()
        await log.protect(deletion_protection=False)
        await log.delete()


def change_and_protect(urls: list[str]) -> None:
    with sync.Client(*urls) as client:
        ledger = client.create_ledger(password="old")
        ledger.change_password("new")
        assert ledger.append(b"0") == 0
        log = client.create_log(new_name())
        assert log.change(roll_entries=5)["settings"]["roll_entries"] == 5
        log.protect()
        with pytest.raises(LogProtected):
            log.delete()


async def test_passwords_and_protection_without_an_event_loop(cluster: Cluster) -> None:
    await asyncio.to_thread(change_and_protect, cluster.gateways)


async def test_a_token_without_an_event_loop(cluster: Cluster) -> None:
    await asyncio.to_thread(use_a_token, cluster.gateways)


async def test_a_ledger_without_an_event_loop(cluster: Cluster) -> None:
    await asyncio.to_thread(use_a_ledger, cluster.gateways)


async def test_a_log_without_an_event_loop(cluster: Cluster) -> None:
    await asyncio.to_thread(use_a_log, cluster.gateways)

    names = [thread.name for thread in threading.enumerate()]
    assert "quorumlog-client" not in names


def text_of_the_tests() -> str:
    here = Path(__file__)
    unit = here.parents[1]
    others = (
        here.with_name("test_paging.py"),
        here.with_name("test_table.py"),
        unit / "positions" / "test_sdk.py",
        unit / "queues" / "test_sdk.py",
    )
    return "".join(file.read_text() for file in (here, *others))


async def test_every_public_name_is_used_in_these_tests() -> None:
    source = await asyncio.to_thread(text_of_the_tests)
    for name in ("Client", "Ledger", "Log", "Producer", "Transaction", "TransactionLedger"):
        methods = [n for n, _ in inspect.getmembers(getattr(sdk, name), inspect.isfunction)]
        for method in methods:
            if method[0] != "_":
                assert source.count(f".{method}(") >= 2, f"{name}.{method}: async and sync"
