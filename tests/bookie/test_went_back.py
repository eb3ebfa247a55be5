"""A bookie gives nothing up by the rows of a database that went back (rule 18a), on real servers."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from loadtest.stores import Stores
from quorumlog.errors import DatabaseWentBack
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import Fragment, LedgerMetadata
from quorumlog.wire.witnesses import witness_of
from services.bookie.collect import Collector, MetadataRows
from services.bookie.store import Store
from services.bookie.witnesses import WitnessFile
from tests.bookie.support import KEY, add, ids_of, read, run_of, started
from tests.bookie.test_process import Process
from tests.metadata.restores import dump, restore
from tests.metadata.support import DRAFT, PATIENT_S, Service, is_ready, serving
from tests.support.waiting import turns, until

ELSEWHERE: Final = (Fragment(0, ("b2@1", "b3@1", "b4@1")),)
TOKEN: Final = "00000000-0000-4000-8000-000000000000"


async def moved_here(client: MetadataClient, row: LedgerMetadata) -> LedgerMetadata:
    """A drain gives this bookie the place of another."""
    status, now = await client.cas(row.with_member_replaced(0, "b2@1", "b1@1"))
    assert status is CasStatus.OK
    assert now is not None
    return now


async def closed_elsewhere(client: MetadataClient) -> LedgerMetadata:
    """A CLOSED ledger of which this bookie is no member."""
    row = await client.create(replace(DRAFT, ledger_key=KEY, fragments=ELSEWHERE))
    _, closed = await client.cas(row.closed(last_entry=3, length=4))
    assert closed is not None
    return closed


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
        self.collector = Collector(self.store, self.rows, cluster_id, grace_s=0.0)
        return self

    async def collects(self) -> None:
        """Looks enough that what looks needless is gone."""
        for _ in range(3):
            await self.collector.round()


async def gives_nothing_up(stores: Stores, root: Path) -> None:
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
            assert await life.rows.read(row.ledger_id) == (CasStatus.UNKNOWN, None)
            await life.collector.deletion_announced(row.ledger_id)
            assert ids_of(await read(life.store, row.ledger_id, 0, 3)) == [0, 1, 2, 3]

            await restore(stores, new)
            await until(lambda: is_ready(service), "the newest dump is back")
            await life.collects()
            assert ids_of(await read(life.store, row.ledger_id, 0, 3)) == [0, 1, 2, 3]
            await service.client.delete(row.ledger_id, version=now.version)
            await life.collects()
            assert life.store.row(row.ledger_id) is None
        finally:
            await life.store.stop()


async def test_a_restored_row_that_does_not_name_this_bookie_drops_no_copy(
    stores: Stores, root: Path
) -> None:
    await gives_nothing_up(stores, root)


async def test_a_process_running_during_a_restore_postpones_collection(
    stores: Stores, root: Path
) -> None:
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


def test_damaged_lines_of_the_witness_file_are_ignored(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
