"""The jobs against a cluster: what was planted is found, what is archived is there."""

import asyncio
import datetime as dt
import json
import os
import threading
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster, spark_cluster
from loadtest.stores import StoreServers
from quorumlog.net.identity import Credentials
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.record import Entry, pack

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from quorumlog.errors import UNKNOWN, QuorumLogError
from quorumlog.spark.jobs import archive, ingest, job, retention_stats, scrub
from quorumlog.spark.jobs.spans import CORRUPT, DIVERGENT, EXTRA, MISSING, UNREACHABLE
from quorumlog.spark.plan import DataLoss, TaskRange
from quorumlog.spark.rows import rows
from tests.support.waiting import UNHURRIED

COUNT = 300
MARK = "a-payload-to-be-flipped"


@pytest.fixture(scope="module")
def cluster(servers: StoreServers) -> Iterator[SparkCluster]:
    settings = {"bookies": 4, "gateways": 1, "environment": dict(UNHURRIED)}
    with spark_cluster(servers.fresh(), **settings) as started:
        # Nobody may mend what is planted before it is found.
        started.kill("autorecovery-1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CLUSTER_SECRET_FILE", str(started.data / "cluster-secret"))
            yield started


class Planter:
    """Ledgers whose copies are written by hand, one bookie at a time."""

    def __init__(self, cluster: SparkCluster) -> None:
        self._cluster = cluster

    def ledger(self, quorum: Quorum, *bookies: int, lost: Ranges = ()) -> int:
        """A closed ledger of COUNT entries of 10 bytes, of which there is no copy yet. `lost`: what
        an operator has given up.
        """
        members = tuple(f"bookie-{number}@1" for number in bookies)

        async def create() -> int:
            client = MetadataClient(
                [self._cluster.url("metadata-1")], credentials=Credentials(self._cluster.headers)
            )
            try:
                draft = LedgerMetadata(
                    ledger_id=-1,
                    quorum=quorum,
                    digest=DigestKind.NONE,
                    fragments=(Fragment(0, members),),
                    writer=Writer("nobody", "http://127.0.0.1:1"),
                    ledger_key=bytes(32),
                )
                opened = await client.create(draft)
                closed = replace(
                    opened, state=State.CLOSED, last_entry=COUNT - 1, length=10 * COUNT
                )
                _, row = await client.cas(closed)
                for first, last in lost:
                    assert row is not None
                    _, row = await client.cas(row.given_up(first, last, ()))
                return opened.ledger_id
            finally:
                await client.close()

        return asyncio.run(create())

    def copy(self, ledger: int, bookie: int, entries: list[int], text: str = "0123456789") -> None:
        """Give a bookie its copy of some entries."""
        run = pack(
            [Entry(ledger, e, NO_ENTRY, 10 * (e + 1), b"", text.encode()) for e in sorted(entries)],
            DigestKind.NONE,
        )
        url = f"{self._cluster.url(f'bookie-{bookie}')}/v1/ledgers/{ledger}/entries"
        request = urllib.request.Request(
            url,
            data=run.body,
            headers={
                "Content-Type": "application/octet-stream",
                "X-Ledger-Key": "A" * 43 + "=",
                **self._cluster.headers,
            },
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status in {200, 201}

    def flip(self, bookie: int, text: str) -> None:
        """Flip a bit of a payload in the bookie's files."""
        found = 0
        for path in sorted((self._cluster.data / f"bookie-{bookie}").rglob("*")):
            if not path.is_file() or "index" in path.parts:
                continue
            data = path.read_bytes()
            at = data.find(text.encode())
            while at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([data[at] ^ 1]))
                found += 1
                at = data.find(text.encode(), at + 1)
        assert found, "the payload lies in no file"


@pytest.fixture
def writers(cluster: SparkCluster) -> Iterator[list[str]]:
    """Somebody who appends to a log and to a ledger of its own all the time."""
    log = cluster.create("busy", roll_entries=20)
    ended = threading.Event()
    failures: list[str] = []

    def write() -> None:
        try:
            while not ended.wait(0.02):  # appending without a pause takes a core
                try:
                    cluster.append(log, *"abc")
                except QuorumLogError as error:
                    if not error.retryable and error.outcome != UNKNOWN:
                        raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the test tells it
            failures.append(repr(error))

    thread = threading.Thread(target=write)
    thread.start()
    yield failures
    ended.set()
    thread.join()


def test_scrub_finds_exactly_what_was_planted_while_writers_run(
    spark: SparkSession, cluster: SparkCluster, writers: list[str], tmp_path: Path
) -> None:
    planter = Planter(cluster)
    whole = list(range(COUNT))
    plain = planter.ledger(Quorum(3, 3, 2), 1, 2, 3)
    planter.copy(plain, 1, whole)
    planter.copy(plain, 2, [e for e in whole if not 100 <= e < 110])
    planter.copy(plain, 3, [e for e in whole if e not in {7, 50}])
    planter.copy(plain, 3, [7], "9876543210")
    planter.copy(plain, 3, [50], "0123456789")
    planter.copy(plain, 4, [20, 21])
    planter.copy(plain, 1, [COUNT, COUNT + 1])
    striped = planter.ledger(Quorum(4, 2, 2), 1, 2, 3, 4)
    for place in range(4):
        mine = [e for e in whole if place in (e % 4, (e + 1) % 4) and (place, e) != (2, 42)]
        planter.copy(striped, place + 1, mine)
    rotten = planter.ledger(Quorum(3, 3, 2), 1, 2, 3)
    for bookie in (1, 2, 3):
        planter.copy(rotten, bookie, [e for e in whole if e != 200])
        planter.copy(
            rotten, bookie, [200], MARK if bookie != 2 else MARK.replace("flipped", "ruined!")
        )
    planter.flip(2, MARK.replace("flipped", "ruined!"))

    planted = {plain, striped, rotten}

    saved = tmp_path / "findings.jsonl"

    def scrubbed() -> tuple[job.JobResult, list[Any]] | None:
        result = scrub.run(spark, cluster.urls, findings=saved)
        reported = result.frame.collect()
        elsewhere = {row.kind for row in reported if row.ledger not in planted} - {EXTRA}
        # Where a machine is slow a copy may be late in both looks. Nothing else is wrong elsewhere.
        assert elsewhere <= {MISSING, UNREACHABLE}
        is_late = bool(elsewhere) or any(row.kind == UNREACHABLE for row in reported)
        return None if is_late else (result, reported)

    seen = cluster.until(scrubbed, "nothing is found but what was planted")
    assert seen is not None
    result, reported = seen
    found = {
        (row.ledger, row.first, row.last, row.bookie, row.kind, row.survivors)
        for row in reported
        if row.ledger in planted
    }
    assert found == {
        (plain, 100, 109, "bookie-2@1", MISSING, 2),
        (plain, 7, 7, "bookie-3@1", DIVERGENT, 2),
        (plain, 20, 21, "bookie-4@1", EXTRA, 3),
        (plain, COUNT, COUNT + 1, "bookie-1@1", EXTRA, 0),
        (striped, 42, 42, "bookie-3@1", MISSING, 1),
        (rotten, 200, 200, "bookie-2@1", CORRUPT, 2),
    }
    assert result.status == job.FOUND
    assert result.report["findings"] == Counter(row.kind for row in reported)
    assert not writers

    assert result.report["queued"] == 0, "nobody asked for repairs"
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert lines == [row.asDict() for row in reported]
    repaired = scrub.run(
        spark, cluster.urls, ledgers=sorted(planted), repair=cluster.url("metadata-1")
    )
    assert repaired.report["queued"] == 3, "copies that differ are for an operator"
    queue = urllib.request.Request(
        f"{cluster.url('metadata-1')}/v1/repairs", headers=cluster.headers
    )
    with urllib.request.urlopen(queue) as answer:
        queued = json.loads(answer.read())["repairs"]
    assert {
        (item["ledger_id"], item["member"], tuple(map(tuple, item["ranges"])))
        for item in queued
        if item["ledger_id"] in planted
    } == {
        (plain, "bookie-2@1", ((100, 109),)),
        (striped, "bookie-3@1", ((42, 42),)),
        (rotten, "bookie-2@1", ((200, 200),)),
    }


def test_entries_that_were_given_up_are_an_error_unless_loss_is_accepted(
    cluster: SparkCluster,
) -> None:
    planter = Planter(cluster)
    ledger = planter.ledger(Quorum(3, 3, 2), 1, 2, 3, lost=((5, 9),))
    for bookie in (1, 2, 3):
        planter.copy(ledger, bookie, [e for e in range(COUNT) if not 5 <= e <= 9])
    part = TaskRange(None, ledger, 0, COUNT)

    def entries(*, fails_on_loss: bool) -> list[int]:
        pages = rows(cluster.http, part, ("entry",), fails_on_loss=fails_on_loss)
        return [entry for page in pages for entry in page.column("entry").to_pylist()]

    with pytest.raises(
        DataLoss, match=f"5 to 299 of ledger {ledger} are gone: .*failOnDataLoss=false"
    ):
        entries(fails_on_loss=True)
    assert entries(fails_on_loss=False) == [*range(5), *range(10, COUNT)]


def test_a_log_is_archived_read_back_and_only_then_let_go(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log = cluster.create("to-archive", roll_entries=2)
    cluster.append(log, "a", "b", "c")
    cluster.append(log, "d")
    cluster.append(log, "e")
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    root = str(tmp_path / "archive")

    def info() -> Any:
        return cluster.http.get(f"/v1/logs/{log}")

    planned = archive.run(spark, cluster.urls, log=log, path=root, dry_run=True)
    assert (planned.report["records"], info()["archived_through"]) == (5, None)

    first = archive.run(spark, cluster.urls, log=log, path=root, through=3)
    assert (first.report["first"], first.report["through"]) == (0, 3)
    assert info()["archived_through"] == 3
    # What a killed run left behind is no part of the archive.
    (placed,) = Path(root).rglob("0-3-*.parquet")
    placed.with_name("3-9-0a0a0a0a-0.parquet").write_bytes(placed.read_bytes())
    # Nor what the first run found and did not live to remove.
    older = placed.with_name("0-9-0b0b0b0b-0.parquet")
    older.write_bytes(placed.read_bytes())
    (manifest,) = Path(root).rglob("*.json")
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**said, "leftovers": [str(older.relative_to(root))]}))
    manifest.with_name(f".{manifest.name}.crc").unlink()
    aside = [Path(root, f".archive-{name}-0c0c0c0c") for name in (log, f"{log}-2")]
    for folder in aside:
        (folder / "date=2026-01-02").mkdir(parents=True)

    second = archive.run(spark, cluster.urls, log=log, path=root, truncate=True)

    assert (second.report["first"], second.report["through"]) == (3, 5)
    assert (info()["archived_through"], info()["first_offset"]) == (5, 5)
    rows = spark.read.parquet(f"{root}/log={log}").orderBy("offset").collect()
    assert [(row.offset, bytes(row.value)) for row in rows] == list(
        enumerate([b"a", b"b", b"c", b"d", b"e"])
    )
    assert {row.date for row in rows} <= {
        dt.datetime.now(dt.UTC).date() - dt.timedelta(days=days) for days in (0, 1)
    }
    manifests = [json.loads(path.read_text()) for path in sorted(Path(root).rglob("*.json"))]
    assert [(m["first"], m["through"]) for m in manifests] == [(0, 3), (3, 5)]
    # What a killed run wrote aside goes, too; that of another log stays.
    assert [folder.exists() for folder in aside] == [False, True]
    assert archive.run(spark, cluster.urls, log=log, path=root).report["records"] == 0


def test_only_what_this_place_has_from_the_logs_first_offset_on_is_truncated(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log = cluster.create("in-two-places")
    one, other = str(tmp_path / "a place"), str(tmp_path / "other")

    def archived(root: str, **wanted: Any) -> job.JobResult:
        return archive.run(spark, cluster.urls, log=log, path=root, **wanted)

    cluster.append(log, "a", "b")
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    archived(one, through=2)
    cluster.append(log, "c")
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    elsewhere = archived(other, through=3, truncate=True)
    assert (elsewhere.report["records"], elsewhere.report["first_offset"]) == (1, 0)
    assert (elsewhere.status, elsewhere.notes[0][:21]) == (job.FAILED, "nothing from offset 0")

    cluster.append(log, "d")
    here = archived(one, through=3, truncate=True)
    assert (here.report["records"], here.report["first_offset"]) == (0, 2)
    assert (here.status, here.notes[0][:21]) == (job.FAILED, "nothing from offset 2")
    there = archived(other, through=3, truncate=True)
    assert (there.report["first_offset"], there.status, there.notes) == (3, job.DONE, [])
    assert cluster.http.get(f"/v1/logs/{log}")["first_offset"] == 3


def _with_other_headers(path: Path) -> None:
    found = pq.read_table(path, partitioning=None)
    at = found.column_names.index("headers")
    other = pa.array([[("k", b"other")]] * len(found), found.schema.field(at).type)
    pq.write_table(
        found.set_column(at, found.schema.field(at), other),
        path,
        use_deprecated_int96_timestamps=True,
    )
    path.with_name(f".{path.name}.crc").unlink()


def _ruined(path: Path) -> None:
    path.write_bytes(b"no Parquet")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "not exist"),
        (_ruined, "can't be read"),
        (_with_other_headers, "differ from the log"),
    ],
)
def test_nothing_is_truncated_where_a_file_of_an_earlier_run_is_damaged(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path, damage: Any, said: str
) -> None:
    log = cluster.create(f"damaged-{damage.__name__.strip('_')}", roll_entries=1)
    cluster.http.request(
        "POST",
        f"/v1/logs/{log}/records",
        value={"records": [{"text": "a", "headers": {"k": "v"}}]},
        is_repeatable=False,
    )
    archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1)
    cluster.append(log, "b")
    (first,) = Path(tmp_path).rglob("0-1-*.parquet")
    damage(first)

    with pytest.raises(job.JobFailed, match=said):
        archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=2, truncate=True)

    assert cluster.http.get(f"/v1/logs/{log}")["first_offset"] == 0


def test_the_files_of_a_run_that_is_not_done_are_no_reason_to_truncate(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    """The run loses to another one if that advances the log first, and then removes its files."""
    log = cluster.create("undone")
    cluster.append(log, "a")
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "b")
    archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1)
    manifests = tmp_path / "_manifests" / log
    undone = json.loads((manifests / "0-1.json").read_text()) | {"through": 2}
    undone["files"][0]["file"] = "gone.parquet"
    (manifests / "0-2.json").write_text(json.dumps(undone))

    done = archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1, truncate=True)

    assert (done.status, done.report["first_offset"]) == (job.DONE, 1)


def test_the_archive_of_a_deleted_log_is_kept_and_no_reason_to_truncate_its_namesake(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    def made() -> str:
        log = cluster.create("made-twice", roll_entries=1)
        cluster.append(log, "a")
        return log

    log = made()
    archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    made()

    with pytest.raises(job.JobFailed, match="earlier log made-twice"):
        archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1, truncate=True)
    other = str(tmp_path / "other")
    archive.run(spark, cluster.urls, log=log, path=other, through=1)
    kept = archive.run(spark, cluster.urls, log=log, path=str(tmp_path), through=1, truncate=True)

    assert kept.status == job.FAILED
    assert len(list(Path(tmp_path, f"log={log}").rglob("*.parquet"))) == 1
    assert cluster.http.get(f"/v1/logs/{log}")["first_offset"] == 0


@pytest.mark.parametrize("through", [5, 3])
def test_of_two_archives_at_once_one_gives_up_and_each_record_is_there_once(
    spark: SparkSession,
    cluster: SparkCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    through: int,
) -> None:
    """The second one does all of its work between the first one's files and its compare-and-swap."""
    log = cluster.create(f"archived-twice-{through}")
    cluster.append(log, "a", "b", "c", "d", "e")
    root = str(tmp_path)
    publish = archive._Store.publish
    done: list[job.JobResult] = []
    begun: list[int] = []

    def publish_beside_another(store: Any, staged: Any, start: int, end: int) -> Any:
        placed = publish(store, staged, start, end)
        if not begun:
            begun.append(end)
            done.append(archive.run(spark, cluster.urls, log=log, path=root, through=through))
        return placed

    monkeypatch.setattr(archive._Store, "publish", publish_beside_another)
    with pytest.raises(job.JobFailed, match="another run"):
        archive.run(spark, cluster.urls, log=log, path=root, through=5)
    monkeypatch.undo()

    assert done[0].report["through"] == through
    assert cluster.http.get(f"/v1/logs/{log}")["archived_through"] == through
    rows = spark.read.parquet(f"{root}/log={log}").select("offset").collect()
    assert sorted(row.offset for row in rows) == list(range(through))
    (manifest,) = Path(root).rglob("*.json")
    assert {root + "/" + file["file"] for file in json.loads(manifest.read_text())["files"]} == {
        str(path) for path in Path(root, f"log={log}").rglob("*.parquet")
    }


def test_statistics_say_what_there_is_and_what_may_go(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log = cluster.create("old", roll_entries=1, retention_bytes=10_000_000)
    for _ in range(3):
        cluster.append(log, "x" * 100)
    lost = Planter(cluster).ledger(Quorum(3, 3, 2), 1, 2, 3)
    page, metrics, plan = (tmp_path / name for name in ("report.html", "m.prom", "plan.jsonl"))
    # Its retention would let go of ledgers that its archive does not have.
    kept = cluster.create("kept", roll_entries=1, retention_bytes=1)
    begun = {"through": 0, "expect": None}
    cluster.http.request("POST", f"/v1/logs/{kept}/archived", value=begun, is_repeatable=True)
    cluster.append(kept, "x" * 100)
    cluster.http.request("POST", f"/v1/logs/{kept}/roll", is_repeatable=True)

    result = retention_stats.run(spark, cluster.urls, html=page, prometheus=metrics, plan_file=plan)

    rows = {row.ledger: row for row in result.frame.collect()}
    assert (rows[lost].entries, rows[lost].bytes, rows[lost].replicas) == (COUNT, 10 * COUNT, 0)
    report = result.report
    assert report["ledgers"] == len(rows)
    assert report["logs"][log]["entries"] >= 3
    assert report["logs"][log]["bytes_per_hour"] is None, "of a log of a minute there is no rate"
    assert report["plan"]["expired"]["due"] == 0
    assert sum(report["replicas"].values()) == len(rows)
    assert result.status == job.DONE
    assert page.read_text().count("<svg") >= 4
    assert result.plan is not None
    planned = [row.asDict() for row in result.plan.collect()]
    assert [json.loads(line) for line in plan.read_text().splitlines()] == planned
    assert {(row["kind"], row["excluded"]) for row in planned if row["log"] == kept} == {
        ("expired", "archived up to offset 0 only")
    }
    assert f"quorumlog_stats_ledgers {len(rows)}" in metrics.read_text()


def test_what_spark_reads_is_ingested_once(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    spark.range(10).selectExpr("id", "id * id as square").write.parquet(str(tmp_path / "in"))
    asked: dict[str, Any] = {
        "log": "ingested",
        "path": str(tmp_path / "in"),
        "key": "cast(id as string)",
        "app": "nightly",
        "version": 3,
        "partitions": 1,
        "create": {"roll_entries": 100},
    }

    planned = ingest.run(spark, cluster.urls, **asked, dry_run=True)
    first = ingest.run(spark, cluster.urls, **asked)
    again = ingest.run(spark, cluster.urls, **asked)

    assert (planned.report["rows"], planned.report["ledgers"]) == (10, 1)
    assert (first.report["rows"], first.report["last_offset"]) == (10, 9)
    receipts = first.frame.collect()
    written = [text.encode() for text in cluster.values("ingested")]
    end = keys = 0
    for receipt in receipts:
        own = written[receipt.first_offset : receipt.last_offset + 1]
        assert (receipt.part, receipt.first_offset, receipt.rows) == (0, end, len(own))
        assert receipt.crc32 == zlib.crc32(b"".join(own))
        assert cluster.http.get(f"/v1/ledgers/{receipt.ledger}")["log"] == "ingested"
        end, keys = end + len(own), keys + receipt.bytes - sum(map(len, own))
    assert (end, keys) == (10, len("0123456789"))
    assert again.frame.collect() == []
    assert (again.report["rows"], again.report["is_duplicate"]) == (0, True)
    values = cluster.values("ingested")
    assert sorted(json.loads(text)["square"] for text in values) == [n * n for n in range(10)]
    with pytest.raises(job.JobFailed, match="no-such-log"):
        ingest.run(spark, cluster.urls, **{**asked, "log": "absent", "create": None})
    with pytest.raises(job.JobFailed, match="nowhere"):
        ingest.run(spark, cluster.urls, **{**asked, "value": "nowhere"})


def test_files_go_onto_the_log_by_name_though_spark_would_begin_with_the_largest(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    for day in (3, 1, 2, 4):
        lines = [f"{day}-{line} {'x' * 200}" for line in range(10 * day)]
        (folder / f"day{day}.txt").write_text("\n".join(lines))
        # The later a day, the earlier it was written.
        os.utime(folder / f"day{day}.txt", (10_000 - day, 10_000 - day))

    def taken(log: str, **wanted: Any) -> list[tuple[int, int]]:
        asked: dict[str, Any] = {
            "path": str(folder),
            "kind": "text",
            "value": "value",
            "create": {},
        }
        result = ingest.run(spark, cluster.urls, log=log, **asked, **wanted)
        assert result.report["order"] == wanted.get("order", ingest.FileOrder.NAME).value
        pairs = (value.split(" ")[0].split("-") for value in cluster.values(log))
        return [(int(day), int(line)) for day, line in pairs]

    days = [(day, line) for day in (1, 2, 3, 4) for line in range(10 * day)]
    backwards = [(day, line) for day in (4, 3, 2, 1) for line in range(10 * day)]
    assert taken("by-name") == days
    assert taken("by-time", order=ingest.FileOrder.MODIFIED) == backwards
    # Cut into many partitions, which hold ranges of names.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "LEDGER_BYTES", 4096)
        spark.conf.set("spark.sql.files.maxPartitionBytes", "3000")
        assert taken("by-range", partitions=4) == days
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert len(cluster.on_log("by-range")) > 1


def test_the_rows_of_a_query_keep_their_order_in_fewer_partitions(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    """Spark puts the partitions of a cached frame together by host, in no order."""
    log = cluster.create("fewer")
    frame = spark.range(90, numPartitions=9).cache()
    frame.count()
    frame.createOrReplaceTempView("fewer")

    done = ingest.run(
        spark, cluster.urls, log=log, query="FROM fewer", value="string(id)", partitions=4
    )

    frame.unpersist()
    assert done.report["ledgers"] <= 4
    assert cluster.values(log) == [str(number) for number in range(90)]


def test_a_rehearsal_finds_what_the_ingestion_would_fail_at(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    (tmp_path / "1.txt").write_text("a\n")
    asked: dict[str, Any] = {"path": str(tmp_path), "kind": "text", "dry_run": True}

    for stream in (False, True):
        more: dict[str, Any] = {"checkpoint": str(tmp_path / "c")} if stream else {}
        call: Any = ingest.stream if stream else ingest.run
        with pytest.raises(job.JobFailed, match="no-such-log"):
            call(spark, cluster.urls, log="nolog", **asked, **more)
        with pytest.raises(job.JobFailed, match="PARSE_SYNTAX_ERROR"):
            call(spark, cluster.urls, log="nolog", value="foo(", **asked, **more)
        assert call(spark, cluster.urls, log="nolog", create={}, **asked, **more).status == 0


def test_a_stream_of_files_takes_each_file_once(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log, files = cluster.create("streamed"), tmp_path / "files"
    files.mkdir()

    def take() -> int:
        result = ingest.stream(
            spark,
            cluster.urls,
            log=log,
            path=str(files),
            checkpoint=str(tmp_path / "checkpoint"),
            value="value",
        )
        return int(result.report["rows"])

    (files / "1.txt").write_text("a\nb\n")
    assert take() == 2
    (files / "2.txt").write_text("c\n")
    assert take() == 1
    assert take() == 0
    assert sorted(cluster.values(log)) == ["a", "b", "c"]
