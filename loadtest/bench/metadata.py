"""The rates of the metadata service with few and with many ledgers. LEDGERS= sets the numbers.

The service's Postgres has its data on the clone's disk, and syncs. All ledgers are copies of one
closed ledger, inserted by SQL in bulk. Their members are on a hundred bookies in turn, and each has
two change tokens. If the cost of a request grows with the number of ledgers, it lacks an index or
reads too much, and does not reach its goal.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import asyncpg

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures, Meter, repeated
from loadtest.bench.plan import TIME, Columns, Plan, Work
from loadtest.cluster import running
from loadtest.program import Teller
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowName
from quorumlog.wire.log_bodies import LedgerIds

_FIRST: Final = 1_000_000
_BOOKIES: Final = 100
_STEP: Final = 100_000
"""Ledgers that one statement inserts."""
_IN_FLIGHT: Final = 8
_PAGE: Final = 100
_GROWS: Final = 3.0
"""Highest ratio of a request's CPU with the most ledgers to that with the fewest: above 1, since
caches are colder (chosen by judgement)."""
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
"""Indexes to drop before the inserts and create again, which is faster than updating them."""
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


_DRAFT: Final = LedgerMetadata(
    ledger_id=-1,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("bookie-1@1", "bookie-2@1", "bookie-3@1")),),
    ledger_key=bytes(32),
)


async def _fill(dsn: str, ledger_id: int, count: int, teller: Teller) -> None:
    """Insert `count` copies of a ledger's row."""
    connection = await asyncpg.connect(dsn)
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
            teller.show("ledgers are filled in", last + 1 - _FIRST, count)
        for statement in (*(made for _, made in indexes), *_AFTER):
            await connection.execute(statement)
    finally:
        await connection.close()


@dataclass(frozen=True, slots=True)
class Service:
    """A metadata service with many ledgers. Requests are for random ledgers."""

    client: MetadataClient
    count: int
    meter: Meter
    seconds: float
    drawn: random.Random = field(default_factory=lambda: random.Random(1))

    async def answers(self, question: str) -> Figures:
        """Measure one kind of request, sent repeatedly."""
        ask = partial(QUESTIONS[question], self)
        await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))  # open the connections first
        return await repeated(self.meter, [ask] * _IN_FLIGHT, self.seconds)

    def some(self) -> int:
        """The id of a random ledger."""
        return self.drawn.randrange(_FIRST, _FIRST + self.count)

    def page(self) -> dict[int, tuple[RowName, ...]]:
        """A page of random ledgers and versions, as a bookie's collector sends it."""
        ids = (self.some() for _ in range(_PAGE))
        return {each: (RowName(1, each.to_bytes(16, "big")),) for each in ids}

    def bookie(self) -> str:
        """The name of a random bookie."""
        return f"bookie-{self.drawn.randrange(_BOOKIES)}"

    def named(self, limit: int) -> Awaitable[object]:
        """Request a page of ledgers that reference a random bookie."""
        query = {"limit": str(limit), "after": str(self.some())}
        path = f"/v1/bookies/{self.bookie()}/ledgers"
        return self.client.ask("GET", path, gives=LedgerIds, query=query)


QUESTIONS: Final[Mapping[str, Callable[[Service], Awaitable[object]]]] = {
    "create": lambda s: s.client.create(_DRAFT),
    "get": lambda s: s.client.get(s.some()),
    "get, proven": lambda s: s.client.get(s.some(), proof=True),
    "heads of 100": lambda s: s.client.heads([s.some() for _ in range(_PAGE)]),
    "list 100": lambda s: s.client.list(after=s.some(), limit=_PAGE),
    "list 100 of a bookie": lambda s: s.client.list(bookie=s.bookie(), after=s.some(), limit=_PAGE),
    "list 100 CLOSED": lambda s: s.client.list(state=State.CLOSED, after=s.some(), limit=_PAGE),
    "list OPEN, few": lambda s: s.client.list(state=State.OPEN, after=_FIRST, limit=_PAGE),
    "sweep: orphans": lambda s: s.client.ask(
        "GET", "/v1/orphans", gives=LedgerIds, query={"older_than_s": "3600"}
    ),
    "collector: proofs of 100": lambda s: s.client.proofs(s.page(), "bookie-1"),
    "collector: 1,000 ids of a bookie": lambda s: s.named(1000),
    "uses of a bookie": lambda s: s.client.uses("bookie-1"),
}
"""The requests that services send to the metadata service, by name."""


@asynccontextmanager
async def _filled(
    folder: Path, seconds: float, *, count: int, teller: Teller
) -> AsyncIterator[Service]:
    with TemporaryDirectory(prefix="metadata-", dir=folder, ignore_cleanup_errors=True) as own:
        async with (
            running(None, bookies=3, gateways=1, data=Path(own)) as cluster,
            cluster.session() as session,
        ):
            # Autorecovery would treat the bookies that do not run as lost.
            for name in [each for each in cluster.names if each.startswith("autorecovery")]:
                await cluster.stop(name)
            client = MetadataClient([cluster.url("metadata-1")], session, deadline_s=60)
            row = await client.create(_DRAFT)
            _, closed = await client.cas(row.closed(last_entry=99, length=102_400))
            assert closed is not None
            dsn = (cluster.data / "run" / "postgres_dsn").read_text()
            await _fill(dsn, closed.ledger_id, count, teller)
            pids = cluster.pids({"metadata": "service", "postgres": "database"})
            meter = Meter(pids, families=("database",))
            yield Service(client, count, meter, seconds)


OPTIONS: Final = {
    "ledgers": (
        (10_000, 10_000_000),
        "numbers of ledgers; the costs with the last number are compared with the first",
    ),
    "time": TIME,
}
_FIGURES: Final = ("entries/s", "p50 ms", "service us", "database us", "all us")


def plan(asked: argparse.Namespace, teller: Teller) -> Plan:
    """Plan all requests with each number of ledgers. `service us` is the CPU per request."""
    names = {f"{count:,} ledgers": count for count in asked.ledgers}
    first, *_, last = (*names, *names)
    return Plan(
        [Work(name, what, Service.answers, (what,)) for name in names for what in QUESTIONS],
        {name: partial(_filled, count=count, teller=teller) for name, count in names.items()},
        (Columns("questions", _FIGURES),),
        asked.time,
        goals=[
            Goal(f"{last}: {what}", "all us", "<=", _GROWS, (f"{first}: {what}",))
            for what in QUESTIONS
            if last != first
        ],
        is_apart=True,
        loop=asyncio.new_event_loop,
    )
