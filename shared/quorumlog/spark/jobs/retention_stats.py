"""Statistics of ledgers and their growth, and a plan of retention: what may be deleted.

The plan lists ledgers that their log's retention may drop (`expired`), ledgers that were created for a
log and that no log names (`orphan`), and copies on bookies of ledgers that metadata does not know
(`unknown`). Ledgers that are not archived yet, or younger than the grace period, are listed as
excluded, with the reason. The job deletes nothing: owners of logs and bookies delete by themselves, on proof.
"""

import datetime as dt
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.ids import member_name
from quorumlog.spark.http import Gateways
from quorumlog.spark.jobs import job, page
from quorumlog.spark.jobs.spans import BOOKIE_S

LEDGERS: Final = (
    "ledger long, log string, state string, entries long, bytes long, stored_bytes long,"
    " fragments int, write_quorum int, replicas int, created_at timestamp, bookies array<string>"
)
PLAN: Final = (
    "kind string, ledger long, log string, bookie string, bytes long, reason string,"
    " excluded string"
)
SMALL_BYTES: Final = 1024 * 1024
GRACE_S: Final = 3600.0
EXPIRED: Final = "expired"
ORPHAN: Final = "orphan"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ledger, or a bookie's copy of it, that may be deleted; `excluded` says why not yet."""

    kind: str
    ledger: int
    log: str | None
    bookie: str | None
    bytes: int
    reason: str
    excluded: str | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that was read from a cluster."""

    ledgers: dict[int, dict[str, Any]]
    logs: list[dict[str, Any]]
    held: dict[int, dict[str, dict[str, Any]]]
    """What bookies report that they hold, by ledger and bookie."""
    silent: tuple[str, ...]
    """Bookies that did not answer: what they hold is unknown."""


def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace", min=0.0, help="Seconds for which a ledger that no log names is kept."
        ),
    ] = GRACE_S,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with plots.")] = None,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write metrics for a textfile collector.")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Write the plan, as lines of JSON.")
    ] = None,
    dry_run: job.DryRunOption = False,
) -> job.JobResult:
    """Statistics and the plan. The frame has a row per ledger (`LEDGERS`), `plan` one per candidate
    (`PLAN`).

    `html`, `prometheus` and `plan_file`: files to write, not in a dry run. Raises: JobFailed.
    """
    with job.gateways(gateway) as gateways:
        try:
            inventory = read(gateways)
        except QuorumLogError as error:
            raise job.JobFailed(f"the cluster can't be read: {error}") from None
        now = dt.datetime.now(dt.UTC)
        frame = spark.createDataFrame(_rows(inventory), LEDGERS).cache()
        candidates = plan(inventory, now=now, grace_s=grace_s)
        report = {
            "job": "retention_stats",
            "dry_run": dry_run,
            "at": now.isoformat(timespec="seconds"),
            **_statistics(frame, inventory),
            "plan": _summary(candidates),
            "silent_bookies": list(inventory.silent),
        }
        if not dry_run:
            if html is not None:
                html.write_text(page.report(report, [asdict(item) for item in candidates]))
            if prometheus is not None:
                prometheus.write_text(_metrics(report))
            if plan_file is not None:
                job.write_lines(plan_file, map(asdict, candidates))
        planned = job.frame_of(spark, candidates, PLAN)
        notes = [f"{name} did not answer" for name in inventory.silent]
        return job.JobResult(frame, report, job.FAILED if notes else job.DONE, notes, planned)


def read(gateways: Gateways) -> Inventory:
    """All ledgers, logs, and what bookies hold. Raises: QuorumLogError."""
    ledgers = {row["ledger_id"]: row for row in gateways.pages("/v1/ledgers", "ledgers")}
    logs = gateways.pages("/v1/logs", "logs")
    held: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    silent = []
    for bookie in gateways.get("/v1/bookies")["bookies"]:
        if bookie["state"] == "lost":
            silent.append(bookie["id"])
            continue
        url = bookie["url"]
        headers = job.operator_headers([url])
        try:
            with Gateways(url, deadline_s=BOOKIE_S, headers=headers) as asked:
                for item in asked.pages("/v1/ledgers", "ledgers"):
                    held[item["ledger_id"]][bookie["id"]] = item
        except QuorumLogError:
            silent.append(bookie["id"])
    job.say(f"retention_stats: {len(ledgers)} ledgers, {len(logs)} logs")
    return Inventory(ledgers, logs, held, tuple(silent))


def plan(inventory: Inventory, *, now: dt.datetime, grace_s: float) -> list[Candidate]:
    """The candidates for deletion, with those that are excluded for a reason."""
    found: list[Candidate] = []
    named: set[int] = set()
    for log in inventory.logs:
        named.update(item["ledger_id"] for item in log["ledgers"])
        found += _expired(log, inventory, now)
    for ledger_id, row in sorted(inventory.ledgers.items()):
        if row["log"] is None or ledger_id in named:
            continue
        age_s = (now - _time(row["created_at"])).total_seconds()
        excluded = None if age_s > grace_s else f"younger than {grace_s:g} s"
        if row.get("transaction"):
            excluded = "its transaction decides"
        size, why = _bytes(row, inventory), "its log does not name it"
        found.append(Candidate(ORPHAN, ledger_id, row["log"], None, size, why, excluded))
    for ledger_id, members in sorted(inventory.held.items()):
        if ledger_id in inventory.ledgers:
            continue
        whys = "metadata has no such ledger", "the bookie asks for proof of its deletion first"
        found += [
            Candidate(UNKNOWN, ledger_id, None, bookie, item["bytes"], *whys)
            for bookie, item in sorted(members.items())
        ]
    return found


def _expired(log: Mapping[str, Any], inventory: Inventory, now: dt.datetime) -> list[Candidate]:
    """The sealed ledgers, oldest first, that a log's retention may drop. Ages count from the ledgers'
    creation, which the API shows; a log counts from the seal, so this may be early, never late.
    """
    settings = log["settings"]
    most_bytes, most_s = settings["retention_bytes"], settings["retention_seconds"]
    archived = log.get("archived_through")
    sealed = [item for item in log["ledgers"] if item["last_offset"] is not None]
    rows = [inventory.ledgers.get(item["ledger_id"]) for item in sealed]
    sizes = [0 if row is None else _bytes(row, inventory) for row in rows]
    kept = sum(sizes)
    found = []
    for item, row, size in zip(sealed, rows, sizes, strict=True):
        if row is None:
            continue
        reason = None
        if most_s and (now - _time(row["created_at"])).total_seconds() > most_s:
            reason = f"older than {most_s} s"
        if most_bytes and kept > most_bytes:
            reason = f"the log keeps {most_bytes} bytes"
        if reason is None:
            break
        kept -= size
        excluded = None
        if archived is not None and item["last_offset"] >= archived:
            excluded = f"archived up to offset {archived} only"
        found.append(
            Candidate(EXPIRED, item["ledger_id"], log["name"], None, size, reason, excluded)
        )
    return found


def _rows(inventory: Inventory) -> list[tuple[Any, ...]]:
    rows = []
    for ledger_id, row in sorted(inventory.ledgers.items()):
        held = inventory.held.get(ledger_id, {})
        last = row["last_entry"]
        if last is None:
            last = max((item["highest_entry"] for item in held.values()), default=-1)
        members = sorted({name for part in row["fragments"] for name in part["bookies"]})
        rows.append(
            (
                ledger_id,
                row["log"],
                row["state"],
                last + 1,
                _bytes(row, inventory),
                sum(item["bytes"] for item in held.values()),
                len(row["fragments"]),
                row["write_quorum"],
                len({member_name(bookie) for bookie in held}),
                _time(row["created_at"]),
                members,
            )
        )
    return rows


def _statistics(frame: DataFrame, inventory: Inventory) -> dict[str, Any]:
    """The figures, computed by Spark."""
    totals = frame.agg(
        f.count("*").alias("ledgers"),
        f.coalesce(f.sum("entries"), f.lit(0)).alias("entries"),
        f.coalesce(f.sum("bytes"), f.lit(0)).alias("bytes"),
        f.coalesce(f.sum("stored_bytes"), f.lit(0)).alias("stored_bytes"),
        f.sum((f.col("bytes") < SMALL_BYTES).cast("int")).alias("small"),
        f.percentile_approx("bytes", [0.5, 0.9, 0.99, 1.0]).alias("sizes"),
    ).first()
    assert totals is not None, "an aggregate without groups has one row"
    count = totals["ledgers"]
    by_hour = (
        frame.groupBy(f.date_trunc("hour", "created_at").alias("hour"))
        .agg(f.count("*").alias("ledgers"), f.sum("bytes").alias("bytes"))
        .orderBy("hour")
        .collect()
    )
    by_log = (
        frame.where("log is not null")
        .groupBy("log")
        .agg(
            f.count("*").alias("ledgers"),
            f.sum("entries").alias("entries"),
            f.sum("bytes").alias("bytes"),
            f.min("created_at").alias("first"),
            f.max("created_at").alias("last"),
        )
        .orderBy("log")
        .collect()
    )
    replicas = frame.groupBy("replicas").count().orderBy("replicas").collect()
    held: dict[str, int] = defaultdict(int)
    for members in inventory.held.values():
        for bookie, item in members.items():
            held[bookie] += item["bytes"]
    mean = sum(held.values()) / len(held) if held else 0.0
    return {
        "ledgers": count,
        "entries": totals["entries"],
        "bytes": totals["bytes"],
        "stored_bytes": totals["stored_bytes"],
        "states": dict(Counter(row["state"] for row in inventory.ledgers.values())),
        "size_percentiles": dict(
            zip(("p50", "p90", "p99", "max"), totals["sizes"] or (), strict=False)
        ),
        "small_share": round((totals["small"] or 0) / count, 4) if count else 0.0,
        "per_hour": [
            {"hour": row["hour"].isoformat(), "ledgers": row["ledgers"], "bytes": row["bytes"]}
            for row in by_hour
        ],
        "replicas": {str(row["replicas"]): row["count"] for row in replicas},
        "bookies": dict(sorted(held.items())),
        "skew": round(max(held.values()) / mean, 3) if mean else 1.0,
        "logs": {
            row["log"]: {
                "ledgers": row["ledgers"],
                "entries": row["entries"],
                "bytes": row["bytes"],
                "bytes_per_hour": _per_hour(row["bytes"], row["first"], row["last"]),
            }
            for row in by_log
        },
    }


def _per_hour(size: int, first: dt.datetime, last: dt.datetime) -> int | None:
    """Growth over the time in which ledgers were created; None where that is less than an hour."""
    hours = (last - first).total_seconds() / 3600
    return round(size / hours) if hours >= 1 else None


def _summary(candidates: Iterable[Candidate]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind in (EXPIRED, ORPHAN, UNKNOWN):
        mine = [item for item in candidates if item.kind == kind]
        due = [item for item in mine if item.excluded is None]
        result[kind] = {
            "due": len(due),
            "due_bytes": sum(item.bytes for item in due),
            "excluded": len(mine) - len(due),
            "ledgers": [item.ledger for item in due[:1000]],
        }
    return result


def _bytes(row: Mapping[str, Any], inventory: Inventory) -> int:
    """Payload bytes; of an open ledger, the most that a bookie holds of it."""
    if row["length"] is not None:
        return int(row["length"])
    held = inventory.held.get(row["ledger_id"], {})
    return max((item["bytes"] for item in held.values()), default=0)


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def _metrics(report: Mapping[str, Any]) -> str:
    """The figures for Prometheus' textfile collector."""
    lines = [f"quorumlog_stats_time_seconds {int(time.time())}"]  # noqa: TID251 - a date, for people
    lines += [
        f"quorumlog_stats_{name} {report[name]}"
        for name in ("ledgers", "entries", "bytes", "stored_bytes", "small_share", "skew")
    ]
    for name, value in report["size_percentiles"].items():
        lines.append(f'quorumlog_stats_ledger_bytes{{quantile="{name}"}} {value}')
    for bookie, value in report["bookies"].items():
        lines.append(f"quorumlog_stats_bookie_bytes{{bookie={json.dumps(bookie)}}} {value}")
    for log, values in report["logs"].items():
        lines.append(f"quorumlog_stats_log_bytes{{log={json.dumps(log)}}} {values['bytes']}")
    for kind, values in report["plan"].items():
        lines.append(f'quorumlog_stats_due_ledgers{{kind="{kind}"}} {values["due"]}')
    return "\n".join(lines) + "\n"


app = job.program("retention_stats", run, __doc__)

if __name__ == "__main__":
    app()
