"""Statistics of ledgers and their growth, and a retention plan, which lists deletable ledgers and copies.

The plan lists ledgers that their log's retention may drop (`expired`), ledgers that were created for a
log but are referenced by no log (`orphan`), and bookies' copies of ledgers without metadata
(`unknown`). Ledgers that are not archived yet, or younger than the grace period, are listed as
excluded, with the reason. The job deletes nothing: log owners and bookies delete data once deletion is proven safe.
"""

import datetime as dt
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from pyspark.sql import SparkSession

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


_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class LedgerRow(NamedTuple):
    """A row of `LEDGERS`."""

    ledger: int
    log: str | None
    state: str
    entries: int
    bytes: int
    stored_bytes: int
    fragments: int
    write_quorum: int
    replicas: int
    created_at: dt.datetime
    bookies: list[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ledger, or a bookie's copy of it, that may be deleted; `excluded`: why it must stay."""

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
    """The copies that bookies report, by ledger and bookie."""
    silent: tuple[str, ...]
    """Bookies that did not respond, so their copies are unknown."""


def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    grace_s: Annotated[
        float,
        typer.Option("--grace", min=0.0, help="Seconds for which an orphaned ledger is kept."),
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
    """Compute statistics and the plan. The result's `frame` has a row per ledger (`LEDGERS`), its
    `plan` a row per candidate (`PLAN`).

    `html`, `prometheus` and `plan_file`: files to write, except in a dry run. Raises: JobFailed.
    """
    with job.gateways(gateway) as gateways:
        try:
            inventory = read(gateways)
        except QuorumLogError as error:
            raise job.JobFailed(f"the cluster can't be read: {error}") from None
        now = dt.datetime.now(dt.UTC)
        rows = list(_rows(inventory))
        candidates = plan(inventory, now=now, grace_s=grace_s)
        report = {
            "job": "retention_stats",
            "dry_run": dry_run,
            "at": now.isoformat(timespec="seconds"),
            **_statistics(rows, inventory),
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
        frame = spark.createDataFrame(rows, LEDGERS)
        planned = job.frame_of(spark, candidates, PLAN)
        notes = [f"{name} did not answer" for name in inventory.silent]
        return job.JobResult(frame, report, job.FAILED if notes else job.DONE, notes, planned)


def read(gateways: Gateways) -> Inventory:
    """Read all ledgers and logs, and the copies on bookies. Raises: QuorumLogError."""
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
    """All candidates for deletion, including those that are excluded for now."""
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
    """The sealed ledgers, oldest first, that a log's retention may drop. Ages count from a ledger's
    creation, which the API shows. Retention counts from the sealing, so a ledger may be listed too
    early, but never too late.
    """
    settings = log["settings"]
    if settings.get("cleanup_policy") == "compact":
        return []
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


def _rows(inventory: Inventory) -> Iterator[LedgerRow]:
    for ledger_id, row in sorted(inventory.ledgers.items()):
        held = inventory.held.get(ledger_id, {})
        last = row["last_entry"]
        if last is None:
            last = max((item["highest_entry"] for item in held.values()), default=-1)
        yield LedgerRow(
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
            sorted({name for part in row["fragments"] for name in part["bookies"]}),
        )


def _statistics(rows: Sequence[LedgerRow], inventory: Inventory) -> dict[str, Any]:
    by_hour: dict[dt.datetime, list[LedgerRow]] = defaultdict(list)
    by_log: dict[str, list[LedgerRow]] = defaultdict(list)
    for row in rows:
        # Without a time zone: the hour in this machine's time zone.
        hour = row.created_at.astimezone().replace(minute=0, second=0, microsecond=0, tzinfo=None)
        by_hour[hour].append(row)
        if row.log is not None:
            by_log[row.log].append(row)
    held: Counter[str] = Counter()
    for members in inventory.held.values():
        held.update({bookie: item["bytes"] for bookie, item in members.items()})
    mean, sizes = held.total() / len(held) if held else 0.0, sorted(row.bytes for row in rows)
    small = sum(size < SMALL_BYTES for size in sizes)
    return {
        "ledgers": len(rows),
        **_sums(rows),
        "stored_bytes": sum(row.stored_bytes for row in rows),
        "states": dict(Counter(row.state for row in rows)),
        "size_percentiles": {
            name: sizes[math.ceil(len(sizes) * share) - 1]
            for name, share in (_PERCENTILES if sizes else {}).items()
        },
        "small_share": round(small / len(rows), 4) if rows else 0.0,
        "per_hour": [
            {"hour": hour.isoformat(), "ledgers": len(own), "bytes": sum(row.bytes for row in own)}
            for hour, own in sorted(by_hour.items())
        ],
        "replicas": {
            str(count): number
            for count, number in sorted(Counter(row.replicas for row in rows).items())
        },
        "bookies": dict(sorted(held.items())),
        "skew": round(max(held.values()) / mean, 3) if mean else 1.0,
        "logs": {
            log: {"ledgers": len(own), **_sums(own), "bytes_per_hour": _per_hour(own)}
            for log, own in sorted(by_log.items())
        },
    }


def _sums(rows: Sequence[LedgerRow]) -> dict[str, int]:
    return {
        "entries": sum(row.entries for row in rows),
        "bytes": sum(row.bytes for row in rows),
    }


def _per_hour(rows: Sequence[LedgerRow]) -> int | None:
    """Bytes per hour between the first and the last ledger's creation; None below one hour."""
    times = [row.created_at for row in rows]
    hours = (max(times) - min(times)).total_seconds() / 3600
    return round(sum(row.bytes for row in rows) / hours) if hours >= 1 else None


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
    """A ledger's payload bytes. For an open ledger, the largest number that a bookie reports."""
    if row["length"] is not None:
        return int(row["length"])
    held = inventory.held.get(row["ledger_id"], {})
    return max((item["bytes"] for item in held.values()), default=0)


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def _metrics(report: Mapping[str, Any]) -> str:
    """Format the figures for Prometheus' textfile collector."""
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
