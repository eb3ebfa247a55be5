"""`make scaling`: what so many bookies and gateways carry, and what gives first.

A model, not a measurement: CPU per entry and per question, as measured on one machine (docs/internals/journal/scaling.json says
where each figure is from), against the cores, disks and networks of a cluster. It takes load to be even, and bookies and
gateways to be a core each, which is what one process of them can use. docs/internals/scaling.md has its table.
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
"""Of a ledger's row in its life: create, name in its log, close, delete."""
_LOOKS: Final = 3
"""Of each member's collector at a deleted ledger."""
_LEDGERS_A_PAGE: Final = 100
_IDS_A_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is, and what it is to do. All but the counts are assumptions that options change."""

    bookies: int = 100
    gateways: int = 20
    metadata: int = 3
    """Processes of the metadata service, a core each."""
    database_cores: int = 4
    copies: int = 3
    entry: int = 1024
    """Bytes of an entry."""
    readers: float = 1.0
    """How often each entry is read, from bookies."""
    disk: float = 300.0
    """MB/s that a bookie's disk syncs."""
    network: float = 1250.0
    """MB/s of each host, each way."""
    roll: float = 1024.0
    """MB after which a log begins its next ledger; each ledger is deleted in the end."""
    ledgers: int = 10_000_000
    """In the database."""
    collect_s: float = 60.0
    """How often each bookie asks which ledgers name it (COLLECT_S)."""
    used: float = 0.7
    """The share of each resource that is planned with."""


Figures = Mapping[str, Mapping[str, float]]


def figures() -> Figures:
    """What was measured."""
    told: dict[str, dict[str, list[Any]]] = orjson.loads(FIGURES.read_bytes())
    return {kind: {name: each[0] for name, each in own.items()} for kind, own in told.items()}


def carried(cluster: Cluster, write: str, known: Figures) -> Mapping[str, float]:
    """The entries a second that each resource carries; nothing is left of one whose fixed part is too much."""
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
    """CPU seconds of the metadata service and of Postgres for a ledger's life."""
    looks = cluster.copies * _LOOKS / _LEDGERS_A_PAGE
    service = _CHANGES * metadata["change_ms"] + looks * metadata["proofs_ms"]
    database = _CHANGES * metadata["change_database_ms"] + looks * metadata["proofs_database_ms"]
    return service / 1e3, database / 1e3


def _idle(cluster: Cluster, metadata: Mapping[str, float]) -> tuple[float, float]:
    """Cores of the metadata service and of Postgres while nobody writes."""
    processes = cluster.bookies + cluster.gateways
    of_a_bookie = cluster.ledgers * cluster.copies / cluster.bookies
    pages = cluster.bookies * math.ceil(of_a_bookie / _IDS_A_PAGE) / cluster.collect_s
    service = processes * metadata["idle_process_share"] + pages * metadata["named_ms"] / 1e3
    return service, pages * metadata["named_database_ms"] / 1e3


def table(cluster: Cluster) -> str:
    """For people and for the page: a row for each resource, a column for each way of writing, what gives first in bold."""
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
            f"While nobody writes: {idle_service:.1f} cores of the metadata service, {idle_database:.2f} of"
            f" Postgres; {cluster.gateways} channels at each bookie, {cluster.bookies} at each gateway."
        ),
    ]
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    """Two digits that count: the model knows no more."""
    digits = 0 if value < 1 else 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def main(given: list[str] | None = None) -> None:
    """Print the table of a cluster."""
    options = {each.name: (each.default, "") for each in fields(Cluster)}
    cluster = Cluster(**vars(arguments("make scaling", __doc__, options, given)))
    sys.stdout.write(table(cluster))


if __name__ == "__main__":
    main()
