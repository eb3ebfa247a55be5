"""Plan repairs from findings of `scrub` and from lost bookies: which entries are copied where.

The plan never places two copies of a write set on one bookie, spreads bytes over bookies with room and
over zones, and repairs entries with the fewest copies first. Entries without a good copy are listed
apart (`action` is `unrecoverable`) and are never retried automatically; so are copies that differ
without damage (`operator`), because a person must decide which copy is right. Spark only plans:
`--apply` adds what can be repaired to the repair queue, whose workers read fresh metadata before they
copy anything.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pyspark.sql import DataFrame, SparkSession

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.ids import member_name
from quorumlog.spark.http import Gateways
from quorumlog.spark.jobs import job, scrub
from quorumlog.spark.jobs.spans import CORRUPT, DIVERGENT, MISSING, Finding

SCHEMA: Final = (
    "priority int, ledger long, first long, last long, member string, target string,"
    " sources array<string>, entries long, bytes long, survivors int, action string, reason string"
)
COPY: Final = "copy"
REPLACE: Final = "replace"
UNRECOVERABLE: Final = "unrecoverable"
OPERATOR: Final = "operator"
BLOCKED: Final = "no-bookie"

_QUEUE_ITEMS: Final = 1000


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One row of the plan: copy the entries that `member` lacks to `target`, from `sources`."""

    priority: int
    ledger: int
    first: int
    last: int
    member: str
    target: str | None
    sources: tuple[str, ...]
    entries: int
    bytes: int
    survivors: int
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoomyBookie:
    """A bookie that can take copies."""

    member: str
    zone: str
    free_bytes: int


def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    findings: DataFrame | None = None,
    metadata: str | None = None,
    apply: bool = False,
    dry_run: bool = False,
) -> job.JobResult:
    """Plan repairs. The frame holds the plan (`SCHEMA`), most urgent first.

    `findings`: of a scrub; without them a scrub runs first. `apply` needs `metadata`, the URLs of the
    metadata service, and does nothing in a dry run. Raises: JobFailed.
    """
    with job.gateways(gateway) as gateways:
        if apply and not metadata:
            raise job.JobFailed("--apply needs the metadata service: --metadata http://…")
        if findings is None:
            findings = scrub.run(spark, gateway).frame
        try:
            bookies = gateways.get("/v1/bookies")["bookies"]
            rows = {row["ledger_id"]: row for row in gateways.pages("/v1/ledgers", "ledgers")}
        except QuorumLogError as error:
            raise job.JobFailed(f"the cluster can't be read: {error}") from None
        steps = plan(
            [Finding(**{**row.asDict(), "detail": ""}) for row in findings.collect()], rows, bookies
        )
        actions: dict[str, int] = defaultdict(int)
        taken: dict[str, int] = defaultdict(int)
        for step in steps:
            actions[step.action] += 1
            if step.target is not None:
                taken[step.target] += step.bytes
        report: dict[str, Any] = {
            "job": "repair_plan",
            "dry_run": dry_run,
            "steps": len(steps),
            "actions": dict(sorted(actions.items())),
            "bytes": sum(step.bytes for step in steps),
            "bytes_by_target": dict(sorted(taken.items())),
            "unrecoverable": [
                {"ledger": s.ledger, "first": s.first, "last": s.last}
                for s in steps
                if s.action == UNRECOVERABLE
            ],
            "queued": 0,
        }
        if apply and not dry_run and metadata:
            try:
                with job.services(metadata) as queue:
                    report["queued"] = _queue(queue, steps)
            except QuorumLogError as error:
                raise job.JobFailed(f"the repair queue took nothing more: {error}") from None
        frame = spark.createDataFrame([tuple(asdict(step).values()) for step in steps], SCHEMA)
        return job.JobResult(frame, report, job.FOUND if steps else job.DONE)


def plan(
    findings: Iterable[Finding],
    rows: Mapping[int, Mapping[str, Any]],
    bookies: Iterable[Mapping[str, Any]],
) -> list[RepairStep]:
    """The steps, most urgent first. `rows` and `bookies` as the gateway shows them."""
    listed = list(bookies)
    lost = {bookie["id"] for bookie in listed if bookie["state"] == "lost"}
    rooms = [
        RoomyBookie(bookie["id"], bookie["zone"], bookie["free_bytes"])
        for bookie in listed
        if bookie["state"] == "writable"
    ]
    zones = {bookie["id"]: bookie["zone"] for bookie in listed}
    steps = []
    bad: dict[int, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.kind in (MISSING, CORRUPT, DIVERGENT) and finding.ledger in rows:
            bad[finding.ledger].append(finding)
    planned: dict[str, int] = defaultdict(int)
    for ledger_id, row in sorted(rows.items()):
        per_entry = _entry_bytes(row)
        steps += [_mend(row, finding, lost, per_entry) for finding in bad.get(ledger_id, ())]
        for fragment, first, last in _closed_fragments(row):
            # A bookie that is in the fragment, or will be, gets no second copy.
            taken = {member_name(member) for member in fragment}
            for member in fragment:
                if member in lost:
                    free = [room for room in rooms if member_name(room.member) not in taken]
                    step = _replace(
                        row, fragment, (first, last), member, lost, free, zones, planned, per_entry
                    )
                    steps.append(step)
                    if step.target is not None:
                        planned[step.target] += step.bytes
                        taken.add(member_name(step.target))
    steps.sort(key=lambda step: (step.survivors, step.ledger, step.first, step.member))
    return [replace(step, priority=rank) for rank, step in enumerate(steps)]


def _mend(row: Mapping[str, Any], finding: Finding, lost: set[str], per_entry: float) -> RepairStep:
    """Refill a live member that lacks entries, in its place."""
    sources = tuple(
        member
        for member in _fragment_of(row, finding.first)
        if member != finding.bookie and member not in lost
    )
    entries = finding.last - finding.first + 1
    action = COPY
    if finding.survivors == 0:
        action = UNRECOVERABLE
    elif finding.kind == DIVERGENT:
        action = OPERATOR
    target = finding.bookie if action == COPY else None
    return RepairStep(
        0,
        finding.ledger,
        finding.first,
        finding.last,
        finding.bookie,
        target,
        sources if action != UNRECOVERABLE else (),
        entries,
        round(entries * per_entry) if action == COPY else 0,
        finding.survivors,
        action,
        finding.kind,
    )


def _replace(
    row: Mapping[str, Any],
    fragment: Sequence[str],
    span: tuple[int, int],
    member: str,
    lost: set[str],
    rooms: Sequence[RoomyBookie],
    zones: Mapping[str, str],
    planned: Mapping[str, int],
    per_entry: float,
) -> RepairStep:
    """Replace a lost member of this fragment by a bookie that is not in the fragment."""
    first, last = span
    sources = tuple(other for other in fragment if other not in lost)
    # Each member holds Qw of E entries.
    share = row["write_quorum"] / row["ensemble_size"]
    entries = round((last - first + 1) * share)
    size = round(entries * per_entry)
    used = {zones.get(other) for other in sources}
    candidates = [room for room in rooms if room.free_bytes > planned.get(room.member, 0) + size]
    # Prefer another zone, then the most free room.
    best = min(
        candidates,
        key=lambda room: (
            room.zone in used,
            planned.get(room.member, 0) - room.free_bytes,
            room.member,
        ),
        default=None,
    )
    survivors = min(len(sources), row["write_quorum"])
    action = REPLACE
    if not sources and entries:
        action = UNRECOVERABLE
    elif best is None:
        action = BLOCKED
    return RepairStep(
        0,
        row["ledger_id"],
        first,
        last,
        member,
        best.member if best is not None and action == REPLACE else None,
        sources,
        entries,
        size if action == REPLACE else 0,
        survivors,
        action,
        "lost",
    )


def _closed_fragments(row: Mapping[str, Any]) -> Iterable[tuple[Sequence[str], int, int]]:
    """Members, first and last entry of each closed fragment."""
    fragments = row["fragments"]
    for index, fragment in enumerate(fragments):
        if index + 1 < len(fragments):
            last = fragments[index + 1]["first_entry"] - 1
        elif row["state"] == "CLOSED":
            last = max(row["last_entry"], fragment["first_entry"] - 1)
        else:
            continue
        yield fragment["bookies"], fragment["first_entry"], last


def _fragment_of(row: Mapping[str, Any], entry: int) -> Sequence[str]:
    members: Sequence[str] = ()
    for fragment in row["fragments"]:
        if fragment["first_entry"] <= entry:
            members = fragment["bookies"]
    return members


def _entry_bytes(row: Mapping[str, Any]) -> float:
    """The mean size of an entry; 0 where it is unknown because the ledger is not closed."""
    if row["length"] is None or row["last_entry"] is None or row["last_entry"] < 0:
        return 0.0
    return float(row["length"]) / (int(row["last_entry"]) + 1)


def _queue(queue: Gateways, steps: Iterable[RepairStep]) -> int:
    """Queue what can be repaired; the queue merges items of one member of one ledger."""
    items = [
        {
            "ledger_id": step.ledger,
            "member": step.member,
            "ranges": [[step.first, max(step.first, step.last)]],
            "survivors": step.survivors,
        }
        for step in steps
        if step.action in (COPY, REPLACE)
    ]
    for at in range(0, len(items), _QUEUE_ITEMS):
        queue.request(
            "POST",
            "/v1/repairs",
            value={"items": items[at : at + _QUEUE_ITEMS]},
            is_repeatable=True,
        )
        job.say(f"repair_plan: {min(at + _QUEUE_ITEMS, len(items))} of {len(items)} queued")
    return len(items)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def _main(
    gateway: job.GatewayOption,
    findings: Annotated[
        Path | None,
        typer.Option(help="The file of `scrub --findings`; default: run a scrub first."),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="URLs of the metadata service, for --apply.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Queue what can be repaired.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the plan, as lines of JSON.")] = None,
    dry_run: job.DryRunOption = False,
    as_json: job.JsonOption = False,
) -> None:
    if apply and not metadata:
        raise typer.BadParameter("--apply needs the metadata service: --metadata http://…")

    def work(spark: SparkSession) -> job.JobResult:
        known = None if findings is None else scrub.load(spark, findings)
        result = run(
            spark, gateway, findings=known, metadata=metadata, apply=apply, dry_run=dry_run
        )
        if output is not None and not dry_run:
            lines = [json.dumps(row.asDict()) for row in result.frame.collect()]
            output.write_text("".join(f"{line}\n" for line in lines))
        return result

    job.main("repair_plan", work, as_json=as_json)


if __name__ == "__main__":
    app()
