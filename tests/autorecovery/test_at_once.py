"""What comes in between: a drop and a repair, a trigger and an audit, an auditor that looked away."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import google_crc32c
import pytest

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from quorumlog.errors import EntryUnavailable, QuorumLogError, RecoveryBlocked
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import Ports, Times
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.metadata import Repair as PendingRepair
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from quorumlog.wire.repair_bodies import Repair, RepairSettingsPut
from services.autorecovery import auditor as auditor_module
from services.autorecovery.auditor import Auditor
from services.autorecovery.config import Config
from services.autorecovery.losses import KnownLosses
from services.autorecovery.steering import Steering
from services.autorecovery.worker import Done, Worker
from services.autorecovery.writers import WriterPresence, Writers
from services.bookie.store import Store
from tests.bookie.support import KEY, add, ids_of, read, run_of
from tests.bookie.test_channel import serving as bookie
from tests.metadata.support import DRAFT, PATIENT_S, Service
from tests.metadata.support import serving as metadata
from tests.support.waiting import until

ROW = LedgerMetadata(
    7,
    Quorum(2, 2, 1),
    DigestKind.CRC32C,
    (Fragment(0, ("b1@1", "b2@1")),),
    state=State.CLOSED,
    last_entry=9,
    length=1,
    ledger_key=KEY,
)


ROW_REPAIR = PendingRepair(0, "b1@1", "b4@1")


class Row:
    """A metadata port with one row. `steps` are taken when the row has been changed so often."""

    def __init__(self) -> None:
        self.row = ROW
        self.changes = 0
        self.missed: list[MissedRange] = []
        """What was queued with changes."""
        self.steps: dict[int, Any] = {}
        self.before: dict[int, Any] = {}
        """What is done just before a change, the number of which it is."""

    async def read(self, _ledger_id: int) -> tuple[CasStatus, LedgerMetadata]:
        return CasStatus.OK, self.row

    async def cas(
        self, row: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata]:
        assert attempt
        self.before.pop(self.changes + 1, lambda: None)()
        if row.version != self.row.version:
            return CasStatus.CONFLICT, self.row
        self.missed += missed
        self.row = replace(row, version=row.version + 1)
        self.changes += 1
        self.steps.get(self.changes, lambda: None)()
        return CasStatus.OK, self.row


@dataclass
class Two:
    """b1 leaves, b2 has all of ledger 7, and b4 has some of it left from earlier; nobody names b4."""

    worker: Worker
    stores: dict[str, Store]
    row: Row

    @property
    def target(self) -> Store:
        return self.stores["b4"]

    async def mend(self) -> None:
        item = Repair(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=True)
        await self.worker.repair(item)

    async def look_again(self) -> None:
        """What another worker makes of what the change of the place has queued."""
        assert len(self.row.missed) == 1, "it is queued once"
        (missed,) = self.row.missed
        ranges = ((missed.first, missed.last),)
        await self.worker.repair(
            Repair(ledger_id=7, member=missed.member, ranges=ranges, version=1)
        )

    async def held(self) -> list[int]:
        return ids_of(await read(self.target, 7, 0, 20, member="b4@1"))


def flip(store: Store, entry_id: int) -> None:
    """Flip a byte of the stored copy of an entry, and of those in its run."""
    (part,) = store.ledger(7).find(entry_id, entry_id)
    with store.segments.path(part.segment).open("r+b") as file:
        file.seek(part.offset + part.size - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))


def whole(store: Store) -> list[int]:
    """The entries of which the file has the bytes that were written."""
    return [
        entry_id
        for part in store.ledger(7).find(0, 9)
        if part.segment >= 0
        for data in [store.segments.path(part.segment).read_bytes()]
        if google_crc32c.value(data[part.offset : part.offset + part.size]) == part.crc
        for entry_id in part.ids()
    ]


@contextlib.asynccontextmanager
async def two_bookies(state: BookieState) -> AsyncIterator[Two]:
    """b1 is lost, or has all and drains."""
    with scratch("ql-heal-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            served = {}
            for name in ("b1", "b2", "b4"):
                (path := Path(folder) / name).mkdir()
                served[name] = await stack.enter_async_context(bookie(path))
                served[name].store.set_member(f"{name}@1")
                for half in (range(5), range(5, 10)):
                    await add(served[name].store, run_of(7, half), member=f"{name}@1")

            async def fetch() -> BookieList:
                states: dict[str, BookieState] = {"b1": state}
                return BookieList(
                    bookies=tuple(
                        BookieInfo(id=f"{name}@1", state=states.get(name, "writable"), url=one.url)
                        for name, one in served.items()
                        if states.get(name) != "lost"
                    )
                    + tuple(
                        BookieInfo(id=f"{name}@1", state="lost", url="")
                        for name in served
                        if states.get(name) == "lost"
                    )
                )

            session = await stack.enter_async_context(aiohttp.ClientSession())
            directory = Directory(fetch)
            await directory.refresh()
            bookies = BookieClient(directory.address, session)
            stack.push_async_callback(bookies.close)
            tasks, timers = Tasks(), Timers(asyncio.get_running_loop())
            row = Row()
            times = Times(quorum_s=PATIENT_S, hedge_s=PATIENT_S)
            ports = Ports(bookies, row, directory, timers, tasks, times)
            losses = KnownLosses(HoldingsClient(directory, session))
            parts: Any = (None, directory, ports, session, Done(), losses)
            yield Two(Worker(*parts), {name: one.store for name, one in served.items()}, row)
            await tasks.close()
            timers.close()


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with two_bookies("lost") as running:
        yield running


async def test_entries_a_bookie_is_about_to_drop_are_copied_to_it_again(two: Two) -> None:
    """It has looked for the last time, and is not named; then a repair names it (rules 18 and 20)."""
    two.row.steps[1] = lambda: two.target.moves.drop(7, keep_stub=True)

    await two.mend()

    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
    assert await two.held() == list(range(10))


async def test_entries_that_a_named_target_has_are_not_sent_again(two: Two) -> None:
    two.row.row = two.row.row.with_repair(ROW_REPAIR)
    before = two.target.counters["log_records"]

    await two.mend()

    assert two.target.counters["log_records"] == before
    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")


async def the_only_healthy_copy_outlasts_the_move() -> None:
    """A draining bookie has it; b2's copy and what the target has of earlier have a flipped byte."""
    async with two_bookies("draining") as two:
        for name in ("b2", "b4"):
            flip(two.stores[name], 7)
        two.row.row = two.row.row.with_repair(ROW_REPAIR)
        seen: list[list[int]] = []
        two.row.steps[1] = lambda: seen.append(whole(two.target))

        await two.mend()

        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert seen == [list(range(10))], "all was right on the target's disk before the change"


async def test_the_only_healthy_copy_survives_a_move_to_a_damaged_one() -> None:
    """Rule 20a."""
    await the_only_healthy_copy_outlasts_the_move()


async def test_a_member_with_entries_that_no_other_has_keeps_its_place(two: Two) -> None:
    """Rule 20a: b1 may come back. What can be copied is."""
    for name in ("b2", "b4"):
        flip(two.stores[name], 7)
    two.row.row = two.row.row.with_repair(ROW_REPAIR)

    with pytest.raises(EntryUnavailable):
        await two.mend()

    assert two.row.row.fragments[0].bookies == ("b1@1", "b2@1")
    assert not two.row.missed
    assert await two.held() == list(range(5))


async def a_target_that_was_dropped_meanwhile_is_filled_again() -> None:
    """Another repair of the place took the mark away just before the change, and b4's collector saw
    that nothing named it.
    """
    async with two_bookies("lost") as two:

        def unmark() -> None:
            two.row.row = replace(two.row.row, repairs=(), version=two.row.row.version + 1)
            two.target.moves.drop(7, keep_stub=True)

        two.row.before[2] = unmark
        seen: list[list[int]] = []
        two.row.steps[3] = lambda: seen.append(whole(two.target))

        await two.mend()

        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert seen == [list(range(10))], "all was on the target's disk before the change"


async def test_a_target_that_was_dropped_meanwhile_is_filled_again() -> None:
    """Rules 18 and 20a."""
    await a_target_that_was_dropped_meanwhile_is_filled_again()


async def a_place_that_went_bad_is_repaired_by_the_second_look() -> None:
    """The worker dies as the place changes hands, and b4 loses what it was seen to have."""
    async with two_bookies("lost") as two:
        await dies_at_the_change(two)
        assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
        assert whole(two.target) == list(range(5, 10))

        await two.look_again()

        assert whole(two.target) == list(range(10))


async def dies_at_the_change(two: Two) -> None:
    died = asyncio.Event()

    def die() -> None:
        flip(two.target, 2)
        died.set()
        raise asyncio.CancelledError

    two.row.steps[2] = die
    mending = asyncio.create_task(two.mend())
    await died.wait()
    mending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await mending


async def test_a_place_that_went_bad_is_repaired_by_the_second_look() -> None:
    """Rule 20a: the change of the place queues it, so that no worker's death leaves it out."""
    await a_place_that_went_bad_is_repaired_by_the_second_look()


async def test_a_second_look_at_a_complete_copy_writes_nothing(two: Two) -> None:
    await two.mend()
    before = {name: store.counters["log_records"] for name, store in two.stores.items()}

    await two.look_again()

    assert {name: store.counters["log_records"] for name, store in two.stores.items()} == before


async def test_missed_entries_of_a_member_without_a_place_need_no_repair(two: Two) -> None:
    """A writer hands over what a member missed when that has been replaced already: nobody waits for
    a bookie that never comes back.
    """
    await two.mend()
    changes = two.row.changes
    lacked = Repair(ledger_id=7, member="b1@1", ranges=((3, 3),), version=1)

    await two.worker.repair(lacked)

    assert two.row.changes == changes


async def silence_is_no_second_look() -> None:
    """b4 looks whether it drops the ledger, and says nothing of it meanwhile."""
    async with two_bookies("lost") as two:
        await two.mend()
        two.target.withhold(7, withheld=True)

        with pytest.raises(QuorumLogError):
            await two.look_again()


async def test_silence_is_no_second_look() -> None:
    await silence_is_no_second_look()


async def test_a_bookie_answers_nothing_about_a_ledger_while_it_decides_to_drop_it() -> None:
    with scratch("ql-heal-") as folder:
        async with bookie(folder) as served:
            await add(served.store, run_of(7, range(10)))
            path = f"{served.url}/v1/ledgers/7"
            served.store.withhold(7, withheld=True)
            async with served.session.get(path) as answer:
                assert answer.status == 503
            served.store.withhold(7, withheld=False)
            async with served.session.get(path) as answer:
                assert (answer.status, (await answer.json())["ranges"]) == (200, [[0, 9]])


class Told(MetadataClient):
    """The metadata service, with liveness as a test has it."""

    bookie_list: BookieList
    lists = 0
    listed: Any = staticmethod(lambda: None)

    async def bookies(self) -> BookieList:
        return self.bookie_list

    async def list(self, **kwargs: Any) -> Any:
        found = await super().list(**kwargs)
        if kwargs.get("bookie"):
            self.lists += 1
            self.listed()
        return found


@dataclass
class Audits:
    """An auditor beside a metadata service; an open ledger's writer refuses connections."""

    auditor: Auditor
    metadata: Told
    repairs: RepairClient
    steering: Steering
    ledger_id: int


def liveness(*states: str, **fields: Any) -> BookieList:
    return BookieList(
        bookies=tuple(
            BookieInfo.model_validate({"id": f"b{number}@1", "state": state, "url": ""})
            for number, state in enumerate(states, 1)
        ),
        **{"liveness_age_s": 1e9} | fields,
    )


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    async with metadata(stores) as running:
        yield running


@pytest.fixture
async def audits(service: Service) -> AsyncIterator[Audits]:
    config = Config.read(
        {
            "METADATA_URLS": service.url,
            "PORT": str(free_ports(1)[0]),
            "LOST_BOOKIE_DELAY_S": "3600",
            "ABANDONED_S": "3600",
            "SILENT_S": "3600",
            "AUDIT_S": "0.01",
            "LEASE_S": "3000",
        }
    )
    client = Told([service.url], service.session, deadline_s=PATIENT_S, try_s=PATIENT_S)
    client.bookie_list = liveness("lost", "writable", "writable")
    writer = Writer("gone", f"http://127.0.0.1:{free_ports(1)[0]}")
    row = await client.create(replace(DRAFT, writer=writer))
    repairs = RepairClient(client, "auditor-1")
    pace: Any = type("Pace", (), {})()
    steering = Steering(config, client, repairs, pace)
    tasks: Any = Tasks()
    ports: Any = type("Only", (), {"tasks": tasks})()
    writers = Writers(service.session)
    auditor = Auditor("auditor-1", config, client, repairs, ports, writers, steering)
    yield Audits(auditor, client, repairs, steering, row.ledger_id)
    await tasks.close()


def since(auditor: Auditor, ledger_id: int) -> tuple[float, float]:
    """Since when it has seen the writer and the bookie missing."""
    return auditor._refused.since[ledger_id], auditor._lost.away_since["b1@1"]


def blind(auditor: Auditor) -> tuple[float | None, float | None]:
    """Since when it could not look at writers and at bookies."""
    return auditor._refused.unobserved_since, auditor._lost.unobserved_since


@pytest.mark.parametrize(
    "seen",
    [{"stale": True}, {"liveness_age_s": 1.0}],
    ids=["stale", "liveness-is-young"],
)
async def test_an_auditor_tracks_how_long_it_observed_nothing(
    audits: Audits, seen: dict[str, Any]
) -> None:
    auditor, ledger_id = audits.auditor, audits.ledger_id
    await auditor.audit()
    first = since(auditor, ledger_id)
    audits.metadata.bookie_list = liveness("lost", "writable", "writable", **seen)
    await auditor.audit()
    begun = blind(auditor)
    assert None not in begun
    await auditor.audit()
    assert blind(auditor) == begun

    # It was for a moment.
    audits.metadata.bookie_list = liveness("lost", "writable", "writable")
    auditor.trigger()
    await auditor.audit()
    assert (since(auditor, ledger_id), blind(auditor)) == (first, (None, None))

    # It was for longer than the graces: they begin anew.
    auditor._refused.unobserved_since = auditor._lost.unobserved_since = first[0] - 3600
    auditor.trigger()
    await auditor.audit()
    assert min(since(auditor, ledger_id)) > max(first)


async def test_a_silent_writer_gets_the_longer_grace_and_then_its_ledger_is_recovered(
    audits: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 21a. Who is silent and refuses in turn is silent all the time."""
    auditor, ledger_id = audits.auditor, audits.ledger_id
    recovered: list[tuple[int, bool]] = []
    says = [WriterPresence.SILENT]

    async def recover(ledger_id: int, *, is_silence_enough: bool) -> None:
        recovered.append((ledger_id, is_silence_enough))

    async def presence_of(_writer: Writer) -> WriterPresence:
        return says[0]

    async def looks(said: WriterPresence) -> None:
        says[0] = said
        auditor.trigger()
        await auditor.audit()
        await asyncio.sleep(0)

    monkeypatch.setattr(auditor, "_recover", recover)
    monkeypatch.setattr(auditor._writers, "presence_of", presence_of)
    for said in (WriterPresence.SILENT, WriterPresence.GONE, WriterPresence.SILENT):
        await looks(said)
        assert ledger_id in auditor._silent.since
        assert (ledger_id in auditor._refused.since) is (said is WriterPresence.GONE)

    auditor._silent.since[ledger_id] -= 7200
    auditor._config = auditor._config.model_copy(update={"abandoned_s": 60.0})
    audits.metadata.bookie_list = liveness("writable", liveness_age_s=3599.0)
    await looks(WriterPresence.SILENT)
    assert not recovered, "Redis is younger than the grace"
    audits.metadata.bookie_list = liveness("writable")
    await looks(WriterPresence.SILENT)
    assert recovered == [(ledger_id, True)]

    auditor._recovering.clear()
    await looks(WriterPresence.ALIVE)
    assert ledger_id not in auditor._silent.since
    await looks(WriterPresence.GONE)
    auditor._refused.since[ledger_id] -= 3600
    await looks(WriterPresence.GONE)
    assert recovered[1:] == [(ledger_id, False)]


async def test_a_writer_that_seemed_gone_is_probed_again_before_it_is_fenced(
    audits: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 21a: to be recovered a ledger may wait for long. What proved it must hold then too."""
    auditor = audits.auditor
    row = await audits.metadata.get(audits.ledger_id)
    abandoned: dict[tuple[WriterPresence, bool], bool] = {}
    for says in WriterPresence:

        async def presence_of(_writer: Writer, says: WriterPresence = says) -> WriterPresence:
            return says

        monkeypatch.setattr(auditor._writers, "presence_of", presence_of)
        for enough in (True, False):
            is_abandoned = await auditor._is_abandoned(row, is_silence_enough=enough)
            abandoned[says, enough] = is_abandoned

    assert [said for said, is_so in abandoned.items() if is_so] == [
        (WriterPresence.GONE, True),
        (WriterPresence.GONE, False),
        (WriterPresence.SILENT, True),
    ]


async def test_an_auditor_observes_nothing_while_another_one_audits(audits: Audits) -> None:
    other = RepairClient(audits.metadata, "auditor-2")
    await audits.auditor.audit()
    assert blind(audits.auditor) == (None, None)
    await other.take_lease("auditor", ttl_s=3000)
    audits.auditor.is_auditor = True
    running = asyncio.create_task(audits.auditor.run())

    await until(lambda: not audits.auditor.is_auditor, "it sees that another one audits")
    running.cancel()

    assert None not in blind(audits.auditor)


async def test_a_trigger_during_an_audit_starts_another_audit_after_it(
    audits: Audits,
) -> None:
    audits.metadata.bookie_list = liveness("lost", "lost", "draining", "writable", "writable")
    audits.metadata.listed = audits.auditor.trigger
    await audits.auditor.audit()
    lists = audits.metadata.lists
    assert lists == 3
    audits.metadata.listed = lambda: None

    await audits.auditor.audit()
    assert audits.metadata.lists == 2 * lists
    assert audits.auditor._open_check_due_at > 0


async def test_a_change_of_settings_hides_no_trigger(audits: Audits) -> None:
    triggered: list[bool] = []
    await audits.steering.refresh(lambda: triggered.append(True))
    await audits.repairs.trigger()

    await audits.steering.change(RepairSettingsPut(paused=True))
    await audits.steering.refresh(lambda: triggered.append(True))
    await audits.steering.refresh(lambda: triggered.append(True))

    assert triggered == [True]


async def test_every_blocked_recovery_is_counted_and_none_that_another_one_has_ended(
    audits: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor_module, "_BLOCKED_MAX", 1)
    auditor, client = audits.auditor, audits.metadata
    writer = Writer("gone", "http://127.0.0.1:9")
    other = (await client.create(replace(DRAFT, writer=writer))).ledger_id

    async def blocked(*_args: object, **_options: object) -> None:
        raise RecoveryBlocked("b1 is away", bookie="b1@1")

    async def gone(_writer: Writer) -> WriterPresence:
        return WriterPresence.GONE

    monkeypatch.setattr(auditor_module, "conclude", blocked)
    monkeypatch.setattr(auditor._writers, "presence_of", gone)
    for ledger_id in (audits.ledger_id, other):
        await auditor._recover(ledger_id, is_silence_enough=False)
    assert (list(auditor.blocked), auditor.blocked_ledgers) == (
        [audits.ledger_id],
        {audits.ledger_id, other},
    )

    row = await client.get(audits.ledger_id)
    _, recovering = await client.cas(row.in_recovery())
    assert recovering is not None
    await client.cas(recovering.closed(last_entry=-1, length=0))
    auditor.trigger()
    await auditor.audit()

    assert (auditor.blocked, auditor.blocked_ledgers) == ({}, {other})
