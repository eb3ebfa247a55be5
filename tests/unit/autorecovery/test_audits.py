"""Audits: who counts as gone, what is queued, and the pace of copies."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.errors import RecoveryBlocked
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.timers import Tasks
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import Writer
from quorumlog.wire.bodies import BookieInfo, BookieList
from quorumlog.wire.repair_bodies import RepairSettingsPut
from services.autorecovery import auditor as auditor_module
from services.autorecovery.auditor import Auditor
from services.autorecovery.checker import Checker
from services.autorecovery.config import Config
from services.autorecovery.findings import KnownLosses
from services.autorecovery.steering import PacedBookies, Steering
from services.autorecovery.writers import WriterPresence, Writers
from tests.support.waiting import turns, until
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, swapped
from tests.unit.metadata.support import serving as metadata
from tests.unit.metadata.test_went_back import cookie
from tests.unit.protocol.hands import run_of

DRAINS = {"drain-waits", "drained"}
"""Events of the log about drains."""


class Reported(MetadataClient):
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
    metadata: Reported
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
    client = Reported([service.url], service.session, deadline_s=PATIENT_S, try_s=PATIENT_S)
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
    return auditor._refused.since[ledger_id], auditor._lost.since["b1@1"]


def blind(auditor: Auditor) -> tuple[float | None, float | None]:
    """Since when it could not look at writers and at bookies."""
    return auditor._refused.unobserved_since, auditor._lost.unobserved_since


@pytest.mark.parametrize(
    "seen",
    [{"stale": True}, {"liveness_age_s": 1.0}],
    ids=["stale", "liveness-is-young"],
)
async def test_an_auditor_knows_its_blind_periods(audits: Audits, seen: dict[str, Any]) -> None:
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
        await turns()

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


async def test_a_writer_is_probed_again(audits: Audits, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_trigger_during_an_audit_starts_another_audit_after_it(audits: Audits) -> None:
    audits.metadata.bookie_list = liveness("lost", "lost", "draining", "writable", "writable")
    audits.metadata.listed = audits.auditor.trigger
    await audits.auditor.audit()
    lists = audits.metadata.lists
    assert lists == 3
    audits.metadata.listed = lambda: None

    await audits.auditor.audit()
    assert audits.metadata.lists == 2 * lists
    assert audits.auditor._open_check_due_at > 0


async def test_a_draining_bookie_that_is_gone_when_it_is_asked_about_ends_no_audit(
    audits: Audits, caplog: pytest.LogCaptureFixture
) -> None:
    """b1 has no cookie any more, since the database was restored meanwhile; b4 was retired; b2 has to wait."""
    caplog.set_level("INFO", logger="services.autorecovery.auditor")
    for name in ("b2", "b4"):
        again = (await cookie(audits.metadata)).model_copy(update={"incarnation": 2})
        await audits.metadata.put_cookie(name, again, version=None)
    await audits.metadata.retire("b4")
    audits.metadata.bookie_list = liveness("draining", "draining", "writable", "draining")

    await audits.auditor.audit()

    reported = {r.__dict__["bookie"]: r.msg for r in caplog.records if r.msg in DRAINS}
    assert reported == {"b2@1": "drain-waits", "b4@1": "drained"}
    assert audits.auditor._open_check_due_at > 0, "the open ledgers were looked at"


async def test_the_check_queues_repairs_without_last_step(audits: Audits, service: Service) -> None:
    """Rule 20b: as after a restore, or a rebuild. Nobody else would let go of the former member."""
    client = audits.metadata
    row = await client.get(audits.ledger_id)
    grown = await swapped(client, row.with_ensemble(3, ("b1@1", "b2@1", "b4@1")))
    await client.cas(grown.with_member_replaced(0, "b3@1", "b9@1"))
    directory = Directory(client.bookies)
    losses = KnownLosses(HoldingsClient(directory, service.session))
    no_ports: Any = None
    checker = Checker(
        audits.auditor._config,
        client,
        audits.repairs,
        directory,
        service.session,
        losses,
        no_ports,
    )

    await checker.verify(audits.ledger_id, queue=False)
    assert (await audits.repairs.list(after=None, limit=10))[0] == ()
    await checker.verify(audits.ledger_id, queue=True)

    (item,) = (await audits.repairs.list(after=None, limit=10))[0]
    assert (item.member, item.ranges) == ("b9@1", ((0, 2),))


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

    monkeypatch.setattr(auditor_module, "recover", blocked)
    monkeypatch.setattr(auditor._writers, "presence_of", gone)
    for ledger_id in (audits.ledger_id, other):
        await auditor._recover(ledger_id, is_silence_enough=False)
    assert (list(auditor.blocked), auditor.blocked_ledgers) == (
        [audits.ledger_id],
        {audits.ledger_id, other},
    )

    row = await client.get(audits.ledger_id)
    recovering = await swapped(client, row.in_recovery())
    await client.cas(recovering.closed(last_entry=-1, length=0))
    auditor.trigger()
    await auditor.audit()

    assert (auditor.blocked, auditor.blocked_ledgers) == ({}, {other})


RUN = run_of(b"x" * 1000)


class Written:
    """Bookies that take everything at once; remembers when."""

    fence = read_lac = read = keep_row = None
    """Handed on, and called by no test."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def add(self, _member: str, _key: bytes, _run: Any, done: Any, **_kind: bool) -> None:
        self.at.append(asyncio.get_running_loop().time())
        done(Status.OK)


async def test_in_any_interval_at_most_the_limit_and_one_run_are_sent() -> None:
    written = Written()
    pace = PacedBookies(written)  # type: ignore[arg-type]
    rate = pace.bytes_per_s = 40 * len(RUN.body)
    task = asyncio.create_task(pace.run())
    for _ in range(20):
        pace.add("b@1", b"", RUN, lambda _status: None, recovery=True)
    await until(lambda: len(written.at) == 20, "all are handed over")
    task.cancel()

    for first, begun in enumerate(written.at):
        for count, ended in enumerate(written.at[first:], 1):
            assert (count - 1) * len(RUN.body) <= rate * (ended - begun) * 1.001 + 1
    assert pace.copied_bytes == 20 * len(RUN.body)


async def test_a_pause_holds_back_all_adds_until_it_ends() -> None:
    written = Written()
    pace = PacedBookies(written)  # type: ignore[arg-type]
    pace.is_paused = True
    task = asyncio.create_task(pace.run())
    pace.add("b@1", b"", RUN, lambda _status: None, recovery=True)
    await turns(50)
    assert not written.at

    pace.is_paused = False
    await until(lambda: len(written.at) == 1, "it is handed over")
    task.cancel()
