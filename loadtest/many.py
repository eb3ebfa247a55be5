"""`make many`: what an audit and `cluster status` cost with many ledgers in the metadata.

Real processes; the ledgers are rows copied from one that was made and closed empty, so nothing is on
the bookies and what is measured is the metadata's part. Each number of ledgers gets a cluster of its
own. Costs that are per ledger should not grow with their number.
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Final

import asyncpg

from loadtest.cluster import running
from loadtest.heal import Healers
from loadtest.stores import Stores, store_servers
from loadtest.waiting import until
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError

_SETTINGS: Final = {
    "AUDIT_S": "0.5",
    "ABANDONED_S": "3600",
    "SILENT_S": "3600",
    "IN_RECOVERY_S": "3600",
}
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What was measured with so many ledgers, in seconds."""

    ledgers: int
    status_s: float
    """The median of `cluster status`."""
    queued_status_s: float
    """The same while all of them are in the repair queue."""
    idle_audit_s: float
    lost_audit_s: float
    """An audit that finds a lost bookie and queues all of its ledgers."""
    check_s: float
    """A look at every ledger's copies; they are empty."""

    def line(self) -> str:
        """For people."""
        return (
            f"{self.ledgers} ledgers: cluster status {self.status_s * 1e3:.0f} ms"
            f" ({self.queued_status_s * 1e3:.0f} ms with all of them queued), idle audit"
            f" {self.idle_audit_s * 1e3:.0f} ms, audit of a lost bookie"
            f" {self.lost_audit_s:.2f} s ({self.lost_audit_s / self.ledgers * 1e6:.0f} us a ledger),"
            f" check {self.check_s:.2f} s ({self.check_s / self.ledgers * 1e6:.0f} us a ledger)"
        )


async def measured(stores: Stores, count: int) -> Cost:
    """The costs with so many ledgers."""
    async with (
        running(
            stores, bookies=4, gateways=1, environment=_SETTINGS, lost_bookie_delay_s=_HOURS_S
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        healers = Healers(cluster)
        ledger = await client.create_ledger()
        row = await ledger.close()
        victim = row["fragments"][0]["bookies"][0].partition("@")[0]
        connection = await asyncpg.connect(stores.postgres_dsn)
        await connection.execute(_COPY.format(count=count, ledger_id=ledger.ledger_id))
        await connection.close()
        await healers.ask("PATCH", "/v1/settings", {"paused": True})

        await healers.ask("POST", "/v1/checks")

        async def checked() -> float:
            told = await healers.ask("GET", "/v1/status")
            return float(told["check_s"]) if told["checked"] > count else 0.0

        check_s = await until(checked, "all are checked", _HOURS_S, passing=(QuorumLogError,))
        idle_s = float((await healers.ask("GET", "/v1/status"))["audit_s"])
        status_s = await _status_s(client)
        await cluster.kill(victim)
        await healers.ask("PUT", "/v1/lost-bookie-delay", {"seconds": 0})

        async def queued() -> float:
            told = await healers.ask("GET", "/v1/status")
            is_over = told["queue"]["items"] > count and told["audit_s"] > 2 * idle_s
            return float(told["audit_s"]) if is_over else 0.0

        lost_s = await until(queued, "all are queued", _HOURS_S, passing=(QuorumLogError,))
        return Cost(count, status_s, await _status_s(client), idle_s, lost_s, check_s)


async def _status_s(client: Client) -> float:
    times = []
    for _ in range(_STATUS_ASKED):
        began = time.perf_counter()
        await client.cluster()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure; the last line compares the first number of ledgers with the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledgers", type=int, nargs="*", default=[10_000, 100_000])
    given = parser.parse_args()
    costs = []
    with store_servers() as servers:
        for count in given.ledgers:
            cost = asyncio.run(measured(servers.fresh(), count))
            costs.append(cost)
            sys.stdout.write(cost.line() + "\n")
            sys.stdout.flush()
    first, last = costs[0], costs[-1]
    sys.stdout.write(
        f"many: from {first.ledgers} to {last.ledgers} ledgers an audit's cost per ledger grows by"
        f" {last.lost_audit_s / last.ledgers / (first.lost_audit_s / first.ledgers):.2f}, a check's by"
        f" {last.check_s / last.ledgers / (first.check_s / first.ledgers):.2f}, cluster status from"
        f" {first.status_s * 1e3:.0f} to {last.status_s * 1e3:.0f} ms\n"
    )


if __name__ == "__main__":
    main()
