"""The cost of an audit and of `cluster status` with many ledgers in the metadata. LEDGERS= sets the
numbers.

The processes are real. The ledgers are copies of the metadata of one empty, closed ledger. The
bookies have no entries of these ledgers, so the benchmark measures the metadata's part of the cost.
Each number of ledgers gets a new cluster. The cost per ledger should not grow with the number of
ledgers.
"""

import argparse
import asyncio
import statistics
import time
from typing import Final

import asyncpg

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures
from loadtest.bench.plan import Columns, Plan, Work, cluster_of
from loadtest.cluster import Cluster
from loadtest.heal import PATIENT, Healers
from loadtest.program import Teller
from loadtest.waiting import until
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError

_COPY: Final = """
ALTER TABLE ledgers DISABLE TRIGGER announce_ledger;
INSERT INTO ledgers (ledger_id, version, body)
    SELECT n, l.version, l.body FROM ledgers l, generate_series(1000000, 999999 + {count}) n
    WHERE l.ledger_id = {ledger_id};
INSERT INTO ledger_members (name, ledger_id, incarnation)
    SELECT m.name, n, m.incarnation
    FROM ledger_members m, generate_series(1000000, 999999 + {count}) n
    WHERE m.ledger_id = {ledger_id};
ALTER TABLE ledgers ENABLE TRIGGER announce_ledger;
ANALYZE;
"""
_HOURS_S: Final = 3600.0
_STATUS_ASKED: Final = 20
_GROWS: Final = 2.0
"""How many times higher the cost per ledger may be with the most ledgers (by judgement)."""


async def _measured(cluster: Cluster, count: int) -> Figures:
    """Measure the costs with `count` ledgers."""
    dsn = (cluster.data / "run" / "postgres_dsn").read_text()
    healers = Healers(cluster)
    async with Client(*cluster.gateways) as client:
        ledger = await client.create_ledger()
        row = await ledger.close()
        victim = row["fragments"][0]["bookies"][0].partition("@")[0]
        connection = await asyncpg.connect(dsn)
        await connection.execute(_COPY.format(count=count, ledger_id=ledger.ledger_id))
        await connection.close()
        await healers.ask("PATCH", "/v1/settings", {"paused": True})
        await healers.ask("POST", "/v1/checks")

        async def checked() -> float:
            reported = await healers.ask("GET", "/v1/status")
            return float(reported["check_s"]) if reported["checked"] > count else 0.0

        check_s = await until(checked, "all are checked", _HOURS_S, passing=(QuorumLogError,))
        idle_s = float((await healers.ask("GET", "/v1/status"))["audit_s"])
        status_s = await _status_s(client)
        await cluster.kill(victim)
        await healers.ask("PUT", "/v1/lost-bookie-delay", {"seconds": 0})

        async def queued() -> float:
            reported = await healers.ask("GET", "/v1/status")
            is_over = reported["queue"]["items"] > count and reported["audit_s"] > 2 * idle_s
            return float(reported["audit_s"]) if is_over else 0.0

        lost_s = await until(queued, "all are queued", _HOURS_S, passing=(QuorumLogError,))
        return {
            "cluster status ms": status_s * 1e3,
            "with all queued ms": await _status_s(client) * 1e3,
            "idle audit ms": idle_s * 1e3,
            "audit of a lost bookie s": lost_s,
            "audit us": lost_s / count * 1e6,
            "check of all copies s": check_s,
            "check us": check_s / count * 1e6,
        }


async def _status_s(client: Client) -> float:
    times = []
    for _ in range(_STATUS_ASKED):
        began = time.perf_counter()
        await client.cluster()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


OPTIONS: Final = {"ledgers": ((10_000, 100_000), "numbers of ledgers")}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan each number of ledgers. Goals compare the cost per ledger of the last and the first."""
    names = {f"{count:,} ledgers": count for count in asked.ledgers}
    first, *_, last = (*names, *names)
    start = cluster_of(bookies=4, gateways=1, environment=PATIENT, lost_bookie_delay_s=_HOURS_S)
    return Plan(
        [Work(name, "costs", _measured, (count,)) for name, count in names.items()],
        dict.fromkeys(names, start),
        [Columns("us: of a ledger", is_turned=True)],
        goals=[
            Goal(f"{last}: costs", figure, "<=", _GROWS, (f"{first}: costs",))
            for figure in ("audit us", "check us")
            if last != first
        ],
        is_apart=True,
        loop=asyncio.new_event_loop,
    )
