"""A bookie gives nothing up by the rows of a database that went back (rules 18a and 18c), on real servers."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from typer.testing import CliRunner

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.cli.commands import app as cli
from quorumlog.errors import DatabaseWentBack
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, Repair
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Run
from quorumlog.protocol.row_copy import name_of
from quorumlog.wire.bodies import witness_of
from quorumlog.wire.row_copies import encode
from services.bookie.collect import Collector, MetadataRows
from services.bookie.store import Store
from services.bookie.witnesses import FreshCopies, WitnessFile
from tests.support.waiting import turns, until
from tests.unit.bookie.support import KEY, add, ids_of, keep_row, read, run_of, started
from tests.unit.bookie.test_process import PATIENT, Process
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import (
    DRAFT,
    PATIENT_S,
    Service,
    await_bookies,
    is_ready,
    serving,
    swapped,
)

ELSEWHERE: Final = (Fragment(0, ("b2@1", "b3@1", "b4@1")),)
TOKEN: Final = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    await_bookies(monkeypatch)


async def moved_here(client: MetadataClient, row: LedgerMetadata) -> LedgerMetadata:
    """A drain gives this bookie the place of another."""
    return await changed(client, row.with_member_replaced(0, "b2@1", "b1@1"))


async def changed(client: MetadataClient, row: LedgerMetadata) -> LedgerMetadata:
    """The row, changed."""
    return await swapped(client, row)


async def closed_elsewhere(client: MetadataClient) -> LedgerMetadata:
    """A CLOSED ledger of which this bookie is no member."""
    row = await client.create(replace(DRAFT, ledger_key=KEY, fragments=ELSEWHERE))
    return await swapped(client, row.closed(last_entry=3, length=4))


class Life:
    """A bookie's collector, from one start to the next, as services/bookie/runtime.py builds it."""

    def __init__(self, directory: Path, service: Service) -> None:
        self.client = MetadataClient([service.url], service.session, deadline_s=PATIENT_S)
        self.file = WitnessFile(directory)
        self.store: Store = started(directory)
        self.rows = MetadataRows(self.client, self.file.keep)

    async def begin(self) -> "Life":
        cluster_id = await self.client.cluster_id()
        self.client.witnesses = self.file.load(cluster_id)
        self.rows.present(self.store.holdings.fresh, "b1", cluster_id)
        self.collector = Collector(self.store, self.rows, cluster_id, grace_s=0.0)
        return self

    async def collects(self) -> None:
        """Looks enough that what looks needless is gone."""
        for _ in range(3):
            await self.collector.round()


async def test_a_restored_row_without_this_bookie_drops_no_copy(stores: Stores, root: Path) -> None:
    """D1: moved here after the dump; both the metadata service and the bookie start anew since."""
    async with serving(stores) as service:
        row = await closed_elsewhere(service.client)
        old = await dump(stores, root / "old")
        now = await moved_here(service.client, row)
        life = await Life(root / "d", service).begin()
        await add(life.store, run_of(row.ledger_id, range(4)))
        await life.collects()
        new = await dump(stores, root / "new")
    await life.store.stop()
    await restore(stores, old)

    async with serving(stores) as service:
        life = await Life(root / "d", service).begin()
        try:
            with pytest.raises(DatabaseWentBack):
                await life.collects()
            # Nor where the looks themselves are not kept from it.
            assert await life.rows.read({row.ledger_id: ()}) == {}
            await life.collector.deletions_announced([row.ledger_id])
            assert ids_of(await read(life.store, row.ledger_id, 0, 3)) == [0, 1, 2, 3]

            await restore(stores, new)
            await until(lambda: is_ready(service), "the newest dump is back")
            await life.collects()
            assert ids_of(await read(life.store, row.ledger_id, 0, 3)) == [0, 1, 2, 3]
            await service.client.delete(row.ledger_id, version=now.version)
            await life.collects()
            assert life.store.holdings.row(row.ledger_id) is None
        finally:
            await life.store.stop()


async def test_a_restore_under_a_process_postpones_collection(stores: Stores, root: Path) -> None:
    async with serving(stores) as service, aiohttp.ClientSession() as session:
        row = await closed_elsewhere(service.client)
        old = await dump(stores, root / "old")
        bookie = Process(service, root, session)
        try:
            bookie.start(COLLECT_S="0.05", COLLECT_GRACE_S="0.01", HEARTBEAT_S="0.1")
            await bookie.ready()
            await moved_here(service.client, row)
            kept = bookie.data / "witnesses"

            async def has_heard() -> bool:
                return kept.exists() and set(service.client.witnesses) <= set(
                    kept.read_text().split()
                )

            await until(has_heard, "the bookie keeps the witness of the move")

            await restore(stores, old)

            await until(
                lambda: bookie.log.read_text().count("database-not-confirmed") > 2, "it is told"
            )
            await until(lambda: "collect-put-off" in bookie.log.read_text(), "looks are put off")
            assert "ledger-dropped" not in bookie.log.read_text()

            # Started anew it waits for the database that it knows.
            await bookie.kill()
            bookie.log.write_text("")
            bookie.start()
            await until(lambda: "lacks" in bookie.log.read_text(), "it says why it waits")
        finally:
            await bookie.kill()


@dataclass(frozen=True)
class Moved:
    """D1: a CLOSED ledger that moved here after the dump, of which the bookie's disk alone knows."""

    row: LedgerMetadata
    old: Path
    new: Path


async def moved_and_forgotten(stores: Stores, root: Path) -> Moved:
    """The bookie has the entries and a copy of the row, and was stopped before it confirmed anything. The older
    database is in place, and nobody has told anybody yet.
    """
    async with serving(stores) as service:
        row = await closed_elsewhere(service.client)
        old = await dump(stores, root / "old")
        now = await moved_here(service.client, row)
        life = await Life(root / "d", service).begin()
        await add(life.store, run_of(row.ledger_id, range(4)), recovery=True)
        await keep_row(life.store, row.ledger_id, name_of(now))
        new = await dump(stores, root / "new")
    await life.store.stop()
    await restore(stores, old)
    assert not (root / "d" / "witnesses").exists()
    return Moved(now, old, new)


async def test_a_bookies_copy_reveals_what_the_database_lacks(stores: Stores, root: Path) -> None:
    """Its first exchange of witnesses makes known that the database went back."""
    moved = await moved_and_forgotten(stores, root)
    async with serving(stores) as service:
        life = await Life(root / "d", service).begin()
        try:
            with pytest.raises(DatabaseWentBack):
                await life.rows.confirm()
            with pytest.raises(DatabaseWentBack):
                await service.client.create(DRAFT)
            await restore(stores, moved.new)
            await accept_all(service)  # the mark that the older database took
            await life.collects()
            assert not life.store.holdings.fresh.newest(1), "witnesses stand for it from now on"
            assert life.file.load(await service.client.cluster_id())
        finally:
            await life.store.stop()


async def test_a_copy_reveals_the_lost_place_of_a_ledger(stores: Stores, root: Path) -> None:
    """The older database has the ledger, and lacks the change of the log that placed it: the row got no version by that
    (rule 18f). A takeover by such a log would give the offsets of acknowledged records to others.
    """
    async with serving(stores) as service:
        logs = LogClient(service.client)
        log, _ = await logs.create(LogMetadata("events", LogSettings(DRAFT.quorum)))
        row = await service.client.create(replace(DRAFT, ledger_key=KEY, log=log.name))
        old = await dump(stores, root / "old")
        is_done, log = await logs.cas(replace(log, items=(LogItem(row.ledger_id, 0),)))
        assert is_done
        placed = replace(row, first_offset=0, lineage=log.lineages({row.ledger_id})[row.ledger_id])
        assert await service.client.get(row.ledger_id) == placed, (
            "the copy's name is that of before"
        )
        life = await Life(root / "d", service).begin()
        await keep_row(life.store, row.ledger_id, name_of(placed), encode(placed))
        new = await dump(stores, root / "new")
    await life.store.stop()
    await restore(stores, old)
    assert not (root / "d" / "witnesses").exists()

    async with serving(stores) as service:
        life = await Life(root / "d", service).begin()
        logs = LogClient(service.client)
        try:
            with pytest.raises(DatabaseWentBack):
                await life.rows.confirm()
            with pytest.raises(DatabaseWentBack):
                await logs.cas((await logs.get("events")).closed())
            await restore(stores, new)
            await accept_all(service)  # the mark that the older database took
            await life.rows.confirm()
            assert not life.store.holdings.fresh.newest(1)
        finally:
            await life.store.stop()


async def test_a_bookie_keeps_ledgers_with_newer_copies(stores: Stores, root: Path) -> None:
    """Even where nobody presents it: the looks name it."""
    moved = await moved_and_forgotten(stores, root)
    ledger_id = moved.row.ledger_id
    async with serving(stores) as service:
        life = await Life(root / "d", service).begin()
        life.rows.present(FreshCopies(), "b1", await service.client.cluster_id())
        try:
            for _ in range(3):
                await life.collector.deletions_announced([ledger_id])
                await life.collector.recheck()
            assert ids_of(await read(life.store, ledger_id, 0, 3)) == [0, 1, 2, 3]
            with pytest.raises(DatabaseWentBack):
                await service.client.create(DRAFT)
        finally:
            await life.store.stop()


async def test_after_an_accepted_loss_lost_members_drop_nothing(stores: Stores, root: Path) -> None:
    """D1 with acceptance: the cluster goes on, and what the lost history named stays."""
    moved = await moved_and_forgotten(stores, root)
    ledger_id = moved.row.ledger_id
    async with serving(stores) as service:
        life = await Life(root / "d", service).begin()
        try:
            with pytest.raises(DatabaseWentBack):
                await life.rows.confirm()
            await accept_all(service)
            await service.client.create(DRAFT)

            await life.collects()
            await life.collects()

            assert ids_of(await read(life.store, ledger_id, 0, 3)) == [0, 1, 2, 3]
            assert life.rows.kept == {ledger_id}
            attempt = moved.row.attempt
            first = {"ledger_id": ledger_id, "holders": ["b1"], "attempts": [attempt]}
            assert await kept(service) == {"count": 1, "ledgers": [first]}
            # A tombstone of the new history is none of what the copy is of.
            row = await service.client.get(ledger_id)
            await service.client.delete(ledger_id, version=row.version)
            await life.collects()
            assert ids_of(await read(life.store, ledger_id, 0, 3)) == [0, 1, 2, 3]

            await restore(stores, moved.new)
            await until(lambda: is_reported(service), "the changes since are lost now")
            await accept_all(service)
            await life.collects()
            assert ids_of(await read(life.store, ledger_id, 0, 3)) == [0, 1, 2, 3]
            assert not life.rows.kept
            assert (await kept(service))["count"] == 0
        finally:
            await life.store.stop()


async def is_reported(service: Service) -> bool:
    """Whether `ready` says that the database went back."""
    return not await is_ready(service)


async def accept_missing(service: Service, lost: Sequence[str] = ()) -> bool:
    """Whether an operator has nothing to accept. `lost`: bookies of which the operator thinks that they never return."""
    _, state = await service.send("GET", "/v1/witnesses")
    missing = [missing["witness"] for missing in state["missing"]]
    if missing:
        accept = {"witnesses": missing, "lost": lost}
        await service.send("POST", "/v1/witnesses/accept", accept)
    return not missing


async def accept_all(service: Service) -> None:
    """As an operator does, until nobody presents more."""

    async def is_over() -> bool:
        return await accept_missing(service) and await is_ready(service)

    await until(is_over, "the loss is accepted")


async def kept(service: Service) -> Any:
    """The ledgers that bookies keep, as the metadata service lists them."""
    return (await service.send("GET", "/v1/kept-ledgers"))[1]


class Pair:
    """The bookies b1 and b2, each a process, and a client of both."""

    def __init__(self, service: Service, root: Path, session: aiohttp.ClientSession) -> None:
        self.processes = []
        for name in ("b1", "b2"):
            (root / name).mkdir(parents=True)
            self.processes.append(Process(service, root / name, session, name))
        urls = {process.settings["BOOKIE_NAME"]: process.url for process in self.processes}
        self.client = BookieClient(lambda name: urls[name], session, PATIENT)

    def start(self, metadata_url: str, **settings: str) -> None:
        for process in self.processes:
            process.start(METADATA_URLS=metadata_url, **settings)

    async def witnesses(self) -> str:
        """What one of them tells a metadata process that starts."""
        process = self.processes[0]
        async with process.session.get(f"{process.url}/v1/witnesses") as answer:
            return await answer.text()

    async def are_ready(self) -> bool:
        async def is_up(process: Process) -> bool:
            async with process.session.get(f"{process.url}/health/ready") as answer:
                return answer.status == 200

        return all([await is_up(process) for process in self.processes])

    async def kill(self) -> None:
        for process in self.processes:
            if process.process is not None and process.process.poll() is None:
                await process.kill()

    def reported(self, event: str) -> int:
        """How many of them have logged it."""
        return sum(f'"{event}"' in process.log.read_text() for process in self.processes)

    @property
    def witness_files(self) -> list[Path]:
        return [process.data / "witnesses" for process in self.processes]

    async def move_here(self, client: MetadataClient, row: LedgerMetadata) -> dict[str, str]:
        """Drain b3 and b4, as repairs do (rules 20 and 20b); the attempt of the copy that each bookie has then."""
        copies = {}
        run = run_of(row.ledger_id, range(4))
        for old, new in (("b3@1", "b1@1"), ("b4@1", "b2@1")):
            row = await changed(client, row.with_repair(Repair(0, old, new)))
            await ok(partial(self.client.add, new, KEY, run, recovery=True))
            row = await changed(client, row.with_member_replaced(0, old, new))
            await ok(partial(self.client.keep_row, new, KEY, row))
            copies[new] = row.attempt
            row = await changed(client, row.with_leaving_released(0, new))
        return copies

    async def have_all(self, ledger_id: int) -> bool:
        """Whether both give all entries."""
        found = []
        for member in ("b1@1", "b2@1"):
            answered: asyncio.Future[Run | None] = asyncio.get_running_loop().create_future()

            def done(_status: Status, run: Run | None, _absent: object, to: Any = answered) -> None:
                to.set_result(run)

            self.client.read(member, ledger_id, 0, 3, done, bytes_max=1 << 20)
            run = await answered
            found.append([] if run is None else list(run.ids))
        return found == [[0, 1, 2, 3]] * 2


async def ok(send: Callable[..., None]) -> None:
    """Have something stored."""
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    send(done=answered.set_result)
    assert await answered is Status.OK


QUIET: Final = {"HEARTBEAT_S": "60", "COLLECT_S": "3600"}
"""Such a process seldom confirms, and collects nothing."""
EAGER: Final = {"HEARTBEAT_S": "0.1", "COLLECT_S": "0.05", "COLLECT_GRACE_S": "0.01"}


async def questions(service: Service) -> float:
    """How often bookies asked whether ledgers may go."""
    async with service.session.get(f"{service.url}/metrics") as response:
        text = await response.text()
    found = re.search(
        r'_requests_total{method="POST",route="/v1/ledger-proofs",status="200"} (.+)', text
    )
    return float(found[1]) if found else 0.0


async def witnesses(service: Service, *options: str) -> Any:
    """What the command says."""
    command = ["cluster", "witnesses", "--metadata", service.url, *options]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


async def drained(
    stores: Stores, root: Path, session: aiohttp.ClientSession
) -> tuple[Pair, LedgerMetadata, dict[str, str], Path]:
    """Bookies that were killed when drains had just given them a ledger's entries, the ledger, the attempts of their copies
    of its row, and the newest dump. The database from before the drains is in place, and their witnesses are of that time.
    """
    quorum, fragments = Quorum(2, 2, 2), (Fragment(0, ("b3@1", "b4@1")),)
    draft = replace(DRAFT, ledger_key=KEY, quorum=quorum, fragments=fragments)
    async with serving(stores) as service:
        pair = Pair(service, root / "bookies", session)
        try:
            pair.start(service.url, **QUIET)
            await until(pair.are_ready, "both serve", passing=(aiohttp.ClientError,))
            files = pair.witness_files
            await until(lambda: all(file.exists() for file in files), "both confirm")
            row = await service.client.create(draft)
            closed = await swapped(service.client, row.closed(last_entry=3, length=4))
            old = await dump(stores, root / "old")
            texts = [file.read_text() for file in files]
            copies = await pair.move_here(service.client, closed)
            new = await dump(stores, root / "new")
        finally:
            await pair.kill()
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    await restore(stores, old)
    return pair, closed, copies, new


async def test_a_starting_metadata_process_hears_of_held_copies(stores: Stores, root: Path) -> None:
    async with aiohttp.ClientSession() as session:
        pair, _, copies, _ = await drained(stores, root, session)
        (port,) = free_ports(1)
        pair.start(f"http://127.0.0.1:{port}", **QUIET)
        try:

            async def is_known() -> bool:
                return copies["b1@1"] in await pair.witnesses()

            await until(is_known, "a bookie tells of it", passing=(aiohttp.ClientError,))
            async with serving(stores, port=port, wait=False) as service:
                with pytest.raises(DatabaseWentBack):
                    await service.client.create(DRAFT)
        finally:
            await pair.kill()
            await pair.client.close()


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_drained_copies_survive_a_restore_that_no_living_process_knows_of(
    stores: Stores, root: Path, *, is_accepted: bool
) -> None:
    """D1: moved by drains from b3 and b4 to b1 and b2 since the dump, and everything was started anew."""
    async with aiohttp.ClientSession() as session:
        pair, row, copies, new = await drained(stores, root, session)
        try:
            async with serving(stores) as service:
                pair.start(service.url, **EAGER)
                await until(lambda: is_reported(service), "a copy tells it")
                if is_accepted:

                    async def are_missing() -> bool:
                        _, state = await service.send("GET", "/v1/witnesses")
                        return all(attempt in str(state["missing"]) for attempt in copies.values())

                    await until(are_missing, "both tell of their copies")
                    # While they answer, a rebuild comes first (rule 18d): they are away, and come back against all hope.
                    await pair.kill()
                    await until(
                        lambda: accept_missing(service, ["b1", "b2"]), "an operator gives them up"
                    )
                    pair.start(service.url, **EAGER)
                    await until(
                        lambda: pair.reported("ledger-kept") == 2, "both say what they keep"
                    )
                    seen = await questions(service)

                    async def are_asking() -> bool:
                        return await questions(service) > seen + 10

                    await until(are_asking, "they ask again and again")
                    assert await pair.have_all(row.ledger_id)
                    listed = await witnesses(service, "--json")
                    assert listed.exit_code == 1
                    found = json.loads(listed.stdout)
                    assert (found["missing"], found["kept_count"]) == ([], 1)
                    (ledger,) = found["kept_ledgers"]
                    assert (ledger["ledger_id"], ledger["holders"]) == (row.ledger_id, ["b1", "b2"])
                    assert "b1, b2" in (await witnesses(service)).stdout
                else:
                    # The other one may still wait for the database that its cookie is of.
                    await until(lambda: pair.reported("collect-put-off") > 0, "looks are put off")
                assert not pair.reported("ledger-dropped")
                await pair.kill()
            await restore(stores, new)
            async with serving(stores) as service:
                pair.start(service.url, **QUIET)

                async def are_back() -> bool:
                    await accept_missing(service)  # changes that the older database took
                    return await pair.are_ready() and await pair.have_all(row.ledger_id)

                await until(are_back, "everything reads", passing=(aiohttp.ClientError,))
        finally:
            await pair.kill()
            await pair.client.close()


def test_damaged_witness_lines_are_ignored(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.mkdir(exist_ok=True)
    file = WitnessFile(root)
    assert file.load("cluster") == ()
    sound = witness_of("cluster", TOKEN)

    file.keep((sound, witness_of("another", TOKEN), sound[:-1] + "x"))

    assert file.load("cluster") == (sound,)
    assert [record.message for record in caplog.records] == ["witnesses-damaged"]
    shutil.rmtree(root)


class _News:
    """A metadata service that answers each exchange with other witnesses."""

    def __init__(self) -> None:
        self.witnesses: tuple[str, ...] = ()

    async def confirm(self) -> None:
        await turns()
        self.witnesses = (f"{len(self.witnesses)}", *self.witnesses)


async def test_witnesses_stored_concurrently_are_stored_whole(tmp_path: Path) -> None:
    client: Any = _News()
    rows = MetadataRows(client, WitnessFile(tmp_path).keep)

    await asyncio.gather(*[rows.confirm() for _ in range(50)])

    assert (tmp_path / "witnesses").read_text().split() == list(client.witnesses)
