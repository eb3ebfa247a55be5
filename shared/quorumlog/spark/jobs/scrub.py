"""Compare all replicas of all entries by digests that bookies compute, without moving payloads.

If members of a write set differ, the range of entries is halved until it is clear which entries are
missing, corrupt, divergent or extra. Findings are checked again with fresh metadata before they are
reported. A bookie that does not respond, or is in limbo, proves nothing: `unreachable` does not mean
`missing`. The job disturbs no writer, and changes nothing unless it is asked to queue repairs.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pyspark.sql import SparkSession

from quorumlog.errors import NoSuchLedger, QuorumLogError
from quorumlog.protocol.ids import ID_MAX, member_name
from quorumlog.spark.http import Gateways
from quorumlog.spark.jobs import job, spans

SPAN_ENTRIES: Final = 100_000
_QUEUE_ITEMS: Final = 1000
"""Maximum number of items that one request puts into the repair queue."""
_SETTLE_S: Final = 2.0
"""The pause between the first and the second check, during which entries in flight arrive."""


def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    ledgers: Annotated[
        list[int] | None, typer.Option("--ledger", help="Check only these ledgers.")
    ] = None,
    sample: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the ledgers to check.")
    ] = 1.0,
    entries_per_second: Annotated[
        float, typer.Option(min=0.0, help="Maximum copies to digest per second; 0: no limit.")
    ] = 0.0,
    findings: Annotated[
        Path | None, typer.Option(help="Write the findings to this file, as lines of JSON.")
    ] = None,
    repair: job.RepairOption = None,
    dry_run: job.DryRunOption = False,
) -> job.JobResult:
    """Scrub all ledgers, or some. The result's frame has the findings (`SCHEMA`).

    `sample`: the share of ledgers to check, which selects the same ledgers each time. `findings`: a
    file to write, except in a dry run. `repair`: URLs of the metadata service, whose repair queue
    gets missing and corrupt entries that have a good copy elsewhere. Raises: JobFailed.
    """
    with (
        job.gateways(gateway) as gateways,
        nullcontext() if repair is None else job.services(repair) as queue,
    ):
        began = time.monotonic()
        try:
            rows = _rows(gateways, ledgers, sample)
            cluster = _cluster(gateways, entries_per_second, spark)
            holders = _holders(cluster)
        except QuorumLogError as error:
            raise job.JobFailed(f"the cluster can't be read: {error}") from None
        work = list(_work(rows.values(), holders))
        entries = sum(span.count * len(span.members) for span in work)
        job.say(f"scrub: {len(rows)} ledgers, {len(work)} spans, {entries} copies to compare")
        report: dict[str, Any] = {
            "job": "scrub",
            "dry_run": dry_run,
            "ledgers": len(rows),
            "spans": len(work),
            "copies": entries,
        }
        if dry_run:
            return job.JobResult(job.frame_of(spark, [], spans.SCHEMA), report)
        found = _examine(spark, work, cluster)
        if found:
            found = _again(spark, gateways, cluster, found)
        if ledgers is None and sample >= 1:
            found = sorted([*found, *_beyond(gateways, rows, holders)])
        kinds = Counter(finding.kind for finding in found)
        report |= {
            "findings": dict(sorted(kinds.items())),
            "entries_found": sum(f.last - f.first + 1 for f in found if f.kind in spans.DAMAGE),
            "by_bookie": dict(sorted(Counter(f.bookie for f in found).items())),
            "unrecoverable": sum(f.kind in spans.DAMAGE and f.survivors == 0 for f in found),
            "queued": 0 if queue is None else _queue(queue, found),
            "seconds": round(time.monotonic() - began, 3),
        }
        if findings is not None:
            job.write_lines(findings, map(asdict, found))
        status, notes = job.DONE, []
        if kinds[spans.UNREACHABLE]:
            status = job.FAILED
            notes = ["some bookies could not be reached: their copies are unknown"]
        if any(kinds[kind] for kind in spans.DAMAGE):
            status = job.FOUND
        return job.JobResult(job.frame_of(spark, found, spans.SCHEMA), report, status, notes)


def _rows(
    gateways: Gateways, ledgers: Sequence[int] | None, sample: float
) -> dict[int, dict[str, Any]]:
    """The ledgers to check, by id. Each ledger gets the field `confirmed`: its end or its LAC."""
    if ledgers is None:
        found = {row["ledger_id"]: row for row in gateways.pages("/v1/ledgers", "ledgers")}
    else:
        found = {i: row for i in ledgers if (row := _row(gateways, i)) is not None}
    # Knuth's multiplicative hash spreads neighbouring ids, and chooses the same ids each time.
    chosen = {i: row for i, row in found.items() if (i * 2_654_435_761) % 2**32 < sample * 2**32}
    for ledger_id, row in chosen.items():
        is_closed = row["state"] == "CLOSED"
        row["confirmed"] = row["last_entry"] if is_closed else _confirmed(gateways, ledger_id)
    return chosen


def _row(gateways: Gateways, ledger_id: int) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = gateways.get(f"/v1/ledgers/{ledger_id}")
    except NoSuchLedger:
        return None
    return row


def _confirmed(gateways: Gateways, ledger_id: int) -> int:
    """An open ledger's last add confirmed; -1 if it can't be read now."""
    try:
        found = gateways.get(f"/v1/ledgers/{ledger_id}/last-add-confirmed")
    except QuorumLogError:
        return -1
    return int(found["last_add_confirmed"])


def _cluster(gateways: Gateways, rate: float, spark: SparkSession) -> spans.BookieUrls:
    latest: dict[str, dict[str, Any]] = {}
    for bookie in gateways.get("/v1/bookies")["bookies"]:
        name = member_name(bookie["id"])
        if bookie["state"] != "lost" or name not in latest:
            latest[name] = bookie
    urls = {name: bookie["url"] for name, bookie in latest.items() if bookie["state"] != "lost"}
    return spans.BookieUrls(
        urls,
        {name: bookie["id"] for name, bookie in latest.items()},
        rate / job.parallelism(spark),
        job.operator_headers(urls.values()),
    )


def _holders(cluster: spans.BookieUrls) -> dict[int, dict[str, int]]:
    """The highest entry of each ledger on each bookie."""
    found: dict[int, dict[str, int]] = {}
    for name, url in cluster.urls.items():
        try:
            with Gateways(url, deadline_s=spans.BOOKIE_S, headers=cluster.headers) as bookie:
                for held in bookie.pages("/v1/ledgers", "ledgers"):
                    if held["entries"]:
                        of_ledger = found.setdefault(held["ledger_id"], {})
                        of_ledger[cluster.current[name]] = held["highest_entry"]
        except QuorumLogError as error:
            job.say(f"scrub: {name} can't be listed: {error}")
    return found


def _work(
    rows: Iterable[dict[str, Any]], holders: Mapping[int, Mapping[str, int]]
) -> Iterator[spans.Span]:
    for row in rows:
        for span in spans.spans_of(row, row["confirmed"], SPAN_ENTRIES):
            named = {member_name(member) for member in span.members}
            others = holders.get(span.ledger_id, {}) if span.is_complete else {}
            yield replace(span, strangers=tuple(m for m in others if member_name(m) not in named))


def _examine(
    spark: SparkSession, work: Sequence[spans.Span], cluster: spans.BookieUrls
) -> list[spans.Finding]:
    """Check all spans, on the executors."""
    if not work:
        return []
    tasks = min(len(work), 2 * job.parallelism(spark))
    rows = [(json.dumps(asdict(span)),) for span in work]
    found = (
        spark.createDataFrame(rows, "work string")
        .repartition(tasks)
        .mapInPandas(spans.judging(cluster), spans.SCHEMA)
        .collect()
    )
    return sorted({spans.Finding(*row) for row in found})


def _again(
    spark: SparkSession,
    gateways: Gateways,
    old: spans.BookieUrls,
    findings: Sequence[spans.Finding],
) -> list[spans.Finding]:
    """Check ledgers with findings again with fresh metadata, because ledgers may have changed."""
    job.say(f"scrub: checking {len(findings)} findings again")
    time.sleep(_SETTLE_S)
    rows = _rows(gateways, sorted({finding.ledger for finding in findings}), 1.0)
    cluster = replace(_cluster(gateways, 0.0, spark), rate=old.rate)
    return _examine(spark, list(_work(rows.values(), _holders(cluster))), cluster)


def _beyond(
    gateways: Gateways,
    rows: Mapping[int, Mapping[str, Any]],
    holders: Mapping[int, Mapping[str, int]],
) -> list[spans.Finding]:
    """Find copies beyond the end of closed ledgers, and of ledgers that do not exist."""
    found = []
    for ledger_id, members in sorted(holders.items()):
        row = rows.get(ledger_id)
        if row is None:
            # The ledger was created after the list was read, or deleted after the bookie answered.
            if _row(gateways, ledger_id) is None:
                found += [
                    spans.Finding(
                        ledger_id, 0, high, member, spans.EXTRA, 0, "there is no such ledger"
                    )
                    for member, high in members.items()
                ]
        elif row["state"] == "CLOSED":
            end = row["last_entry"]
            found += [
                spans.Finding(
                    ledger_id, end + 1, min(high, ID_MAX), member, spans.EXTRA, 0, "beyond the end"
                )
                for member, high in members.items()
                if high > end
            ]
    return spans.merged(found, 1)


def _queue(queue: Gateways, findings: Sequence[spans.Finding]) -> int:
    """Queue repairs, and return their number. Autorecovery reads fresh metadata before it copies
    entries. If copies diverge, an operator must decide which copy is right. Raises: JobFailed.
    """
    items = [
        {
            "ledger_id": found.ledger,
            "member": found.bookie,
            "ranges": [[found.first, found.last]],
            "survivors": found.survivors,
        }
        for found in findings
        if found.kind in (spans.MISSING, spans.CORRUPT) and found.survivors
    ]
    for at in range(0, len(items), _QUEUE_ITEMS):
        some = items[at : at + _QUEUE_ITEMS]
        try:
            queue.post("/v1/repairs", {"items": some})
        except QuorumLogError as error:
            raise job.JobFailed(f"the repair queue rejected items: {error}; try again") from None
    return len(items)


app = job.program("scrub", run, __doc__)

if __name__ == "__main__":
    app()
