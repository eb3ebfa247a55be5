"""Archive a log's records as Parquet, verify the copy, and only then record the archive in the log.

Files are under `<path>/log=<name>/date=<day>/`, named by their range of offsets. A run writes
records to a temporary folder, reads them back, and compares them with the log's records (number,
offsets, a digest of each). Then it moves the files into place with a manifest, and advances the
log's `archived_through` by compare-and-swap. If a run dies, the next run continues at
`archived_through` and removes the files that the dead run left. If two runs archive a log at once,
one run gives up, and leaves the other run's files alone. With `--truncate` the log then drops its
completely archived ledgers, up to the first gap in this archive. Before the truncation, every file
of the archive is read again, including the files of earlier runs.
"""

import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final
from urllib.parse import unquote

import typer
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from quorumlog.errors import QuorumLogError, VersionConflict
from quorumlog.spark.http import Gateways
from quorumlog.spark.jobs import job

FILES: Final = "file string, date string, first long, last long, rows long, digest string"
_NAME: Final = re.compile(r".*/([0-9]+)-([0-9]+)(?:-[0-9a-f]{8}-[0-9]+\.parquet|\.json)")
"""Paths of data files and manifests; names begin with the range of offsets (exclusive end)."""
_DIGESTED: Final = ("offset", "key", "value", "timestamp", "headers")
_GLOBS: Final = re.compile(r"[][{}*?\\]")
"""Pattern characters of Spark: with these in a path, Spark would read other files than it wrote."""
_RIVAL: Final = "another run archived this log meanwhile: run the job again"


@dataclass(frozen=True, slots=True)
class File:
    """One file of an archive."""

    file: str
    date: str
    first: int
    last: int
    rows: int
    digest: str
    """The sum of the records' digests, which does not depend on the records' order."""


def _age(text: str) -> dt.timedelta:
    """Parse an age in seconds. Raises: typer.BadParameter."""
    try:
        age = dt.timedelta(seconds=float(text))
    except (OverflowError, ValueError):
        raise typer.BadParameter(f"the age must be a number of seconds, not {text!r}") from None
    if age < dt.timedelta():
        raise typer.BadParameter(f"the age must be at least 0 seconds, not {text}")
    return age


def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    log: Annotated[str, typer.Option(help="The log.")],
    path: Annotated[str, typer.Option(help="A folder, or any path that Hadoop can write to.")],
    through: Annotated[
        int | None, typer.Option(min=0, help="Archive records up to this offset, exclusive.")
    ] = None,
    older_than: Annotated[
        dt.timedelta | None,
        typer.Option(
            parser=_age, metavar="SECONDS", help="Only ledgers of at least this age (seconds)."
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Then drop archived ledgers from the log.")
    ] = False,
    dry_run: job.DryRunOption = False,
) -> job.JobResult:
    """Archive records that are not archived yet: below an offset, or in whole ledgers of at least a
    given age. By default: all sealed ledgers. The result has a row per file (`FILES`). Raises:
    JobFailed.
    """
    with job.gateways(gateway) as gateways:
        try:
            row = gateways.get(f"/v1/logs/{log}")
            start = max(row["archived_through"] or 0, row["first_offset"])
            end = _end(gateways, row, through, older_than)
        except QuorumLogError as error:
            raise job.JobFailed(f"log {log} can't be read: {error.detail}") from None
        report: dict[str, Any] = {
            "job": "archive",
            "dry_run": dry_run,
            "log": log,
            "path": path,
            "first": start,
            "through": max(start, end),
            "records": max(0, end - start),
        }
        files: list[File] = []
        notes: list[str] = []
        if not dry_run and (end > start or truncate):
            store = _Store(spark, path, log, row["created_at"])
            if end > start:
                files = _archive(gateways, gateway, store, (start, end), row["archived_through"])
                report |= {"files": len(files), "manifest": store.manifest(start, end)}
            if truncate:
                row["archived_through"] = report["through"]
                report["first_offset"], notes = _truncate(gateways, row, end, store)
        frame = job.frame_of(spark, files, FILES)
        return job.JobResult(frame, report, job.FAILED if notes else job.DONE, notes)


def _archive(
    gateways: Gateways,
    gateway: str | Sequence[str],
    store: "_Store",
    span: tuple[int, int],
    known: int | None,
) -> list[File]:
    """Archive a range of a log, whose `archived_through` is `known`. Raises: JobFailed."""
    (start, end), log, meant = span, store.log, {"created": store.created_at}
    store.find_leftovers(start)
    job.say(f"archive: {end - start} records of {log}, offsets {start} to {end - 1}")

    def check() -> None:
        now = gateways.get(f"/v1/logs/{log}")
        if (now["archived_through"], now["created_at"]) != (known, store.created_at):
            raise job.JobFailed(_RIVAL)

    files = _copy(gateway, store, span, check)
    try:
        gateways.post(f"/v1/logs/{log}/archived", {"through": end, "expect": known}, params=meant)
    except VersionConflict:
        store.withdraw(files, start, end)
        raise job.JobFailed(_RIVAL) from None
    except QuorumLogError as error:
        raise job.JobFailed(
            f"the files are in place, but the log could not be updated: {error.detail}; run the job again"
        ) from None
    if not store.is_own(start, end):
        # Another run copied the same range; the manifest decides whose files count.
        store.withdraw(files, start, end)
        raise job.JobFailed(_RIVAL)
    store.remove(store.leftovers)
    return files


def _truncate(
    gateways: Gateways, row: Mapping[str, Any], end: int, store: "_Store"
) -> tuple[int, list[str]]:
    """Drop the log's ledgers below `end`, up to the first gap in the archive at this path. The
    archive may become the only copy, so every file of every manifest is read again, whichever run
    wrote the file. Returns the log's first offset, and a note if the archive ends before `end`.
    """
    covered = first = int(row["first_offset"])
    manifests = store.manifests_from(first, end, row["archived_through"])
    for manifest in manifests:
        files = [File(**file) for file in manifest["files"]]
        paths = [store.at(file.file) for file in files]
        covered = min(end, manifest["through"])
        if not files:
            continue
        rows, digest = sum(file.rows for file in files), sum(int(file.digest) for file in files)
        try:
            frame = store.spark.read.parquet(*paths)
            _verify(frame, (manifest["first"], manifest["through"]), rows, digest)
        except (PySparkException, Py4JError) as error:
            raise job.JobFailed(
                f"nothing was truncated: the archive of offsets {manifest['first']} to {covered - 1} can't be read:"
                f" {job.cause_of(error)}"
            ) from None
    if store.manifests_from(first, end, row["archived_through"]) != manifests:
        raise job.JobFailed(f"nothing was truncated: {_RIVAL}")
    if covered > first:
        path, meant = f"/v1/logs/{store.log}/truncate", {"created": store.created_at}
        try:
            answer = gateways.post(path, {"before": covered}, params=meant)
        except QuorumLogError as error:
            raise job.JobFailed(
                f"the truncation's outcome is unknown: {error.detail}; run the job again"
            ) from None
        first = int(answer["first_offset"])
    note = (
        f"nothing from offset {covered} on was truncated, because this --path has no archive of it. "
        "Use the --path to which these records were archived"
    )
    return first, [note] if covered < end else []


def _end(
    gateways: Gateways, row: dict[str, Any], through: int | None, older_than: dt.timedelta | None
) -> int:
    """The end of the last ledger that is sealed and old enough."""
    if through is not None:
        if through > row["next_offset"]:
            raise job.JobFailed(f"--through must be at most {row['next_offset']}, the log's end")
        return through
    end = int(row["first_offset"])
    limit = None if older_than is None else dt.datetime.now(dt.UTC) - older_than
    sealed = [item for item in row["ledgers"] if item["last_offset"] is not None]
    for item in sealed:
        if limit is not None and item["last_offset"] >= item["first_offset"]:
            page = gateways.get(
                f"/v1/logs/{row['name']}/records", {"from": item["last_offset"], "limit": 1}
            )
            found = page["records"]  # none if compaction has removed the last ones
            if not found or dt.datetime.fromisoformat(found[0]["timestamp"]) > limit:
                break
        end = item["last_offset"] + 1
    return end


def _copy(
    gateway: str | Sequence[str], store: "_Store", span: tuple[int, int], check: Callable[[], None]
) -> list[File]:
    """Write files to a temporary folder, compare them with the log, call `check`, and publish."""
    (start, end), spark, log = span, store.spark, store.log
    records = (
        spark.read.format("quorumlog")
        .option("gateway.url", job.urls_of(gateway))
        .option("assign", json.dumps({log: [0]}))
        .option("startingOffsets", json.dumps({log: {"0": start}}))
        .option("endingOffsets", json.dumps({log: {"0": end}}))
        .option("includeHeaders", "true")
        .load()
        .withColumn("digest", f.xxhash64(*_DIGESTED))
        .withColumn("date", f.to_date("timestamp"))
    )
    seen = Observation("archive")
    observed = records.observe(
        seen, f.count("*").alias("rows"), f.sum(f.col("digest").cast("decimal(38,0)")).alias("sum")
    )
    aside = store.aside()
    try:
        observed.write.partitionBy("date").parquet(aside)
        read, digest = seen.get["rows"], seen.get["sum"]
        if not read:  # compaction has removed all, or all have expired
            check()
            return store.publish([], start, end)
        staged = spark.read.parquet(aside)
        _verify(staged, span, read, digest)
        rows = (
            staged.withColumn("file", f.input_file_name())
            .groupBy("file", f.col("date").cast("string").alias("date"))
            .agg(
                f.min("offset").alias("first"),
                f.max("offset").alias("last"),
                f.count("*").alias("rows"),
                f.sum(f.col("digest").cast("decimal(38,0)")).cast("string").alias("digest"),
            )
            .orderBy("first")
            .collect()
        )
        check()
        return store.publish(
            [File(**{**row.asDict(), "file": unquote(row.file)}) for row in rows], start, end
        )
    finally:
        store.remove([aside])


def _verify(frame: DataFrame, span: tuple[int, int], rows: int, digest: Any) -> None:
    """Check the files' records: their number, their range of offsets, and their recomputed digests.
    There may be fewer records than offsets, because records are compacted away or expire.

    Raises: JobFailed.
    """
    anew = f.xxhash64(*_DIGESTED)
    is_outside = (f.col("offset") < span[0]) | (f.col("offset") >= span[1])
    found = frame.agg(
        f.count("*").alias("rows"),
        f.count_distinct("offset").alias("offsets"),
        f.sum(is_outside.cast("int")).alias("outside"),
        f.sum((anew != f.col("digest")).cast("int")).alias("bad"),
        f.sum(anew.cast("decimal(38,0)")).alias("sum"),
    ).first()
    assert found is not None, "an aggregate without groups has one row"
    expected = (rows, rows, 0, 0, int(digest))
    got = tuple(0 if value is None else int(value) for value in found)
    if got != expected:
        raise job.JobFailed(f"the files differ from the log: {got}, not {expected}; try again")


class _Store:
    """The archive's files, on any file system that Spark can reach."""

    def __init__(self, spark: SparkSession, root: str, log: str, created_at: str) -> None:
        """`created_at`: the log's creation time, which distinguishes logs of the same name.
        Raises: JobFailed.
        """
        if _GLOBS.search(root):
            raise job.JobFailed(
                f"--path {root}: Spark reads []{{}}*? and \\ as a pattern: choose another path"
            )
        context = job.context_of(spark)
        if context is None:
            raise job.JobFailed(
                "archive moves files with Hadoop, which Spark Connect does not offer: run it in a local"
                " session, for example with python -m quorumlog.spark.jobs.archive"
            )
        jvm = context._jvm  # noqa: SLF001 - there is no public way to Hadoop's file systems
        assert jvm is not None, "a classic session must have a JVM"
        self._path: Any = jvm.org.apache.hadoop.fs.Path
        configuration = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self._root, self._run = root.rstrip("/"), uuid.uuid4().hex[:8]
        self.spark, self.log, self.created_at = spark, log, created_at
        self._files: Any = self._path(self._root).getFileSystem(configuration)
        self.leftovers: list[str] = []
        """Files that existed when the run began, of this run's range or of later ranges."""

    def aside(self) -> str:
        """A run's temporary folder; Spark ignores names that begin with a dot."""
        return f"{self._root}/.archive-{self.log}-{self._run}"

    def manifest(self, start: int, end: int) -> str:
        """The path of a range's manifest, which lists the range's files."""
        return f"{self._root}/_manifests/{self.log}/{start}-{end}.json"

    def publish(self, staged: Sequence[File], start: int, end: int) -> list[File]:
        """Move files into place, and write the manifest."""
        placed = []
        for number, item in enumerate(staged):
            folder = f"{self._root}/log={self.log}/date={item.date}"
            self._files.mkdirs(self._path(folder))
            target = f"{folder}/{start}-{end}-{self._run}-{number}.parquet"
            if not self._files.rename(self._path(item.file), self._path(target)):
                raise job.JobFailed(f"{target} can't be created: check the permissions of --path")
            placed.append(replace(item, file=target))
        own = f"/{start}-{end}.json"
        # The manifest of the same range is overwritten.
        self.leftovers = [path for path in self.leftovers if not path.endswith(own)]
        text = json.dumps(
            {
                "log": self.log,
                "created_at": self.created_at,
                "run": self._run,
                "leftovers": [self._relative(path) for path in self.leftovers],
                "first": start,
                "through": end,
                "files": [{**asdict(item), "file": self._relative(item.file)} for item in placed],
            },
            indent=1,
        )
        out = self._files.create(self._path(self.manifest(start, end)), True)
        try:
            out.write(text.encode())
        finally:
            out.close()
        return placed

    def find_leftovers(self, start: int) -> None:
        """Record the files that unfinished runs left: temporary files, and files of ranges that begin
        at this run's start or later. These files are not archived, because this run begins at
        `archived_through`, but another run may still be writing them. Once this run has won, no
        other run can win, and the files are removed.
        """
        manifests = self._ranges("_manifests/")
        # Each run compared the log's creation time before it wrote, so one manifest is enough.
        of_place = next(filter(None, (self._said(path) for *_, path in manifests)), None)
        if of_place is not None and of_place["created_at"] != self.created_at:
            raise job.JobFailed(
                f"{self._root} has the archive of an earlier log {self.log}, which was deleted: choose another path"
            )
        for path in [path for _, through, path in manifests if through == start][-1:]:
            # The run of that manifest won, and may have died before it removed its leftovers.
            self.remove(map(self.at, self._said(path).get("leftovers", ())))
        self.leftovers = [
            path
            for first, _, path in (*self._ranges("log="), *self._ranges("_manifests/"))
            if first >= start
        ]
        if self._files.exists(self._path(self._root)):
            names = [
                item.getPath().getName() for item in self._files.listStatus(self._path(self._root))
            ]
            aside = re.compile(rf"\.archive-{re.escape(self.log)}-[0-9a-f]{{8}}")
            self.leftovers += [f"{self._root}/{name}" for name in names if aside.fullmatch(name)]

    def is_own(self, start: int, end: int) -> bool:
        """Whether this run wrote the manifest of a range."""
        return self._said(self.manifest(start, end)).get("run") == self._run

    def withdraw(self, files: Sequence[File], start: int, end: int) -> None:
        """Remove the files that this run has moved into place."""
        if self.is_own(start, end):
            self.remove([self.manifest(start, end)])
        self.remove(file.file for file in files)

    def manifests_from(self, start: int, end: int, archived: int) -> list[dict[str, Any]]:
        """The manifests that cover this log from `start` on without a gap, in order, up to `end` or
        to the first gap. Manifests beyond `archived`, the end of the log's archive, are ignored.
        An unfinished run may have written such a manifest, and removes its files if another run
        wins.
        """
        found: list[dict[str, Any]] = []
        ranges = self._ranges("_manifests/")
        while start < end:
            fitting = [
                said
                for first, through, path in ranges
                if first <= start < through <= archived
                and (said := self._said(path)).get("created_at") == self.created_at
            ]
            if not fitting:
                break
            found.append(max(fitting, key=lambda said: said["through"]))
            start = found[-1]["through"]
        return found

    def at(self, relative: str) -> str:
        """The full path of a file in a manifest."""
        return f"{self._root}/{relative}"

    def _relative(self, path: str) -> str:
        """A file's path as stored in manifests, even if Hadoop lists the file as `file:/…`."""
        folders = (f"/log={self.log}/", f"/_manifests/{self.log}/", f"/.archive-{self.log}-")
        return path[max(path.rfind(folder) for folder in folders) + 1 :]

    def _said(self, manifest: str) -> dict[str, Any]:
        """The content of a manifest; empty if it is missing, or incomplete because its run was killed."""
        if not self._files.exists(self._path(manifest)):
            return {}
        stream = self._files.open(self._path(manifest))
        try:
            found: dict[str, Any] = json.loads(bytes(stream.readAllBytes()))
        except ValueError:
            return {}
        finally:
            stream.close()
        return found

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files and folders, if they exist."""
        for path in list(paths):
            self._files.delete(self._path(path), True)

    def _ranges(self, kind: str) -> list[tuple[int, int, str]]:
        """Sorted (first, end, path) of the log's data files (`log=`) or manifests."""
        ranges: list[tuple[int, int, str]] = []
        folder = self._path(f"{self._root}/{kind}{self.log}")
        found = self._files.listFiles(folder, True) if self._files.exists(folder) else None
        while found is not None and found.hasNext():
            path = found.next().getPath().toString()
            if named := _NAME.fullmatch(path):
                ranges.append((int(named[1]), int(named[2]), path))
        return sorted(ranges)


def _check(given: Mapping[str, Any]) -> None:
    if given["through"] is not None and given["older_than"] is not None:
        raise typer.BadParameter("give either --through or --older-than, not both")


app = job.program("archive", run, __doc__, _check)

if __name__ == "__main__":
    app()
