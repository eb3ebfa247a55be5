"""A database is rebuilt from the bookies' copies, also an empty one (rule 18d). The bookies run in this process."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest
from typer.testing import CliRunner

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from quorumlog.cli.clusters import new_key
from quorumlog.cli.commands import app as cli
from quorumlog.cli.output import ExitStatus
from quorumlog.errors import NoSuchLedger
from quorumlog.net.connections import ListenLimits
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.listen import listening
from quorumlog.protocol.access_key import sealed
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.metadata import Deletion, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Action, Decision, Held
from quorumlog.protocol.rebuild import Bookies as AnsweringBookies
from quorumlog.protocol.replica import RowReported, Verdict
from quorumlog.protocol.row_copy import RowCopy, name_of
from quorumlog.wire import row_copies
from quorumlog.wire.bodies import token_of
from quorumlog.wire.rebuild_bodies import RebuildAsk, RebuildReport
from services.bookie.app import build
from services.bookie.config import Config
from services.bookie.handlers import BOOKIE
from services.bookie.runtime import BookieRuntime
from services.metadata import rebuild as rebuild_module
from services.metadata.database import Database
from services.metadata.rebuild_store import Judged, RebuildStore
from tests.support.database import connected, sql
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, serving, swapped

NAMES = ("b1", "b2", "b3")
KEY = DRAFT.ledger_key


@dataclass(slots=True)
class Bookies:
    """Three bookies that keep their directories and ports."""

    folder: Path
    ports: list[int]
    may_end: bool = False
    """Whether bookies may refuse to start."""
    ended: list[str] = field(default_factory=list)
    """What the bookie that was started last said when it ended."""

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @contextlib.asynccontextmanager
    async def running(
        self, service: Service, names: tuple[str, ...] = NAMES, **settings: str
    ) -> AsyncIterator[dict[str, BookieRuntime]]:
        async with contextlib.AsyncExitStack() as stack:
            found = {}
            for name, port in zip(NAMES, self.ports, strict=True):
                if name in names:
                    found[name] = await stack.enter_async_context(
                        self._running(service, name, port, settings)
                    )
            yield found

    @contextlib.asynccontextmanager
    async def _running(
        self, service: Service, name: str, port: int, settings: dict[str, str]
    ) -> AsyncIterator[BookieRuntime]:
        config = Config.read(
            {
                "BOOKIE_NAME": name,
                "DATA_DIR": str(self.folder / name),
                "METADATA_URLS": service.url,
                "PORT": str(port),
                "SEGMENT_BYTES": str(1 << 20),
                "READ_ONLY_BELOW_BYTES": "0",
                "RESERVE_BYTES": "4096",
                **settings,
            }
        )
        ended = self.ended = []
        app = build(config, end=lambda _status, message: ended.append(message))
        limits = ListenLimits(drain_timeout_s=1.0)
        async with listening(app, host=config.host, port=port, limits=limits):
            yield app[BOOKIE]
        assert not ended or self.may_end


@pytest.fixture
def bookies() -> Any:
    with scratch("ql-rebuild-") as folder:
        yield Bookies(folder, list(free_ports(len(NAMES))))


async def until_ready(bookie: BookieRuntime) -> None:
    await until(lambda: bookie.store is not None and bookie.is_registered, "the bookie is ready")


async def until_all_ready(running: dict[str, BookieRuntime]) -> None:
    """A bookie that a ledger names before it has registered refuses to start: create ledgers after this."""
    for bookie in running.values():
        await until_ready(bookie)


async def until_replayed(bookie: BookieRuntime) -> None:
    await until(lambda: bookie.replayed_store is not None, "the bookie tells its rows")


async def keep(bookie: BookieRuntime, *rows: LedgerMetadata) -> None:
    """The bookie keeps copies of these rows."""
    store = bookie.store
    assert store is not None
    for row in rows:
        answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        copy = RowCopy(name_of(row), row_copies.encode(row))
        store.ask(row.ledger_id, RowReported(store.me, copy, row.ledger_key), answered.set_result)
        await answered


def forget(bookie: BookieRuntime, ledger_id: int) -> None:
    """The bookie keeps the id as a deleted ledger's."""
    assert bookie.store is not None
    bookie.store.drop(ledger_id, keep_stub=False)


async def lose_database(stores: Stores) -> None:
    """What is left is an empty database."""
    await sql(stores, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@contextlib.asynccontextmanager
async def lost_after(
    stores: Stores, bookies: Bookies, names: tuple[str, ...] = ("b1",)
) -> AsyncIterator[tuple[Service, dict[str, BookieRuntime]]]:
    """Bookies that are ready. At the end of the block they stop, and the database is lost."""
    async with serving(stores) as service, bookies.running(service, names) as running:
        await until_all_ready(running)
        yield service, running
    await lose_database(stores)


async def rebuild(service: Service, **ask: Any) -> tuple[RebuildReport | None, str]:
    """The report, or the error."""
    body = RebuildAsk(**ask).model_dump_json()
    async with service.session.post(
        f"{service.url}/v1/rebuild", data=body, headers={"Content-Type": "application/json"}
    ) as answer:
        lines = [orjson.loads(line) async for line in answer.content]
    assert lines, "an end is told"
    last = lines[-1]
    if "error" in last:
        return None, last["error"]
    return RebuildReport.model_validate_json(orjson.dumps(last["report"])), ""


async def create(service: Service, **changes: Any) -> LedgerMetadata:
    return await service.client.create(replace(DRAFT, **changes))


async def closed(service: Service, row: LedgerMetadata, last: int = 4) -> LedgerMetadata:
    return await swapped(service.client, row.closed(last_entry=last, length=50))


async def test_a_bookie_tells_of_changes_it_dropped(stores: Stores, bookies: Bookies) -> None:
    """It tells metadata of them later, so that a rebuild which takes over accepts them too. Source: a storm, in which the
    cluster was stopped once more after the rebuild had accepted what the bookies' files of witnesses had.
    """
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        bookie = running["b1"]
        await until_ready(bookie)
        cluster_id = await service.client.cluster_id()
        row = await create(service)
        gone = replace(row, attempt=str(uuid4()))
        await keep(bookie, gone)
        forget(bookie, row.ledger_id)

        reported = []
        for after in (-1, 0):
            url = f"{bookies.urls[0]}/v1/rows?after={after}"
            async with service.session.get(url) as answer:
                reported.append((await answer.json())["witnesses"])

    assert gone.attempt in {token_of(cluster_id, witness) for witness in reported[0]}
    assert reported[1] == []


async def test_an_empty_database_gets_every_proven_row(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies, ("b1", "b2", "b3")) as (service, running):
        cluster_id = await service.client.cluster_id()
        opened, deleted = await create(service), await create(service)
        ended = await closed(service, first := await create(service))
        await keep(running["b1"], opened, first, deleted)
        await keep(running["b2"], opened, first, ended)
        gone = await closed(service, await create(service))
        token = await service.client.delete(gone.ledger_id, version=gone.version)
        await keep(running["b1"], gone)
        await keep(running["b2"], gone, gone.deleted(token))
        await keep(running["b3"], deleted)
        forget(running["b3"], deleted.ledger_id)

    async with serving(stores) as service, bookies.running(service) as running:
        for bookie in running.values():
            await until_replayed(bookie)
        reported, _ = await rebuild(service, bookies=tuple(bookies.urls), dry_run=True)
        refused, why = await rebuild(service, bookies=tuple(bookies.urls))
        assert not running["b1"].is_registered
        done, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        await until_all_ready(running)
        again, _ = await rebuild(service)
        rows = [await service.client.get(row.ledger_id) for row in (opened, ended)]
        for each in (deleted, gone):
            with pytest.raises(NoSuchLedger) as missing:
                await service.client.get(each.ledger_id)
            assert missing.value.members["deleted"] is True
        # The deletion is made once: this is the repeat whose answer had got lost.
        await service.client.delete(gone.ledger_id, version=gone.version, attempt=token)
        fresh = await create(service)
        served = await service.client.cluster_id()

    assert refused is None
    assert "take_over" in why
    assert reported is not None
    assert done is not None
    assert reported.ledgers == done.ledgers == {"write": 2, "tombstone": 2}
    assert (done.cluster_id, served) == (cluster_id, cluster_id)
    assert done.open_ledgers == 1
    assert done.cookies == NAMES
    assert rows == [opened, ended], "the very rows, keys, versions and tokens included"
    assert fresh.ledger_id > max(row.ledger_id for row in (opened, ended, deleted))
    assert again is not None
    assert again.ledgers == {"same": 4}
    assert again.cookies == ()


async def test_a_row_that_went_back_is_restored_or_told(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service) as running:
        await until_all_ready(running)
        bookie = running["b1"]
        moved, forked = await create(service), await create(service)
        later = await swapped(service.client, moved.with_ensemble(3, ("b4@1", "b2@1", "b3@1")))
        ended = await closed(service, later)
        await keep(bookie, moved, later, ended, forked)
        other = replace(forked, version=2, attempt="00000000-0000-4000-8000-000000000001")
        await keep(bookie, other.closed(last_entry=9, length=90))
        mine = await closed(service, forked)
        async with connected(stores) as connection:
            await connection.execute(
                "UPDATE ledgers SET version = 1, attempt = $2, body = body || $3::text::jsonb"
                " WHERE ledger_id = $1",
                moved.ledger_id,
                moved.attempt,
                orjson.dumps({"state": "OPEN", "last_entry": None, "length": None}).decode(),
            )
            await connection.execute(
                "DELETE FROM attempts WHERE attempt = ANY($1::uuid[])",
                [later.attempt, ended.attempt],
            )
            await connection.execute(
                "INSERT INTO kept_ledgers (ledger_id, attempt, holder) VALUES ($1, $2, 'b1')",
                moved.ledger_id,
                later.attempt,
            )

            report, _ = await rebuild(service, without=("b2", "b3", "b4"))
            left = await connection.fetchval("SELECT count(*) FROM kept_ledgers")
        kept = await service.client.get(forked.ledger_id)

        assert report is not None
        assert report.ledgers == {"write": 1, "conflict": 1}
        assert [found.ledger_id for found in report.findings] == [forked.ledger_id]
        assert "different last entries: 4, 9" in report.findings[0].why
        assert await service.client.get(moved.ledger_id) == ended
        assert kept == mine
        assert left == 0, "nobody keeps it any more for a change that the database has"
        assert moved.ledger_id in await service.client.ledgers_naming("b4")


async def test_an_open_row_waits_for_silent_bookies(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        opened = await create(service)
        await keep(running["b1"], opened)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_replayed(running["b1"])
        waits, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        given_up, _ = await rebuild(service, without=("b3",))
        row = await service.client.get(opened.ledger_id)

    assert waits is not None
    assert (waits.ledgers, waits.silent) == ({"wait": 1}, ("b2", "b3"))
    assert given_up is not None
    assert given_up.ledgers == {"write": 1}
    assert row == opened


async def test_a_bookie_that_was_away_brings_rows_later(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies, ("b1", "b2")) as (service, running):
        ended = await closed(service, await create(service))
        await keep(running["b2"], ended)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as first:
        await until_replayed(first["b1"])
        await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        await until_ready(first["b1"])
        async with bookies.running(service, ("b2",)) as late:

            async def is_announced() -> bool:
                services = (await service.client.services()).services
                return any(found.kind == "bookie" and found.id == "b2" for found in services)

            await until(is_announced, "the bookie waits")
            assert not late["b2"].is_registered
            report, _ = await rebuild(service, take_over=True)
            await until_ready(late["b2"])
            row = await service.client.get(ended.ledger_id)

    assert report is not None
    assert report.cookies == ("b2",)
    assert row == ended


async def test_a_rebuild_continues_where_it_stopped(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        rows = [await create(service) for _ in range(3)]
        await keep(running["b1"], *rows)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_replayed(running["b1"])
        report, _ = await rebuild(
            service,
            bookies=tuple(bookies.urls),
            take_over=True,
            without=("b2", "b3"),
            after=rows[-1].ledger_id,
        )
        with pytest.raises(NoSuchLedger):
            await service.client.get(rows[0].ledger_id)

    assert report is not None
    assert report.ledgers == {"write": 3}, "what is decided is told"


async def test_another_clusters_bookie_is_refused(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_ready(running["b1"])
        await sql(stores, "UPDATE cluster SET cluster_id = gen_random_uuid()")

        report, why = await rebuild(service)

    assert report is None
    assert "Only an empty database can take over a cluster" in why


async def test_one_rebuild_runs_at_a_time(service: Service, stores: Stores) -> None:
    async with connected(stores) as connection:
        await connection.execute("SELECT pg_advisory_lock($1)", 0x71756F73)

        report, why = await rebuild(service)

    assert report is None
    assert "another rebuild" in why


async def test_a_ledger_with_a_password_keeps_what_the_password_is_proven_by(
    stores: Stores, bookies: Bookies, tmp_path: Path
) -> None:
    access_key = b"s" * 16 + b"a" * 32
    async with lost_after(stores, bookies) as (service, running):
        row = await create(service, access_key=access_key)
        ended = await closed(service, row)
        await keep(running["b1"], ended)

    new_key(keys := tmp_path / "keys")
    async with (
        serving(stores, key_file=keys) as service,
        bookies.running(service, ("b1",)) as running,
    ):
        await until_replayed(running["b1"])
        report, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        found = await service.client.get(row.ledger_id)
        async with connected(stores) as connection:
            stored = await connection.fetchval("SELECT body ->> 'access_key' FROM ledgers")

    assert report is not None
    assert report.sealed_passwords == 1
    unknown = sealed(b"s" * 16, hashlib.sha256(access_key).digest())
    assert found == replace(ended, access_key=unknown)
    assert stored.startswith("sealed:"), "what is rebuilt is encrypted under the key file"


async def test_a_placeless_ledger_is_told_and_not_swept(stores: Stores, bookies: Bookies) -> None:
    async with lost_after(stores, bookies) as (service, running):
        log = LogMetadata(name="events", settings=LogSettings(quorum=Quorum(3, 3, 2)))
        await LogClient(service.client).create(log)
        ended = await closed(service, await create(service, log="events"))
        await keep(running["b1"], ended)

    async with serving(stores) as service, bookies.running(service, ("b1",)) as running:
        await until_replayed(running["b1"])
        report, _ = await rebuild(service, bookies=tuple(bookies.urls), take_over=True)
        orphans = await LogClient(service.client).orphans(older_than_s=0)

    assert report is not None
    assert report.logs == {"wait": 1}
    assert orphans == ()


async def test_a_log_deleted_in_lost_history_goes_again(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service, bookies.running(service) as running:
        await until_all_ready(running)
        logs = LogClient(service.client)
        settings = LogSettings(quorum=Quorum(3, 3, 2))
        for name in ("old", "new"):
            log, _ = await logs.create(LogMetadata(name=name, settings=settings))
            first = await create(service, log=name)
            await logs.cas(replace(log, items=(LogItem(first.ledger_id, 0),)))
            first = await service.client.get(first.ledger_id)
            await keep(running["b1"], first)
            # `new` is another log than the one that had its name, and had an earlier ledger.
            deleted = replace(first, ledger_id=first.ledger_id + (100 if name == "old" else -1))
            if name == "new":
                assert deleted.lineage is not None
                earlier = "2020-01-02T03:04:05.000001Z"
                deleted = replace(deleted, lineage=replace(deleted.lineage, log_created_at=earlier))
            tombstone = deleted.closed(last_entry=4, length=50).deleted(deletion=Deletion.WITH_LOG)
            await keep(running["b1"], tombstone)

        reported, _ = await rebuild(service, dry_run=True)
        done, _ = await rebuild(service)
        found, _ = await logs.list()

    assert reported is not None
    assert done is not None
    assert reported.logs == done.logs == {"tombstone": 1, "same": 1}
    assert [log.name for log in found] == ["new"]


async def test_the_command_tells_findings_and_its_end(stores: Stores, bookies: Bookies) -> None:
    async with serving(stores) as service:
        failed = await command(service)
        async with bookies.running(service, ("b1",)) as running:
            await until_ready(running["b1"])
            await keep(running["b1"], replace(DRAFT, ledger_id=7, attempt=str(uuid4())))
            done = await command(service)

    assert failed.exit_code == ExitStatus.UNKNOWN
    assert "no bookie responds" in failed.stderr
    assert done.exit_code == 0
    assert "silent: b2, b3" in done.stdout
    assert "ledgers (done): 1 wait" in done.stdout
    assert "ledger 7" in done.stdout
    assert "not rebuilt" not in done.stdout, "nothing was written"
    assert "not rebuilt" not in done.stdout, "nothing was written"


async def command(service: Service, *options: str) -> Any:
    arguments = ["metadata", "rebuild", "--metadata", service.url, *options]
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


def test_findings_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild_module, "_FINDINGS_KEPT", 1)
    tally, nobody = rebuild_module._Tally(), AnsweringBookies({})

    for ledger_id in (1, 2, 3):
        tally.count(Judged(ledger_id, Decision(Action.WAIT, why="because"), None), nobody)

    assert [found.ledger_id for found in tally.findings] == [1]
    assert tally.left_out == 2
    assert tally.ledgers == {Action.WAIT: 3}


async def test_a_preview_waits_for_what_the_rebuild_waits_for(stores: Stores) -> None:
    """Bookies that are no members were emptied since: they may have kept an end (rule 18d)."""
    async with serving(stores) as service:
        opened = await create(service)
        for name in ("b7", "b8"):
            await sql(
                stores,
                "INSERT INTO cookies (name, version, cookie, born_at)"
                f""" VALUES ('{name}', 2, '{{"incarnation": 2, "boots": 0}}', now())""",
            )
        await sql(stores, "TRUNCATE ledgers CASCADE")
        database = Database(stores.postgres_dsn, connections_max=2, deadline_s=60.0)
        database.is_open = True
        async with RebuildStore(database).begin() as tables:
            database._check = _nothing_is_missing  # type: ignore[method-assign, assignment]
            members = {member_name(member): 1 for member in opened.all_members}
            answering = members | {"b7": 2, "b8": 2}
            bookies = AnsweringBookies(answering, registered=await tables.registered())
            held = {opened.ledger_id: [Held("b1@1", opened.ledger_key, rows=(opened,))]}

            looked, wrote = [
                (await tables.judge(held, bookies, writes=writes))[0].decision
                for writes in (False, True)
            ]

    assert (looked.action, wrote.action) == (Action.WAIT, Action.WAIT)
    assert "(b7, b8;" in wrote.why


async def _nothing_is_missing(_connection: object) -> set[str]:
    return set()
