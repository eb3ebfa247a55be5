"""`make scaling`: estimates the load that a cluster of a given size can carry, and its first
bottleneck.

This is a model, not a measurement. It compares the CPU per entry and per request, measured on one
machine (docs/internals/journal/scaling.json has the source of each figure), with the cores, disks and
networks of a cluster. It assumes even load, and one core for each bookie and gateway, since one
process can't use more. docs/internals/scaling.md has the table.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import orjson

from loadtest.program import arguments
from services.local.config import ROOT

FIGURES: Final = ROOT / "docs" / "internals" / "journal" / "scaling.json"
WRITES: Final = ("one at a time", "64 in flight", "raw batches of 1,000")
_MEASURED_BYTES: Final = 1024
_MB: Final = 1e6
_CHANGES: Final = 4
"""Changes of a ledger's metadata: it is created, added to its log, closed and deleted."""
_LOOKS: Final = 3
"""How often the collector of each member reads the metadata of a deleted ledger."""
_LEDGERS_A_PAGE: Final = 100
_IDS_A_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Cluster:
    """The size and the load of a cluster. Each value can be set by an option."""

    bookies: int = 100
    gateways: int = 20
    metadata: int = 3
    """Processes of the metadata service, with one core each."""
    database_cores: int = 4
    copies: int = 3
    entry: int = 1024
    """Bytes of an entry."""
    readers: float = 1.0
    """How often each entry is read from bookies."""
    disk: float = 300.0
    """MB/s that a bookie's disk can write and sync."""
    network: float = 1250.0
    """MB/s of each host in each direction."""
    roll: float = 1024.0
    """MB after which a log rolls to its next ledger. Each ledger is deleted eventually."""
    ledgers: int = 10_000_000
    """Number of ledgers in the database."""
    collect_s: float = 60.0
    """Interval at which each bookie lists its ledgers in the metadata (COLLECT_S)."""
    used: float = 0.7
    """The share of each resource that the cluster may use."""


Figures = Mapping[str, Mapping[str, float]]


def figures() -> Figures:
    """The measured figures, without their sources."""
    reported: dict[str, dict[str, list[Any]]] = orjson.loads(FIGURES.read_bytes())
    return {kind: {name: each[0] for name, each in own.items()} for kind, own in reported.items()}


def carried(cluster: Cluster, write: str, known: Figures) -> Mapping[str, float]:
    """Entries per second that each resource can carry; 0 if its fixed load already exceeds it."""
    megabytes = cluster.entry / _MB
    more = (cluster.entry - _MEASURED_BYTES) / _MEASURED_BYTES
    batch, reads = known[WRITES[-1]], known["reads"]
    gateway_s = (known[write]["gateway_us"] + more * batch["gateway_us"]) / 1e6
    bookie_s = (known[write]["bookie_us"] + more * batch["bookie_us"]) / 1e6
    gateway_s += cluster.readers * megabytes * reads["gateway_ms_per_mb"] / 1e3
    bookie_s = (
        cluster.copies * bookie_s + cluster.readers * megabytes * reads["bookie_ms_per_mb"] / 1e3
    )
    service_s, database_s = _of_a_ledger(cluster, known["metadata"])
    rolls = megabytes / cluster.roll
    idle_service, idle_database = _idle(cluster, known["metadata"])
    sent = cluster.copies + cluster.readers
    cores = cluster.used
    return {
        "CPU of the gateways": cores * cluster.gateways / gateway_s,
        "CPU of the bookies": cores * cluster.bookies / bookie_s,
        "disks of the bookies": cores * cluster.bookies * cluster.disk / (cluster.copies * megabytes),
        "network of the gateways": cores * cluster.gateways * cluster.network / (sent * megabytes),
        "network of the bookies": cores * cluster.bookies * cluster.network / (max(cluster.copies, cluster.readers) * megabytes),
        "CPU of the metadata service": max(0.0, cores * cluster.metadata - idle_service) / (rolls * service_s),
        "CPU of Postgres": max(0.0, cores * cluster.database_cores - idle_database) / (rolls * database_s),
    }  # fmt: skip


def _of_a_ledger(cluster: Cluster, metadata: Mapping[str, float]) -> tuple[float, float]:
    """CPU seconds of the metadata service and of Postgres for the whole life of a ledger."""
    looks = cluster.copies * _LOOKS / _LEDGERS_A_PAGE
    service = _CHANGES * metadata["change_ms"] + looks * metadata["proofs_ms"]
    database = _CHANGES * metadata["change_database_ms"] + looks * metadata["proofs_database_ms"]
    return service / 1e3, database / 1e3


def _idle(cluster: Cluster, metadata: Mapping[str, float]) -> tuple[float, float]:
    """Cores that the metadata service and Postgres use without any writes."""
    processes = cluster.bookies + cluster.gateways
    of_a_bookie = cluster.ledgers * cluster.copies / cluster.bookies
    pages = cluster.bookies * math.ceil(of_a_bookie / _IDS_A_PAGE) / cluster.collect_s
    service = processes * metadata["idle_process_share"] + pages * metadata["named_ms"] / 1e3
    return service, pages * metadata["named_database_ms"] / 1e3


def table(cluster: Cluster) -> str:
    """The Markdown table: rows are resources, columns ways of writing; bottlenecks are bold."""
    known = figures()
    columns = {write: carried(cluster, write, known) for write in WRITES}
    lines = [
        "| entries/s carried by | " + " | ".join(WRITES) + " |",
        "|---|" + "---|" * len(WRITES),
    ]
    for resource in columns[WRITES[0]]:
        cells = []
        for found in columns.values():
            shown = _rounded(found[resource])
            cells.append(f"**{shown}**" if found[resource] == min(found.values()) else shown)
        lines.append(f"| {resource} | " + " | ".join(cells) + " |")
    idle_service, idle_database = _idle(cluster, known["metadata"])
    lines += [
        "",
        (
            f"While no client writes, the metadata service uses {idle_service:.1f} cores, and Postgres"
            f" {idle_database:.2f}. A bookie has {cluster.gateways} channels, a gateway {cluster.bookies}."
        ),
    ]
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    """Round to two significant digits, which is the accuracy of the model."""
    digits = 0 if value < 1 else 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def main(given: list[str] | None = None) -> None:
    """Print the table for a cluster that the options describe."""
    options = {each.name: (each.default, "") for each in fields(Cluster)}
    cluster = Cluster(**vars(arguments("make scaling", __doc__, options, given)))
    sys.stdout.write(table(cluster))


if __name__ == "__main__":
    main()
