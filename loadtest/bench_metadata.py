"""`make bench-metadata`: what the metadata service does in a second with few and with many ledgers.

Its Postgres is a server of its own on the clone's disk, and syncs. The rows are copies of one that a client made and
closed, filled in by SQL in bulk: members on a hundred bookies in turn, two tokens of changes for each ledger. A question
whose cost grows with the number of ledgers has no index, or asks for too much.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter as clock
from typing import Final

import asyncpg
import orjson
import psutil

from loadtest.cluster import running
from loadtest.stores import Stores, store_servers
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowName
from quorumlog.wire.log_bodies import LedgerIds
from services.local.config import ROOT

_FIRST: Final = 1_000_000
_BOOKIES: Final = 100
_STEP: Final = 100_000
"""Ledgers of one statement."""
_IN_FLIGHT: Final = 8
_PAGE: Final = 100
_GROWS: Final = 3.0
"""A question that takes more than that many times the CPU with the most ledgers is named (taste: caches are colder)."""
_BY_ID: Final = "lpad(to_hex({n}), 32, '0')::uuid"

_BEFORE: Final = """
SET session_replication_role = replica;
SET synchronous_commit = off;
ALTER TABLE ledger_members DROP CONSTRAINT ledger_members_pkey;
"""
_INDEXES: Final = """
SELECT indexname, indexdef FROM pg_indexes
    WHERE tablename IN ('ledgers', 'ledger_members') AND indexname NOT LIKE '%_pkey'
"""
"""An index is made faster than it is kept."""
_LEDGERS: Final = """
INSERT INTO ledgers (ledger_id, version, body, attempt)
    SELECT n, l.version, jsonb_set(l.body, '{{fragments,0,bookies}}', jsonb_build_array(
        'bookie-' || n % {bookies} || '@1', 'bookie-' || (n + 1) % {bookies} || '@1', 'bookie-' || (n + 2) % {bookies} || '@1')),
        {attempt}
    FROM ledgers l, generate_series({first}, {last}) n WHERE l.ledger_id = {ledger_id};
INSERT INTO ledger_members (name, ledger_id, incarnation)
    SELECT 'bookie-' || (n + k) % {bookies}, n, 1 FROM generate_series({first}, {last}) n, generate_series(0, 2) k;
INSERT INTO attempts (attempt, target)
    SELECT {attempt}, 'ledger ' || n FROM generate_series({first}, {last}) n;
INSERT INTO attempts (attempt, target)
    SELECT {created}, 'create ledger ' || n FROM generate_series({first}, {last}) n;
"""
_AFTER: Final = (
    "ALTER TABLE ledger_members ADD PRIMARY KEY (name, ledger_id, incarnation)",
    "VACUUM ANALYZE",
    "CHECKPOINT",
)

Ask = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one question."""

    per_s: float
    p50_ms: float
    service_ms: float
    """CPU of the metadata service for one question: it holds on a busy machine."""
    database_ms: float
    """CPU of Postgres."""

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.per_s:,.0f} a second, p50 {self.p50_ms:.2f} ms, CPU of the service"
            f" {self.service_ms:.2f} ms, of Postgres {self.database_ms:.2f} ms"
        )


async def _fill(stores: Stores, ledger_id: int, count: int) -> None:
    """Copy a ledger's row."""
    connection = await asyncpg.connect(stores.postgres_dsn)
    try:
        await connection.execute(_BEFORE)
        indexes = await connection.fetch(_INDEXES)
        for name, _ in indexes:
            await connection.execute(f"DROP INDEX {name}")
        for first in range(_FIRST, _FIRST + count, _STEP):
            last = min(first + _STEP, _FIRST + count) - 1
            await connection.execute(
                _LEDGERS.format(
                    first=first,
                    last=last,
                    ledger_id=ledger_id,
                    bookies=_BOOKIES,
                    attempt=_BY_ID.format(n="n"),
                    created=_BY_ID.format(n="n + (1::bigint << 62)"),
                )
            )
            _say(f"{last + 1 - _FIRST:,} of {count:,} ledgers are filled in")
        for statement in (*(made for _, made in indexes), *_AFTER):
            await connection.execute(statement)
    finally:
        await connection.close()


def _questions(client: MetadataClient, count: int) -> Mapping[str, Ask]:
    """What services ask, of ledgers drawn at random."""
    drawn = random.Random(1)

    def some() -> int:
        return drawn.randrange(_FIRST, _FIRST + count)

    def page() -> dict[int, tuple[RowName, ...]]:
        ids = (some() for _ in range(_PAGE))
        return {each: (RowName(1, each.to_bytes(16, "big")),) for each in ids}

    def bookie() -> str:
        return f"bookie-{drawn.randrange(_BOOKIES)}"

    def named(limit: int) -> Awaitable[object]:
        query = {"limit": str(limit), "after": str(some())}
        path = f"/v1/bookies/{bookie()}/ledgers"
        return client.ask("GET", path, gives=LedgerIds, query=query)

    return {
        "create": lambda: client.create(_DRAFT),
        "get": lambda: client.get(some()),
        "get, proven": lambda: client.get(some(), proof=True),
        "heads of 100": lambda: client.heads([some() for _ in range(_PAGE)]),
        "list 100": lambda: client.list(after=some(), limit=_PAGE),
        "list 100 of a bookie": lambda: client.list(bookie=bookie(), after=some(), limit=_PAGE),
        "list 100 CLOSED": lambda: client.list(state=State.CLOSED, after=some(), limit=_PAGE),
        "list OPEN, few": lambda: client.list(state=State.OPEN, after=_FIRST, limit=_PAGE),
        "sweep: orphans": lambda: client.ask(
            "GET", "/v1/orphans", gives=LedgerIds, query={"older_than_s": "3600"}
        ),
        "collector: proofs of 100": lambda: client.proofs(page(), "bookie-1"),
        "collector: 1,000 ids of a bookie": lambda: named(1000),
        "uses of a bookie": lambda: client.uses("bookie-1"),
    }


def _cpu_s(service: int) -> tuple[float, float]:
    """Of the service and of Postgres until now."""
    database = [p for p in psutil.Process().children(recursive=True) if p.name() == "postgres"]
    taken = [[p.cpu_times() for p in group] for group in ([psutil.Process(service)], database)]
    mine, its = (sum(each.user + each.system for each in times) for times in taken)
    return mine, its


async def _rate(ask: Ask, service: int, seconds: float) -> Rate:
    times_s: list[float] = []

    async def work() -> None:
        end = clock() + seconds
        while (began := clock()) < end:
            await ask()
            times_s.append(clock() - began)

    await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))  # each connection is there
    before, began = _cpu_s(service), clock()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    took_s, after = clock() - began, _cpu_s(service)
    count = len(times_s)
    per_ms = [(now - then) / count * 1e3 for then, now in zip(before, after, strict=True)]
    return Rate(count / took_s, statistics.median(times_s) * 1e3, *per_ms)


async def measured(stores: Stores, count: int, seconds: float) -> Mapping[str, Rate]:
    """The rates with so many ledgers."""
    async with running(stores, bookies=3, gateways=1) as cluster, cluster.session() as session:
        # It would take the bookies that rows name and nobody runs for lost.
        for name in [each for each in cluster.names if each.startswith("autorecovery")]:
            await cluster.stop(name)
        client = MetadataClient([cluster.url("metadata-1")], session, deadline_s=60)
        row = await client.create(_DRAFT)
        _, closed = await client.cas(row.closed(last_entry=99, length=102_400))
        assert closed is not None
        await _fill(stores, closed.ledger_id, count)
        rates = {}
        for what, ask in _questions(client, count).items():
            rates[what] = await _rate(ask, cluster.pid("metadata-1"), seconds)
            _say(f"{count:,} ledgers, {what}: {rates[what]}")
        return rates


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(given: list[str] | None = None) -> None:
    """Measure each number of ledgers; the last lines compare the first with the last one."""
    parser = argparse.ArgumentParser(prog="make bench-metadata", description=__doc__)
    parser.add_argument("ledgers", type=int, nargs="*", default=[10_000, 10_000_000])
    parser.add_argument("--time", type=float, default=3.0, help="seconds of a question")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(given)
    found: dict[int, Mapping[str, Rate]] = {}
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    for count in asked.ledgers:
        with (
            TemporaryDirectory(prefix="metadata-", dir=folder) as own,
            store_servers(Path(own)) as servers,
        ):
            found[count] = asyncio.run(measured(servers.fresh(), count, asked.time))
    if asked.json:
        shown = {
            str(count): {what: asdict(rate) for what, rate in rates.items()}
            for count, rates in found.items()
        }
        sys.stdout.write(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    first, last = found[asked.ledgers[0]], found[asked.ledgers[-1]]
    for what, rate in first.items():
        before_ms, after_ms = (each.service_ms + each.database_ms for each in (rate, last[what]))
        note = " GROWS" if after_ms > _GROWS * before_ms else ""
        sys.stdout.write(f"{what}: {rate}; then {last[what]}: {after_ms / before_ms:.1f} x{note}\n")


_DRAFT: Final = LedgerMetadata(
    ledger_id=-1,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")),),
)

if __name__ == "__main__":
    main()
