"""What comes in between: a drop and a repair, a trigger and an audit, an auditor that looked away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from quorumlog.errors import EntryUnavailable
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import Holdings
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import Ports, Times
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.metadata import Repair as PendingRepair
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList
from quorumlog.wire.repair_bodies import Repair, RepairAdd, RepairSettingsPut
from services.autorecovery.auditor import Auditor
from services.autorecovery.config import Config
from services.autorecovery.losses import Losses
from services.autorecovery.steering import Steering
from services.autorecovery.worker import Done, Worker
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
        self.steps: dict[int, Any] = {}

    async def read(self, _ledger_id: int) -> tuple[CasStatus, LedgerMetadata]:
        return CasStatus.OK, self.row

    async def cas(
        self, row: LedgerMetadata, _missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata]:
        assert attempt
        assert row.version == self.row.version
        self.row = replace(row, version=row.version + 1)
        self.changes += 1
        self.steps.get(self.changes, lambda: None)()
        return CasStatus.OK, self.row


class Queue:
    """What a worker puts into the repair queue."""

    def __init__(self) -> None:
        self.added: list[RepairAdd] = []

    async def add(self, items: list[RepairAdd]) -> None:
        self.added += items


@dataclass
class Two:
    """b1 is lost, b2 has all of ledger 7, and b4 has some of it left from earlier; nobody names b4."""

    worker: Worker
    target: Store
    row: Row
    queue: Queue

    async def mend(self) -> None:
        item = Repair(ledger_id=7, member="b1@1", ranges=((0, 9),), version=1, moves=True)
        await self.worker.mend(item)

    async def held(self) -> list[int]:
        return ids_of(await read(self.target, 7, 0, 20, member="b4@1"))


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    with scratch("ql-heal-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            served = {}
            for name in ("b2", "b4"):
                (path := Path(folder) / name).mkdir()
                served[name] = await stack.enter_async_context(bookie(path))
                served[name].store.rename(f"{name}@1")
                await add(served[name].store, run_of(7, range(10)), member=f"{name}@1")

            async def fetch() -> BookieList:
                return BookieList(
                    bookies=(
                        BookieInfo(id="b1@1", state="lost", url=""),
                        *(
                            BookieInfo(id=f"{name}@1", state="writable", url=one.url)
                            for name, one in served.items()
                        ),
                    )
                )

            session = await stack.enter_async_context(aiohttp.ClientSession())
            directory = Directory(fetch)
            await directory.refresh()
            bookies = BookieClient(directory.address, session)
            stack.push_async_callback(bookies.close)
            tasks, timers = Tasks(), Timers(asyncio.get_running_loop())
            row, queue = Row(), Queue()
            times = Times(quorum_s=PATIENT_S, hedge_s=PATIENT_S)
            ports = Ports(bookies, row, directory, timers, tasks, times)
            losses = Losses(Holdings(directory, session))
            parts: Any = (queue, directory, ports, session, Done(), losses)
            yield Two(Worker(*parts), served["b4"].store, row, queue)
            await tasks.close()
            timers.close()


async def test_what_a_bookie_is_about_to_drop_is_copied_to_it_all_the_same(two: Two) -> None:
    """It has looked for the last time, and is not named; then a repair names it (rules 18 and 20)."""
    two.row.steps[1] = lambda: two.target.drop(7, keep_stub=True)

    await two.mend()

    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
    assert await two.held() == list(range(10))


async def test_what_a_named_target_has_is_not_sent_again(two: Two) -> None:
    two.row.row = two.row.row.with_repair(ROW_REPAIR)
    before = two.target.counters["log_records"]

    await two.mend()

    assert two.target.counters["log_records"] == before
    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")


async def test_a_place_that_could_not_be_verified_is_queued_for_who_has_it_now(two: Two) -> None:
    """The item of the one that left ends with its next try: nothing names that one any more."""
    two.row.steps[2] = lambda: two.target.drop(7, keep_stub=True)

    with pytest.raises(EntryUnavailable):
        await two.mend()

    assert two.row.row.fragments[0].bookies == ("b4@1", "b2@1")
    (item,) = two.queue.added
    assert (item.ledger_id, item.member, item.ranges) == (7, "b4@1", ((0, 9),))
    await two.worker.mend(
        Repair(ledger_id=7, member=item.member, ranges=item.ranges, version=1, moves=item.moves)
    )
    assert await two.held() == list(range(10))


async def test_a_bookie_says_nothing_of_a_ledger_while_it_decides_whether_to_drop_it() -> None:
    with scratch("ql-heal-") as folder:
        async with bookie(folder) as served:
            await add(served.store, run_of(7, range(10)))
            path = f"{served.url}/v1/ledgers/7"
            served.store.leave(7, leaving=True)
            async with served.session.get(path) as answer:
                assert answer.status == 503
            served.store.leave(7, leaving=False)
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
    auditor = Auditor("auditor-1", config, client, repairs, ports, service.session, steering)
    yield Audits(auditor, client, repairs, steering, row.ledger_id)
    await tasks.close()


def since(auditor: Auditor, ledger_id: int) -> tuple[float, float]:
    """Since when it has seen the writer and the bookie missing."""
    return auditor._refused.since[ledger_id], auditor._lost.away_since["b1@1"]


def blind(auditor: Auditor) -> tuple[float | None, float | None]:
    """Since when it could not look at writers and at bookies."""
    return auditor._refused.unseen_since, auditor._lost.unseen_since


@pytest.mark.parametrize(
    "seen",
    [{"stale": True}, {"liveness_age_s": 1.0}],
    ids=["stale", "liveness-is-young"],
)
async def test_an_auditor_knows_for_how_long_it_could_not_look(
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
    auditor._refused.unseen_since = auditor._lost.unseen_since = first[0] - 3600
    auditor.trigger()
    await auditor.audit()
    assert min(since(auditor, ledger_id)) > max(first)


async def test_an_auditor_looks_away_while_another_one_audits(audits: Audits) -> None:
    other = RepairClient(audits.metadata, "auditor-2")
    await audits.auditor.audit()
    assert blind(audits.auditor) == (None, None)
    await other.take_lease("auditor", ttl_s=3000)
    audits.auditor.is_auditor = True
    running = asyncio.create_task(audits.auditor.run())

    await until(lambda: not audits.auditor.is_auditor, "it sees that another one audits")
    running.cancel()

    assert None not in blind(audits.auditor)


async def test_who_asks_for_a_look_at_everything_during_an_audit_gets_one_after_it(
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
    assert audits.auditor._open_again_at > 0


async def test_a_change_of_settings_hides_no_trigger(audits: Audits) -> None:
    triggered: list[bool] = []
    await audits.steering.look(lambda: triggered.append(True))
    await audits.repairs.trigger()

    await audits.steering.change(RepairSettingsPut(paused=True))
    await audits.steering.look(lambda: triggered.append(True))
    await audits.steering.look(lambda: triggered.append(True))

    assert triggered == [True]
